"""JAX's kernels for NVIDIA's Hopper cards, written in Pallas."""

import types
from typing import Any

import jax

# Of tiles that a multiprocessor multiplies at a time, [128, 64] by [64, 128], of which four are on their way to it.
# Wider tiles were three times slower on an H200; a fifth on its way gained 0 to 8 % (docs/gpu.md).
TILE, DEPTH, STAGES = 128, 64, 4


def is_hopper(device: Any) -> bool:
    """Whether these kernels are for a device, which may be absent.

    Private: `compute_capability` of a device.
    Tried: JAX 0.10.2, 0.12.0.1, alike; 0.11.2 on a card.
    Public instead: the same under a name that is documented.
    """
    return device.platform in ("gpu", "cuda") and getattr(device, "compute_capability", None) == "9.0"


def by_group(rows: jax.Array, weights: jax.Array, sizes: jax.Array, turned: bool) -> jax.Array:
    """Each row times its group's weight, [rows, out]; what rows that no group has are given is anything.

    Private: the function, which JAX calls experimental.
    Tried: JAX 0.10.2, 0.12.0.1, compiled alike; 0.11.2 on a card.
    Public instead: `jax.lax.ragged_dot`, once XLA no longer multiplies all rows by all weights on GPUs.

    Args:
      rows: [rows, in], of 16 bits.
      weights: [groups, in, out], or [groups, out, in] if `turned`; 128 divides all dims but the groups'.
      sizes: int32[groups], how many rows each has; those of the first come first.
      turned: see `weights`.
    """
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return ragged_dot(
        rows, weights, group_sizes=sizes, transpose_rhs=turned, block_m=TILE, block_n=TILE, block_k=DEPTH,
        max_concurrent_steps=STAGES, grid_block_n=_beside(weights.shape[1 if turned else 2]),
    )  # fmt: skip


def of_groups(left: jax.Array, right: jax.Array, sizes: jax.Array, device: Any) -> jax.Array:
    """The sum over a group's rows of the products of two sides' rows, [groups, left, right].

    Private: as for `by_group`; and that the function asks the first of this process's devices how many multiprocessors
    it has, which a CPU does not know that compiles for an absent card. It is told of `device` here: a copy of it, in
    whose module `jax.devices` is that one.
    Tried: JAX 0.10.2, 0.12.0.1, compiled alike; 0.11.2 on a card.
    Public instead: as for `by_group`.

    Args:
      left: [rows, left], of 16 bits; 128 divides all dims.
      right: [rows, right].
      sizes: int32[groups].
      device: what it is compiled for.
    """
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as there

    function = there.transposed_ragged_dot
    seen = types.SimpleNamespace(**{name: getattr(jax, name) for name in ("lax", "numpy", "ShapeDtypeStruct", "Array")})
    seen.devices = lambda: [device]
    told = types.FunctionType(function.__code__, {**function.__globals__, "jax": seen}, function.__name__)
    told.__kwdefaults__ = function.__kwdefaults__
    return told(
        left, right, group_sizes=sizes, block_m=TILE, block_n=TILE, block_k=DEPTH, max_concurrent_steps=STAGES,
        grid_block_n=_beside(right.shape[1]),
    )  # fmt: skip


def _beside(width: int) -> int:
    """How many tiles beside each other are made in turn, so that rows are still in the cache."""
    return next(num for num in (8, 4, 2, 1) if width // TILE % num == 0)
