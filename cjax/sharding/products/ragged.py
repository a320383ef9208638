"""Rows in groups, each multiplied by its group's weight (`lax.ragged_dot`), on each device's own rows and features.

XLA's partitioner brings all rows together, and every device multiplies them all. A device's rows are a stretch of them,
so that of each group it has a stretch too, which may be empty. Of every group's weight it may have some features: of
those made, it makes its own; of those summed over, its part of the sum is added to the others'.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Params
from cjax.sharding.products.blocks import blocks_of
from cjax.sharding.products.region import in_region
from cjax.sharding.products.tiles import tiles_of
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.emit.emit import bind


def multiply_rows(
    eqn: Equation,
    operands: Sequence[jax.Array],
    params: Params,
    axes: tuple[str, ...],
    weights: PartitionSpec,
    mesh: Mesh,
    apart: str | None = None,
    copied: str | None = None,
    counts: jax.Array | None = None,
) -> list[jax.Array]:
    """The results of such an equation.

    Args:
      eqn: the equation.
      operands: rows, weights by group, and how many rows each group has: those of the first come first.
      params: its parameters.
      axes: of the mesh, that split the rows; they divide them.
      weights: the placement of the weights, which splits no group from the others; its axes divide the features.
      mesh: the mesh.
      apart: an axis that splits features summed over: its devices' parts of the result, on a dim in front of it.
      copied: an axis over whose devices rows are copies, on a dim in front of them.
      counts: how many rows of each group a device has, on a dim in front that `axes` split, where its rows are sorted
        by themselves; of all devices' rows in one order otherwise.
    """
    ((left, right), _) = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    entries = [*weights, *[None] * (operands[1].ndim - len(weights))]
    rows: list[object] = [axes or None, *[None] * (len(eqn.invars[0].aval.shape) - 1)]
    for place, other in zip(left, right, strict=True):
        rows[place] = entries[other]
    out = [entry for d, entry in enumerate(rows) if d not in left]
    out += [entry for d, entry in enumerate(entries) if d not in (0, *right)]
    summed = tuple(axis for d in right for axis in axes_of_entry(entries[d]) if axis != apart)

    def inside(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        found = product(rows if copied is None else rows[0], weights, sizes)
        return found if apart is None else [y[None] for y in found]

    def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        sizes = sizes.astype(jnp.int32)  # an author's may be of few bits, or without a sign
        if counts is not None:
            return _on_one_device(eqn, (rows, weights, sizes[0]), params, mesh)
        if not axes:
            return _on_one_device(eqn, (rows, weights, sizes), params, mesh)
        number = jnp.zeros((), sizes.dtype)
        for axis in axes:
            number = number * mesh.shape[axis] + lax.axis_index(axis).astype(sizes.dtype)
        first, ends = number * len(rows), jnp.cumsum(sizes)
        own = jnp.minimum(ends, first + len(rows)) - jnp.maximum(ends - sizes, first)
        return _on_one_device(eqn, (rows, weights, jnp.maximum(own, 0)), params, mesh)

    front = [[] if axis is None else [axis] for axis in (copied, apart)]
    operands = operands if counts is None else [*operands[:2], counts]
    of_sizes = PartitionSpec() if counts is None else PartitionSpec(axes or None)
    specs = [PartitionSpec(*front[0], *rows), weights, of_sizes]
    made = [PartitionSpec(*front[1], *out)]
    return in_region(inside, operands, specs, made, mesh, [summed], alone=True, as_is=True)


def _on_one_device(eqn: Equation, operands: Sequence[jax.Array], params: Params, mesh: Mesh) -> list[jax.Array]:
    """The product of what a device has: by a kernel, in blocks, or at once where that is little more to multiply."""
    device = mesh.devices.flat[0]
    by = tiles_of(operands, params, device) or blocks_of(operands, params, device.platform == "cpu")
    return bind(eqn, operands, params) if by is None else [by.multiply(*operands)]
