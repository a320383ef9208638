"""A causal sequence on a ring: chunks `i` and `2 * size - 1 - i` on device `i`, so that all have as much to do.

All even chunks can move at once, and so can all odd ones: each device has one of each, before and after.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def to_zigzag(value: jax.Array, dim: int, axis: str, size: int) -> jax.Array:
    """A device's shard of a sequence along `dim`, from the sequence's order over the mesh axis."""
    even, odd = jnp.split(value, 2, axis=dim)
    even, odd = (lax.ppermute(x, axis, _route(half, size)) for half, x in enumerate((even, odd)))
    # On odd devices the early chunk has an odd number, and so came as the second.
    swapped = lax.axis_index(axis) % 2 == 1
    return jnp.concatenate([jnp.where(swapped, odd, even), jnp.where(swapped, even, odd)], axis=dim)


def from_zigzag(value: jax.Array, dim: int, axis: str, size: int) -> jax.Array:
    """The inverse of `to_zigzag`."""
    early, late = jnp.split(value, 2, axis=dim)
    swapped = lax.axis_index(axis) % 2 == 1
    halves = jnp.where(swapped, late, early), jnp.where(swapped, early, late)
    routes = [[(to, device) for device, to in _route(half, size)] for half in (0, 1)]
    return jnp.concatenate([lax.ppermute(x, axis, r) for x, r in zip(halves, routes, strict=True)], axis=dim)


def _route(half: int, size: int) -> list[tuple[int, int]]:
    """Where each device's first or second chunk goes."""
    chunks = [(device, 2 * device + half) for device in range(size)]
    return [(device, chunk if chunk < size else 2 * size - 1 - chunk) for device, chunk in chunks]


def zigzag(length: int, size: int) -> np.ndarray:
    """Which position comes where: `to_zigzag` of `range(length)`, over all devices."""
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[[i, 2 * size - 1 - i]].reshape(-1) for i in range(size)])
