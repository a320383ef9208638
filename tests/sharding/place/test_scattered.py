"""What is put back where it was taken from, in unequal parts on the devices: each element once."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cjax


class Some(nn.Module):
    """Five positions of eight attend to each other, and are added to what they were."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(24, 8)(ids)
        at = jnp.broadcast_to(jnp.array([0, 2, 3, 5, 6]), (len(ids), 5))
        some = jnp.take_along_axis(x, at[..., None], axis=1)
        some = nn.MultiHeadDotProductAttention(2)(some, mask=(at[:, :, None] >= at[:, None])[:, None])
        return nn.Dense(24)(x.at[jnp.arange(len(ids))[:, None], at].add(some))


def loss(model: Any, ids: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(ids), ids).mean()


def test_scattered_positions_that_no_axis_divides_are_put_once() -> None:
    ids = np.random.default_rng(0).integers(0, 24, (4, 8)).astype(np.int32)
    found = []
    for plan, devices in (("data=1", jax.devices()[:1]), ("tensor=2 sequence=ring:2", jax.devices()[:4])):
        program = cjax.parallelize(Some(), loss, optax.sgd(0.1), ids, plan, devices=devices)
        found.append(jax.tree.map(np.asarray, program.value_and_grad(program.init(0), ids)))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6), *found)
