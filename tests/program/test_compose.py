"""Plans of one program: composed of the same, which is data, and of what was traced before."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cjax
from cjax.pipeline.schedule import build
from cjax.plan import Plan
from cjax.planner.choice.decide import Decision
from cjax.planner.choice.search import Found
from cjax.program import compose as composing
from cjax.program.compose import MOST_REFUSED, compose

from .conftest import make, rows


@pytest.fixture
def runs() -> list[int]:
    return []


@pytest.fixture
def counted(runs: list[int]) -> cjax.Program:
    def loss(model: Any, batch: Any) -> jax.Array:
        runs.append(len(batch["x"]))
        return jnp.square(model(batch["x"]) - batch["y"]).mean()

    return make("data=8", loss=loss, batch=rows(32))


def test_plans_share_what_was_traced(counted: cjax.Program, runs: list[int]) -> None:
    runs.clear()
    for plan in ("zero=3", "tensor=2", "tensor=2d:4", "auto"):
        counted.replan(plan)
    assert not runs
    counted.replan("tensor=2 microbatches=2")
    first = list(runs)
    assert first and len(set(first)) == len(first), "a number of rows, once"
    counted.replan("tensor=4 microbatches=2")
    assert runs[: len(first)] == first and not set(runs[len(first) :]) & set(first)


def test_a_plan_is_composed_of_data_and_of_the_same_data(counted: cjax.Program) -> None:
    given = counted._composed.given
    again = compose(given, "data=4 tensor=2 microbatches=2", jax.devices())
    there = counted.replan("data=4 tensor=2 microbatches=2")._composed
    assert again.given is there.given is given and again.source is there.source is given.source
    assert (again.plan, again.notes, again.choice.kind) == (there.plan, there.notes, "own parts")
    functions = [f.name for f in dataclasses.fields(again) if inspect.isfunction(getattr(again, f.name))]
    assert functions == ["gradients", "init"]


def test_fewer_rows_are_another_batch_of_the_same_loss(counted: cjax.Program) -> None:
    few = compose(counted._composed.given, "data=4 tensor=2", jax.devices(), num_rows=8)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(few.batch_shape)} == {8}
    assert few.given is counted._composed.given and few.capture is counted._composed.capture


def refusing(monkeypatch: pytest.MonkeyPatch, most: int) -> list[Any]:
    """Plans that `auto` finds in turn, of which a model refuses the first so many; those that were tried."""
    tried: list[Any] = []
    whole = composing._composed

    def compose_or_refuse(given: Any, planning: Any, decision: Any, *rest: Any) -> Any:
        tried.append(decision.plan)
        if len(tried) <= most:
            raise ValueError(f"no {decision.plan}")
        return whole(given, planning, decision, *rest)

    def found(planning: Any, plan: Any, num_devices: int, refused: Any = ()) -> Decision:
        assert list(refused) == tried
        if plan == "auto zero=0" and len(refused) == 1:
            raise ValueError("no plan shares the rows")
        names = ["tensor=2", "tensor=4", "microbatches=2", *(f"tensor={n} zero=1" for n in (2, 4, 8))]
        names += [f"zero={stage} microbatches=2" for stage in (1, 2, 3)] + ["tensor=8"]
        return Decision(Plan.parse(names[len(refused)]).resolve(num_devices), (), Found())

    monkeypatch.setattr(composing, "_composed", compose_or_refuse)
    monkeypatch.setattr(composing, "decide", found)
    return tried


@pytest.mark.parametrize("most", [2, MOST_REFUSED])
def test_auto_takes_the_next_plan_where_a_model_refuses_one(
    counted: cjax.Program, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What a stage or a gradient cannot be is found out when it is made."""
    tried = refusing(monkeypatch, most)
    composed = compose(counted._composed.given, "auto", jax.devices())
    assert composed.plan == tried[-1] and len(set(tried)) == len(tried) == most + 1


def test_what_a_model_refuses_is_the_users_to_see(counted: cjax.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = refusing(monkeypatch, 100)
    with pytest.raises(ValueError, match="^no data=8 microbatches=2 zero=3$"):
        compose(counted._composed.given, "auto", jax.devices())
    assert len(tried) == MOST_REFUSED + 1
    tried.clear()
    with pytest.raises(ValueError, match="the model can't be trained under 'data=4 tensor=2': no data=4 tensor=2"):
        compose(counted._composed.given, "auto zero=0", jax.devices())


def test_a_schedule_goes_with_a_pipeline(counted: cjax.Program) -> None:
    with pytest.raises(ValueError, match="the plan 'data=8' has none: add pipeline=2 microbatches=2"):
        compose(counted._composed.given, "data=8", jax.devices(), build("1f1b", 2, 2))
