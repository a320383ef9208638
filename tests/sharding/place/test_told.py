"""Losses and models that print: what they tell is told, of the numbers that a step computes with."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from starts import begin

import cjax

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)}
told: list[tuple[str, np.ndarray]] = []


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(12)(nn.LayerNorm()(x))
        jax.debug.callback(lambda value: told.append(("layer", value)), h.mean())
        return x + nn.Dense(6)(nn.gelu(h))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = Layer()(x)
        return x


def loss(model: Any, batch: Any) -> jax.Array:
    value = jnp.square(model(batch["x"])).mean()
    jax.debug.callback(lambda value: told.append(("loss", value)), value)
    return value


@pytest.mark.parametrize("plan", ["data=4 tensor=2", "zero=3 remat=block", "data=2 tensor=2d:4", "auto"])
def test_what_a_loss_and_its_layers_tell(plan: str) -> None:
    program = cjax.parallelize(Net(), loss, optax.sgd(1e-2), BATCH, plan)
    state = begin(program)
    told.clear()
    _, metrics = program.step(state, BATCH)
    jax.effects_barrier()
    values = [float(value) for name, value in told if name == "loss"]
    assert values and values == pytest.approx([float(metrics["loss"])] * len(values), rel=1e-5)
    assert len({float(value) for name, value in told if name == "layer"}) >= 4  # a number of its own in each


def test_stages_of_a_pipeline_cannot_and_say_who_would() -> None:
    with pytest.raises(
        ValueError, match=r"^(Layer|Net) prints or calls back \(debug_callback\).* beside the loss: return"
    ):
        cjax.parallelize(Net(), loss, optax.sgd(1e-2), BATCH, "data=4 pipeline=1f1b:2 microbatches=2").compile()
