"""float16 under every kind of plan: one overflow skips the step everywhere, and the scale is a part of the state."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from starts import begin

import cjax
from cjax.models.gpt import GPT, GPTConfig
from cjax.optim import LossScale
from cjax.train import NotFiniteError, fit

SIZES = GPTConfig(num_layers=4, num_heads=4, embed_dim=24, mlp_dim=40, context=12, vocab_size=37)
ROWS, SEQ = 16, 10

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
PLANS = [
    "zero=3",
    "data=4 tensor=2 zero=1 microbatches=2",
    "pipeline=zero_bubble:4 microbatches=8",
]
if ALL:
    PLANS += ["data=8", "tensor=2d:4", "data=2 sequence=all_to_all:2 tensor=2", "pipeline=1f1b:2 microbatches=4 zero=1"]


class Weighted(nnx.Module):
    """A GPT whose logits an example can multiply: what lets a test overflow a single row."""

    def __init__(self, rngs: nnx.Rngs):
        self.gpt = GPT(SIZES, rngs=rngs)

    def __call__(self, tokens: jax.Array, factor: jax.Array) -> jax.Array:
        return self.gpt(tokens) * factor[:, None, None]


def build(rngs: nnx.Rngs) -> Weighted:
    return Weighted(rngs)


def loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["inputs"], batch["factor"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch(poisoned: int | None = None) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, SIZES.vocab_size, (ROWS, SEQ + 1), dtype=np.int32)
    factor = np.ones(ROWS, np.float32)
    if poisoned is not None:
        factor[poisoned] = 1e8  # the loss is finite; its gradient is not in float16, whatever the scale
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "factor": factor}


@functools.cache
def first() -> cjax.Program:
    """What the others are under other plans: all share one trace of the model."""
    return cjax.parallelize(build, loss, optax.adamw(1e-2), batch(), "data=8 precision=float16")


def make(plan: str, **options: Any) -> cjax.Program:
    text = plan if "precision" in plan else f"{plan} precision=float16"
    if options:
        return cjax.parallelize(build, loss, optax.adamw(1e-2), batch(), text, **options)
    return first().replan(text)


def shards(state: cjax.State) -> list[list[np.ndarray]]:
    """What each device holds of parameters and optimizer state."""
    return [[np.asarray(s.data) for s in x.addressable_shards] for x in (*state._params, *state._opt)]


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS if ALL else PLANS[1:])
def test_an_overflow_on_one_device_skips_the_step_on_all(plan: str) -> None:
    program = make(plan)
    state, metrics = program.step(begin(program), batch())
    assert metrics["skipped"] == 0 and metrics["loss_scale"] == 2**16
    before = shards(state)
    state, metrics = program.step(state, batch(poisoned=5))
    assert metrics["skipped"] == 1 and np.isfinite(metrics["loss"]), "the loss itself is fine"
    after = shards(state)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state._scaling.num_skipped) == 1 and int(state.step) == 2
    state, metrics = program.step(state, batch())
    assert metrics["skipped"] == 0 and metrics["loss_scale"] == 2**15
    assert any(np.any(a != b) for a, b in zip(shards(state)[0], before[0], strict=True))


@pytest.mark.full
@pytest.mark.parametrize("plan", ["zero=3", pytest.param("tensor=2 zero=3", marks=pytest.mark.full)])
def test_resume_keeps_the_whole_scaler_under_another_plan(plan: str, tmp_path: Path) -> None:
    program = make("data=8", loss_scale=LossScale(growth_interval=4, hysteresis=2))
    state = begin(program)
    for poisoned in (None, 3, None, 2, None):
        state, _ = program.step(state, batch(poisoned))
    kept = [np.asarray(x) for x in state._scaling]
    assert kept == [2**15, 1, 2, 2]
    program.save(tmp_path / "c", state)
    other = program.replan(f"{plan} precision=float16")
    resumed = other.restore(tmp_path / "c")
    assert [np.asarray(x) for x in resumed._scaling] == kept
    for poisoned in (None, 7, None, None, None, None, None):  # an overflow, then growth after four good steps
        state, here = program.step(state, batch(poisoned))
        resumed, there = other.step(resumed, batch(poisoned))
        assert here["loss_scale"] == there["loss_scale"]
        np.testing.assert_allclose(here["loss"], there["loss"], rtol=1e-2)
    assert [np.asarray(x) for x in resumed._scaling] == [np.asarray(x) for x in state._scaling]
    assert float(state._scaling.scale) == 2**15


@pytest.mark.full
def test_a_run_goes_through_precisions_with_its_scale(tmp_path: Path) -> None:
    program = make("data=8", loss_scale=LossScale(initial=2.0**10))
    state, _ = program.step(begin(program), batch(poisoned=1))
    wide = program.replan("data=8 precision=bfloat16")
    state, metrics = wide.step(wide.restore(state), batch())
    assert "loss_scale" not in metrics and float(state._scaling.scale) == 2**9
    _, metrics = program.step(program.restore(state), batch())
    assert metrics["loss_scale"] == 2**9


def small_gradients(model: Any, batch: Any) -> jax.Array:
    return 1e-6 * loss(model, batch)


@pytest.mark.parametrize("plan", ["data=4 tensor=2 microbatches=2", *(["pipeline=2 microbatches=4"] if ALL else [])])
def test_scaling_keeps_gradients_that_float16_would_lose(plan: str) -> None:
    program = cjax.parallelize(build, small_gradients, optax.sgd(1.0), batch(), plan)
    low = program.replan(f"{plan} precision=float16")

    def norm(scale: float) -> float:
        scaling = jax.tree.map(lambda x: jax.device_put(np.array(x), low._composed.whole), LossScale(scale).init())
        state = dataclasses.replace(begin(low), _scaling=scaling)
        return float(low.step(state, batch())[1]["grad_norm"])

    wanted = float(program.step(begin(program), batch())[1]["grad_norm"])
    assert abs(norm(2.0**24) - wanted) < 0.01 * wanted
    assert abs(norm(1.0) - wanted) > 0.1 * wanted


def masked(model: Any, batch: Any) -> jax.Array:
    """A mean over the tokens that are no 0: over micro-batches, a sum of totals."""
    logits, counts = model(batch["inputs"], batch["factor"]), batch["targets"] != 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * counts).sum() / counts.sum()


@pytest.mark.full
def test_a_total_needs_no_other_scale_than_a_mean() -> None:
    """Gradients of a total of tokens are as many times larger than those of their mean, and so are those of a part."""
    plan, devices = "data=2 microbatches=4 precision=float16", jax.devices()[:2]
    program = cjax.parallelize(build, masked, optax.sgd(1.0), batch(), plan, devices=devices)
    _, metrics = program.step(begin(program), batch())
    assert program._composed.loss_size == ROWS * SEQ
    assert make("data=2 microbatches=4", devices=devices)._composed.loss_size == 8
    assert metrics["skipped"] == 0


@pytest.mark.full
def test_fit_goes_on_past_overflows_and_stops_where_no_scale_helps(tmp_path: Path) -> None:
    program = make("data=8", loss_scale=LossScale(initial=4.0))
    bad = [batch(), batch(poisoned=0), batch(poisoned=1), batch(), batch()]
    result = fit(program, bad, steps=5, folder=tmp_path / "a", log_every=1)
    assert result.step == 5 and float(result.state._scaling.scale) == 1.0
    with pytest.raises(NotFiniteError, match="step 4 was not finite"):
        fit(program, [batch(), *[batch(poisoned=0)] * 3], steps=5, folder=tmp_path / "b", log_every=1)


def test_loss_scaling_is_for_float16() -> None:
    with pytest.raises(ValueError, match="loss_scale is for float16, and the plan .* computes in bfloat16.*leave"):
        make("data=8 precision=bfloat16", loss_scale=LossScale())
