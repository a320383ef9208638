"""Where the dims of an attention are: which heads and which examples a device has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import mesh_of
from jax.sharding import PartitionSpec as P

from cjax.sharding.attention.where import Places, split_axes
from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.jaxpr.simplify import simplify

BATCH, LENGTH, HEADS, DEPTH = 4, 6, 8, 3


def attention() -> Attention:
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, DEPTH), jnp.float32)
    closed = simplify(jax.make_jaxpr(jax.nn.dot_product_attention)(x, x, x))
    (found,), _ = find_attentions(closed.jaxpr.eqns, closed.jaxpr.outvars)
    return found


def test_a_device_knows_the_first_of_its_heads() -> None:
    found, mesh = attention(), mesh_of(data=2, tensor=4)
    places = Places(found, mesh, None, split_axes(found, None, P("data", None, "tensor")))
    batch, heads = (found.query.labels[dim][0] for dim in (0, 2))
    assert (places.sizes[batch], places.sizes[heads], places.axes) == (2, 2, {"data", "tensor"})

    def firsts() -> jax.Array:
        return jnp.stack([places.starts[batch], places.starts[heads]])[:, None, None]

    out = jax.jit(places.mapped(firsts, (), P(None, "data", "tensor")))()
    np.testing.assert_array_equal(out, [[[0] * 4, [2] * 4], [[0, 2, 4, 6]] * 2])


def test_positions_are_split_by_the_sequences_axis_alone() -> None:
    found = attention()
    with pytest.raises(AssertionError, match="does not split the positions"):
        split_axes(found, "sequence", P("data", None, "tensor"))
    with pytest.raises(AssertionError, match="does not split the positions"):
        split_axes(found, None, P("data", "sequence"))
