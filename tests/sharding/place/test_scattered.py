"""What is put back where it was taken from, in unequal parts on the devices: each element once."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from starts import begin

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
        found.append(jax.tree.map(np.asarray, program.value_and_grad(begin(program), ids)))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6), *found)


class Marked(nn.Module):
    """A stretch of the features is changed, and then the last of them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(5)(nn.tanh(nn.Dense(24)(x)).at[:, 3:9].add(1.0).at[:, -1].set(0.5))


def marked_features(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def marked_rows(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]).at[3:9].set(1.0).at[-1].multiply(3.0) - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("plan", ["data=8", "data=2 tensor=4", "data=2 tensor=2d:4"])
@pytest.mark.parametrize("loss", [marked_features, marked_rows])
def test_one_element_behind_a_stretch_is_changed_alone(loss: Any, plan: str) -> None:
    """Both are in a dim that is split: the batch's, or the features'."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 6)).astype(np.float32), "y": rng.normal(size=(16, 5)).astype(np.float32)}
    program = cjax.parallelize(Marked(), loss, optax.sgd(0.1), batch, plan)
    state = begin(program)
    params = jax.tree.map(np.asarray, program.params(state))
    wanted = jax.value_and_grad(lambda params: loss(Marked().bind({"params": params}), batch))(params)
    found = program.value_and_grad(state, batch)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6), wanted, found)
