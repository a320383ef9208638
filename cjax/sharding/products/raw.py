"""The raw products of two split matrices, A B, A B^T and A^T B, for those who write their own layers."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from cjax.mesh import COL, DEPTH, ROW, I, J, K
from cjax.sharding.products.matmul import Mode, Move, Spread, multiply


def matmul_ab(a: jax.Array, b: jax.Array, mesh: Mesh, mode: Mode = "2d", **options: Any) -> jax.Array:
    """C = A B, split as `mode` says.

    Args:
      a: [M, K], placed as X in the table above `cjax.sharding.products.matmul`.
      b: [K, N], placed as W.
      mesh: has the axes `row`, `col` (2d), `depth`, `row`, `col` (2.5d) or `i`, `j`, `k` (3d).
      mode: "2d", "2.5d" or "3d".
      options: `steps`, `keep` and `precision` of `cjax.sharding.products.matmul.multiply`.

    Returns:
      [M, N], placed as Y. Gradients are placed as what they are of.

    >>> from cjax.mesh import build_mesh
    >>> mesh = build_mesh({"row": 1, "col": 1}, jax.devices()[:1])
    >>> matmul_ab(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 5)), mesh).shape
    (2, 5)
    """
    x, w, y = _placements(mode)
    if mode == "3d":
        spread = Spread(((1,), (0,)), x, w, y, Move(J, 0), Move(I, 0), Move(K, 0))
    else:
        spread = Spread(((1,), (0,)), x, w, y, Move(COL, 1), Move(ROW, 0))
    return _run(a, b, spread, mesh, options)


def matmul_abt(a: jax.Array, b: jax.Array, mesh: Mesh, mode: Mode = "2d", **options: Any) -> jax.Array:
    """C = A B^T: `a` [M, N] is placed as Y, `b` [K, N] as W, the result [M, K] as X. See `matmul_ab`."""
    x, w, y = _placements(mode)
    if mode == "3d":
        spread = Spread(((1,), (1,)), y, w, x, Move(K, 0), Move(I, 0), Move(J, 0))
    else:
        spread = Spread(((1,), (1,)), y, w, x, None, Move(ROW, 0), Move(COL, 1))
    return _run(a, b, spread, mesh, options)


def matmul_atb(a: jax.Array, b: jax.Array, mesh: Mesh, mode: Mode = "2d", **options: Any) -> jax.Array:
    """C = A^T B: `a` [M, K] is placed as X, `b` [M, N] as Y, the result [K, N] as W. See `matmul_ab`."""
    x, w, y = _placements(mode)
    if mode == "3d":
        spread = Spread(((0,), (0,)), x, y, w, Move(J, 0), Move(K, 0), Move(I, 0))
    else:
        spread = Spread(((0,), (0,)), x, y, w, Move(COL, 1), None, Move(ROW, 0))
    return _run(a, b, spread, mesh, options)


def _placements(mode: Mode) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Of X [M, K], W [K, N] and Y [M, N]."""
    if mode == "3d":
        return PartitionSpec((I, J), K), PartitionSpec((K, I), J), PartitionSpec((I, K), J)
    rows = (DEPTH, ROW) if mode == "2.5d" else ROW
    return PartitionSpec(rows, COL), PartitionSpec(ROW, COL), PartitionSpec(rows, COL)


def _run(a: jax.Array, b: jax.Array, spread: Spread, mesh: Mesh, options: dict[str, Any]) -> jax.Array:
    for operand, spec, name in ((a, spread.x, "a"), (b, spread.w, "b")):
        jax.sharding.NamedSharding(mesh, spec)  # raises where the mesh lacks an axis
        for size, entry in zip(operand.shape, spec, strict=True):
            shards = 1
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                shards *= mesh.shape[axis]
            if size % shards:
                near = max(1, size // shards) * shards
                raise ValueError(
                    f"dim of size {size} in {name!r} {operand.shape} is split {shards} ways ({entry}); "
                    f"pad it with zeros to {near if near >= size else near + shards}."
                )
    # Under jit, because outside of it a region can't leave axes of the mesh alone.
    return jax.jit(lambda a, b: multiply(a, [b], [spread], mesh, **options)[0])(a, b)
