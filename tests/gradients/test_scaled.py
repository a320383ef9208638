"""Derivatives by hand under float16's scaled loss."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cjax

BATCH = {"x": np.random.default_rng(0).standard_normal((8, 6)).astype("float32")}


def program(backward: Callable[[jax.Array, jax.Array], jax.Array], plan: str) -> cjax.Program:
    """A model between whose layers gradients go through `backward(x, gradient)`."""

    @jax.custom_vjp
    def by_hand(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    by_hand.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (backward(x, g),))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(3)(by_hand(nn.Dense(5)(x)))

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["x"])).mean()

    return cjax.parallelize(Net(), loss, optax.sgd(0.1), BATCH, plan, devices=jax.devices()[:1])


def test_one_that_clips_is_refused_where_the_loss_is_scaled() -> None:
    def clips(x: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.clip(g, -0.01, 0.01)

    with pytest.raises(ValueError, match=r"by hand at Net .*precision=bfloat16"):
        program(clips, "precision=float16")
    made = program(clips, "precision=bfloat16")
    assert made.check(made.init(0), BATCH).ok


def test_one_that_scales_is_taken() -> None:
    made = program(lambda x, g: g * (1 - jnp.tanh(x) ** 2), "precision=float16")
    assert made.check(made.init(0), BATCH).ok and "by hand" not in str(made.report())


def test_one_that_cannot_be_read_is_told() -> None:
    def outside(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda g: np.asarray(g), jax.ShapeDtypeStruct(g.shape, g.dtype), g)

    assert "can't be read, because of pure_callback" in str(program(outside, "precision=float16").report())
