"""What devices' own shards can be put in, so that they are parts of the result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from cjax.mesh import TENSOR
from cjax.sharding.layout.layout import make_layout
from cjax.sharding.layout.shards import OwnShards, looked_up_dim, of_shard
from cjax.trace.author.capture import capture
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.source import TraceSource

BATCH, LENGTH, WIDTH, INNER = 8, 6, 20, 16
ORDER = np.arange(BATCH * LENGTH)[::-1].copy()
Put = Callable[
    [jax.Array, jax.Array], Any
]  # the part of a result that a product leaves, and what is whole of the batch


def rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, WIDTH)


# What is made of a product's parts, the primitive that makes it, and whether devices' parts give it.
EQUATIONS: dict[str, tuple[Put, str, bool]] = {
    "added": (lambda part, whole: part + whole, "add", True),
    "summed over features": (lambda part, _: part.sum(-1), "reduce_sum", True),
    "summed over the batch": (lambda part, _: part.sum(0), "reduce_sum", False),
    "tokens in a row": (lambda part, _: rows(part), "reshape", True),
    "tokens of no example": (lambda part, _: part.transpose(1, 0, 2).reshape(-1, WIDTH), "reshape", False),
    "turned": (lambda part, _: part.transpose(2, 0, 1), "transpose", True),
    "by the batch's numbers": (lambda part, whole: jnp.einsum("bsf,bsf->bs", part, whole), "dot_general", True),
    "in another order": (lambda part, whole: rows(part)[rows(whole)[:, 0].astype(int)], "gather", True),
    "examples that all look up": (lambda part, _: rows(part)[jnp.asarray(ORDER)], "gather", False),
    "positions looked up": (lambda part, _: part[:, jnp.array([4, 1])], "gather", True),
    "added to others": (
        lambda part, whole: jnp.zeros_like(rows(part)).at[rows(whole)[:, 0].astype(int)].add(rows(part)) + rows(whole),
        "scatter-add", True,
    ),
    "added to few": (lambda part, whole: jnp.zeros((5, WIDTH)).at[rows(whole)[:, 0].astype(int)].add(rows(part)),
        "scatter-add", False,
    ),
}  # fmt: skip


RULES = {"up:0": None, "up:1": TENSOR, "down:1": None}  # what is put in is the stream's


class Net(nn.Module):
    put: Put

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        inner = jnp.tanh(x @ self.param("up", nn.initializers.ones, (WIDTH, INNER)))
        return self.put(inner @ self.param("down", nn.initializers.ones, (INNER, WIDTH)), x)


def trace_of(put: Put) -> Any:
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), np.float32)
    return TraceSource(capture(Net(put), lambda model, x: jnp.sum(model(x)), batch), batch).read()


@pytest.mark.parametrize("name", EQUATIONS)
def test_what_is_the_same_of_parts(name: str) -> None:
    put, primitive, wanted = EQUATIONS[name]
    trace = trace_of(put)
    shards = OwnShards(trace.dims, make_layout(trace, {"data": 2, "tensor": 4}, RULES))
    products = [eqn for eqn in trace.closed.jaxpr.eqns if shards.is_product(eqn, trace.dims.top)]
    assert len(products) == 1 and shards.in_place(products[0], trace.dims.top)
    behind = trace.closed.jaxpr.eqns[trace.closed.jaxpr.eqns.index(products[0]) + 1 :]
    eqn = next(eqn for eqn in behind if name_of(eqn) == primitive)
    assert shards.in_place(eqn, trace.dims.top) is wanted


def test_what_devices_make_some_features_of_is_no_part() -> None:
    trace = trace_of(lambda part, _: part)
    shards = OwnShards(trace.dims, make_layout(trace, {"data": 2, "tensor": 4}, RULES))
    up, top = next(eqn for eqn in trace.closed.jaxpr.eqns if name_of(eqn) == "dot_general"), trace.dims.top
    assert shards.are_shards(up, top) and not shards.in_place(up, top) and not shards.is_product(up, top)
    assert shards.of(top)(up.outvars[0]) == [("data",), (), (TENSOR,)]


def test_positions_that_a_ring_has_in_its_order_are_no_rows() -> None:
    """Where these are split, devices have them in another order than a lookup of them asks for."""
    trace = trace_of(lambda part, _: part[:, jnp.arange(LENGTH)[::-1]])
    layout = make_layout(trace, {"data": 2, "tensor": 2}, RULES)
    (eqn,) = [eqn for eqn in trace.closed.jaxpr.eqns if name_of(eqn) == "gather"]
    assert OwnShards(trace.dims, layout).in_place(eqn, trace.dims.top)
    positions = trace.dims.of(eqn.invars[0], trace.dims.top)[looked_up_dim(eqn)]
    object.__setattr__(layout, "positions", frozenset({positions}))
    assert not OwnShards(trace.dims, layout).in_place(eqn, trace.dims.top)


def test_a_shard_is_given_its_own_shape() -> None:
    (eqn,) = jax.make_jaxpr(rows)(jnp.ones((BATCH, LENGTH, WIDTH))).jaxpr.eqns
    assert of_shard(eqn, eqn.params, (2, LENGTH, WIDTH))["new_sizes"] == (2 * LENGTH, WIDTH)
    (eqn,) = jax.make_jaxpr(jnp.sin)(jnp.ones(3)).jaxpr.eqns
    assert of_shard(eqn, eqn.params, (1,)) is eqn.params
