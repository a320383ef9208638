"""The plan in full: as it was written, checked, or chosen."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import cjax
from cjax.planner.choice.decide import Decision, decide
from cjax.planner.choice.planning import Planning
from cjax.planner.choice.scored import Scored
from cjax.planner.choice.search import Found
from cjax.planner.hardware import Hardware, hardware_of
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

BATCH = jax.ShapeDtypeStruct((12, 4), jnp.float32)


def source(width: int = 3) -> TraceSource:
    return TraceSource(capture(nn.Dense(width), lambda model, x: model(x).mean(), BATCH), BATCH)


def cpu(num_devices: int) -> Hardware:
    return dataclasses.replace(hardware_of(jax.devices()[:4]), num_devices=num_devices)


def a100(num_devices: int) -> Hardware:
    return Hardware("NVIDIA A100-SXM4-80GB", num_devices, 8, 80 * 2**30, 2e12, 312e12, 312e12, 156e12, 3e11, 2.5e10, 8)


def planned(
    facts: Callable[[int], Hardware] = cpu, optimizer: optax.GradientTransformation | None = None, **changes: Any
) -> Planning:
    return Planning(source(**changes), optimizer, facts)


@pytest.mark.parametrize("plan", ["microbatches=3", cjax.Plan(microbatches=3)])
def test_what_is_written_is_filled_in_and_nothing_is_traced(plan: Any) -> None:
    def nobody(num_devices: int) -> Hardware:
        raise AssertionError("nobody asks for the devices' facts")

    planning = planned(nobody, optax.adam(1e-3))
    found = decide(planning, plan, 4)
    assert (found.plan.data, found.plan.microbatches, found.notes) == (4, 3, ()) and not planning.source._traced
    assert found.found is None and not found.is_close and not found.leaner(1.0)


def test_auto_says_what_it_chose_and_by_what() -> None:
    chosen = decide(planned(), "auto", 4)
    assert chosen.plan == cjax.Plan.parse("data=4").resolve(4) and chosen.found is not None
    assert chosen.notes[0].startswith("auto chose data=4: the least arithmetic and bytes moved of ")
    # `explain` may know one of those that has less to do.
    assert "how fast a cpu is nobody has measured, so plans that split the model were not tried" in chosen.notes[0]
    timed = decide(planned(a100), "auto", 4)
    assert timed.scored and timed.notes[0].startswith(f"auto chose {timed.plan}: the fastest of ")
    assert " ms (" in timed.notes[0] and "program.explain() says why" in timed.notes[0]


def test_same_model_same_devices_same_plan() -> None:
    assert len({str(decide(planned(a100), "auto precision=bfloat16", 8).plan) for _ in range(3)}) == 1


def test_what_an_optimizer_keeps_is_counted() -> None:
    plan = cjax.Plan(data=2)
    kept = [planned(cpu, tx, width=256).score(plan) for tx in (None, optax.sgd(1.0), optax.adam(1.0))]
    sizes = [each.memory["optimizer"] for each in kept if isinstance(each, Scored)]
    params = 4 * (4 * 256 + 256)
    assert sizes[:2] == [0, 0] and 2 * params <= sizes[2] <= 2 * params + 64


def test_refuses_what_does_not_divide_and_what_is_no_plan() -> None:
    with pytest.raises(ValueError, match="microbatches=5 does not divide a batch of 12 rows; use 10 or 15 rows, or "):
        decide(planned(), "microbatches=5", 1)
    with pytest.raises(TypeError, match="`plan` is 8, an int"):
        decide(planned(), 8, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean tensor=2"):
        decide(planned(), "auto tensr=2", 1)


def test_rows_that_nothing_shares() -> None:
    with pytest.raises(ValueError, match=r"no plan shares 12 rows over 5 devices.* Use 10 rows, .*devices\(\)\[:4\]"):
        decide(planned(), "auto", 5)
    with pytest.raises(ValueError, match="leave out words of 'auto data=2'"):
        decide(planned(), "auto data=2", 3)
    with pytest.raises(ValueError, match=r"its words need a multiple of 3 devices, and there are 4.*devices\(\)\[:3\]"):
        decide(planned(), "auto tensor=3", 4)


@pytest.mark.parametrize(
    ("text", "num", "instead"),
    [("auto microbatches=5", 6, "Use 30 rows, or leave"),
     ("auto data=4", 6, r"Use devices=jax.devices\(\)\[:4\], or leave"),
     ("auto tensor=2 microbatches=4", 8, r"Use 16 rows, or devices=jax.devices\(\)\[:6\], or leave"),
     ("auto overlap=5", 6, "Use 30 rows, or leave"),
     ("auto tensor=7", 8, r"Use devices=jax.devices\(\)\[:7\], or leave")],
)  # fmt: skip
def test_what_is_offered_goes_with_the_words_that_are_fixed(text: str, num: int, instead: str) -> None:
    """Twelve rows."""
    with pytest.raises(ValueError, match=instead):
        decide(planned(), text, num)


def scored(plan: str, size: float, time: float) -> Scored:
    return Scored(cjax.Plan.parse(plan), 8, {"params": size}, 100, {"matmul": time}, time, time, time, 1)


def test_what_is_left_if_the_compiled_program_needs_more() -> None:
    front = [scored("data=8", 90, 1), scored("data=8 zero=1", 70, 2), scored("data=8 zero=3", 40, 3)]
    chosen = Decision(front[0].plan, ("why",), Found(best=front[:1], front=front), front[0])
    assert chosen.is_close
    assert [str(each.plan) for each in chosen.leaner(101)] == ["data=8 zero=1", "data=8 zero=3"]
    assert [str(each.plan) for each in chosen.leaner(180)] == ["data=8 zero=3"]
    assert chosen.leaner(300) == []
    (then,) = chosen.leaner(180)
    assert then.scored is front[2] and not then.is_close and then.notes[0] == "why" and "data=8 zero=3" in then.notes[1]
    assert then.noting("over").notes[-1] == "over"
