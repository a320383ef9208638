"""Pixels are on each device as the batch is given, and are never exchanged to become patches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import cjax
from cjax.audit import audit
from cjax.sharding.place.arranged import arranged
from cjax.trace.author.capture import capture
from cjax.trace.jaxpr.groups import variables
from cjax.trace.source import TraceSource

ROWS, SIDE, PATCH = 4, 16, 4


class Patches(nn.Module):
    """Attention over the patches of an image behind a token, each of 48 numbers."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        rows, num = len(images), SIDE // PATCH
        x = images.reshape(rows, num, PATCH, num, PATCH, 3).transpose(0, 1, 3, 2, 4, 5).reshape(rows, num * num, -1)
        x = nn.Dense(16)(x)
        token = self.param("token", nn.initializers.normal(1.0), (1, 1, 16))
        x = jnp.concatenate([jnp.broadcast_to(token, (rows, 1, 16)), x], axis=1)
        x = x + nn.MultiHeadDotProductAttention(4)(x)
        return nn.Dense(1)(nn.gelu(nn.Dense(32)(x)))[:, 0]


def loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["images"]) - batch["wanted"]) ** 2).mean()


BATCH = {
    "images": jax.ShapeDtypeStruct((ROWS, SIDE, SIDE, 3), np.float32),
    "wanted": jax.ShapeDtypeStruct((ROWS, 1), np.float32),
}


def test_pixels_are_not_exchanged_to_become_patches() -> None:
    program = cjax.parallelize(Patches(), loss, optax.sgd(0.1), BATCH, "data=2 tensor=4 sequence=gather")
    facts = audit(program.lower().compile(), program.mesh)
    assert facts.moved("all-to-all") == 0
    row = ROWS // 2 * 16 * 4  # bytes of a position on a device
    assert facts.moved("collective-permute") == 2 * 2 * row, "two positions to a neighbour, and their gradients back"


@pytest.mark.full
def test_a_grid_takes_its_features_of_examples_that_are_there() -> None:
    """Its products have other examples on a device than its other values; the batch as it is given has all of them."""
    program = cjax.parallelize(Patches(), loss, optax.sgd(0.1), BATCH, "data=1 tensor=3d:8")
    facts = audit(program.lower().compile(), program.mesh)
    assert facts.moved("collective-permute") < 4 * SIDE**2 * 3, "less than the pixels of one image"


def test_what_is_read_by_a_product_is_placed_as_that_needs_it() -> None:
    trace = TraceSource(capture(Patches(), loss, BATCH), BATCH).read()
    found = arranged(trace)
    assert {var.aval.ndim for var in found} == {4, 6}, "images, and the first two steps to patches"
    jaxpr = trace.closed.jaxpr
    made = {eqn.outvars[0] for eqn in jaxpr.eqns if not found.isdisjoint(variables(eqn))}
    (last,) = made - found
    assert last.aval.size == jaxpr.invars[trace.leaves_of("batch")[0]].aval.size
