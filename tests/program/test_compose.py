"""Plans of one program: composed of the same, which is data, and of what was traced before."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cjax
from cjax.program.compose import compose

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
