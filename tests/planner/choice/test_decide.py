"""The plan in full: as it was written, checked, or chosen."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import cjax
from cjax.planner.choice import decide as decide_module
from cjax.planner.choice.decide import decide
from cjax.planner.hardware import hardware_of
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

BATCH = jax.ShapeDtypeStruct((12, 4), jnp.float32)


def source() -> TraceSource:
    return TraceSource(capture(nn.Dense(3), lambda model, x: model(x).mean(), BATCH), BATCH)


@pytest.mark.parametrize("plan", ["microbatches=3", cjax.Plan(microbatches=3)])
def test_what_is_written_is_filled_in_and_nothing_is_traced(plan: Any) -> None:
    given = source()
    found, notes = decide(given, optax.adam(1e-3), plan, jax.devices()[:4])
    assert (found.data, found.microbatches, notes) == (4, 3, ()) and not given._traced


def test_auto_says_what_it_chose() -> None:
    found, (note,) = decide(source(), None, "auto", jax.devices()[:4])
    assert found == cjax.Plan.parse("data=4").resolve(4)
    assert note.startswith(f"auto chose {found}: the least that fits, about ")


def test_auto_leaves_room_for_what_the_optimizer_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = jax.ShapeDtypeStruct((12, 64), jnp.float32)
    given = TraceSource(capture(nn.Dense(256), lambda model, x: model(x).mean(), batch), batch)
    both = 2 * 4 * (64 * 256 + 256)  # of parameters and gradients; Adam keeps as much again
    facts = dataclasses.replace(hardware_of(jax.devices()[:2]), memory=int(1.8 * both))
    monkeypatch.setattr(decide_module, "hardware_of", lambda devices: facts)
    stages = [
        decide(given, tx, "auto", jax.devices()[:2])[0].zero_stage for tx in (None, optax.sgd(1.0), optax.adam(1.0))
    ]
    assert stages == [0, 0, 1]


def test_refuses_what_does_not_divide_and_what_is_no_plan() -> None:
    with pytest.raises(ValueError, match="microbatches=5 does not divide a batch of 12 rows; use 10 or 15 rows, or "):
        decide(source(), None, "microbatches=5", jax.devices()[:1])
    with pytest.raises(TypeError, match="`plan` is 8, a int"):
        decide(source(), None, 8, jax.devices()[:1])  # type: ignore[arg-type]
