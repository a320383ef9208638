"""Random bits of a block of an array, the same as in the whole array: by index, not by slicing."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Equation
from cjax.jax_compat.random import counts_by_index, threefry_words
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import name_of


def draw_block(eqn: Equation, key: jax.Array, whole: Sequence[int], shape: Sequence[int], starts: Sequence[Any]) -> Any:
    """What an equation draws for a block of an array; beyond the array's end, what it draws for the last there is.

    Args:
      eqn: an equation that draws by shape and key, such as `random_bits`.
      key: its key.
      whole: shape of what one key draws.
      shape: of the block; several keys make dims of their own in front.
      starts: index of the block's first element in each dim.
    """
    # Indices are 32 bits here; JAX counts larger arrays in two words. Whatever else draws is drawn whole, and sliced:
    # each device then makes the numbers of all, but the same ones.
    if name_of(eqn) == "random_bits" and counts_by_index(key) and math.prod(whole) < 2**32:
        return _block(key, eqn.params["bit_width"], whole, shape, starts)
    (drawn,) = bind_as_is(eqn, (key,), eqn.params | {"shape": tuple(whole)})
    beyond = [(0, -size % of) for size, of in zip(whole, shape, strict=True)]
    drawn = jnp.pad(drawn, beyond, mode="edge") if any(more for _, more in beyond) else drawn
    return lax.dynamic_slice(drawn, [jnp.asarray(at, jnp.int32) for at in starts], shape)


def draw_in_order(eqn: Equation, key: jax.Array, dim: int, order: np.ndarray) -> jax.Array | None:
    """What an equation draws, its elements along a dim in another order: `order` says which comes where. None where it
    does not count them by their number."""
    shape = eqn.outvars[0].aval.shape
    if not counts_by_index(key) or math.prod(shape) >= 2**32 or tuple(eqn.params["shape"]) != tuple(shape):
        return None
    along = [lax.iota(jnp.uint32, size) for size in shape]
    along[dim] = jnp.asarray(order, jnp.uint32)
    return _drawn(key, eqn.params["bit_width"], shape, shape, along)


def _block(
    key: jax.Array, bit_width: int, whole: Sequence[int], shape: Sequence[int], starts: Sequence[Any]
) -> jax.Array:
    """`jax.random.bits(key, whole)`, of which only `shape` is made, from `starts` on.

    A slice would do, but XLA does not push slices into the loop that threefry is on CPUs: every device would make the
    numbers of all.
    """
    along = []
    for of, size, start in zip(whole, shape, starts, strict=True):
        # A block that goes on behind the end has copies of its last element there, as the other operands have.
        here = lax.iota(jnp.uint32, size) + jnp.asarray(start).astype(jnp.uint32)
        along.append(here if of % size == 0 else jnp.minimum(here, jnp.uint32(of - 1)))
    return _drawn(key, bit_width, whole, shape, along)


def _drawn(
    key: jax.Array, bit_width: int, whole: Sequence[int], shape: Sequence[int], along: Sequence[jax.Array]
) -> jax.Array:
    """Of `jax.random.bits(key, whole)` the elements with these indices along each dim."""
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = index + lax.broadcast_in_dim(along[dim], shape, [dim]) * jnp.uint32(stride % 2**32)
        stride *= whole[dim]
    high, low = threefry_words(key, jnp.zeros(shape, jnp.uint32), index)
    # As `jax.random.bits` puts them together; any other way would be other numbers than without a plan.
    if bit_width == 64:
        return (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width])
