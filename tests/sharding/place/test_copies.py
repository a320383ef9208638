"""Tied weights as a copy on each device: the same values and gradients, one sum, whatever reads them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import cjax

ROWS, LENGTH, WIDTH, VOCAB = 8, 16, 8, 24


class Tied(nn.Module):
    """Two lookups in a table, and a product with it transposed, in a loop over positions inside of a checkpoint."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.param("table", nn.initializers.normal(1.0), (VOCAB, WIDTH))
        x = jnp.tanh(nn.Dense(WIDTH)(table[tokens]))
        x = x * jnp.take(table, tokens[:, ::-1], axis=0, mode="fill")

        @jax.checkpoint
        def turn(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.nn.logsumexp(part @ table.T, axis=-1).sum(), None

        parts = jnp.moveaxis(x.reshape(-1, LENGTH // 4, 4, WIDTH), 2, 0)
        return jax.lax.scan(turn, jnp.zeros(()), parts)[0] / tokens.size


def loss(model: Any, batch: Any) -> jax.Array:
    return model(batch["tokens"])


@pytest.mark.parametrize("plan", ["data=4", "data=2 tensor=2 zero=1", "data=4 zero=3/2"])
def test_gradients_are_those_of_one_device(plan: str) -> None:
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))}
    found = []
    for text, num in (("data=1", 1), (plan, 4)):
        program = cjax.parallelize(Tied(), loss, optax.sgd(0.1), batch, text, devices=jax.devices()[:num])
        found.append(jax.tree.map(np.asarray, program.value_and_grad(program.init(0), batch)))
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
