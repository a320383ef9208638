"""Random bits of a block of an array, the same as in the whole array: by index, not by slicing."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cjax.jax_compat.core import Equation
from cjax.jax_compat.random import counts_by_index, threefry_words
from cjax.trace.jaxpr.evaluate import bind_as_is


def draw_block(eqn: Equation, key: jax.Array, whole: Sequence[int], shape: Sequence[int], starts: Sequence[Any]) -> Any:
    """What an equation draws for a block of an array; beyond the array's end, what it draws for the last there is.

    Args:
      eqn: an equation that draws by shape and key, such as `random_bits`.
      key: its key.
      whole: shape of what one key draws.
      shape: of the block; several keys make dims of their own in front.
      starts: index of the block's first element in each dim.
    """
    if eqn.primitive.name == "random_bits" and counts_by_index(key) and math.prod(whole) < 2**32:
        return _block(key, eqn.params["bit_width"], whole, shape, starts)
    (drawn,) = bind_as_is(eqn, (key,), eqn.params | {"shape": tuple(whole)})
    beyond = [(0, -size % of) for size, of in zip(whole, shape, strict=True)]
    drawn = jnp.pad(drawn, beyond, mode="edge") if any(more for _, more in beyond) else drawn
    return lax.dynamic_slice(drawn, [jnp.asarray(at, jnp.int32) for at in starts], shape)


def _block(
    key: jax.Array, bit_width: int, whole: Sequence[int], shape: Sequence[int], starts: Sequence[Any]
) -> jax.Array:
    """`jax.random.bits(key, whole)`, of which only `shape` is made, from `starts` on.

    A slice would do, but XLA does not push slices into the loop that threefry is on CPUs: every device would make the
    numbers of all.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, dim) + jnp.asarray(starts[dim]).astype(jnp.uint32)
        along = along if whole[dim] % shape[dim] == 0 else jnp.minimum(along, jnp.uint32(whole[dim] - 1))
        index = index + along * jnp.uint32(stride % 2**32)
        stride *= whole[dim]
    high, low = threefry_words(key, jnp.zeros(shape, jnp.uint32), index)
    if bit_width == 64:
        return (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width])
