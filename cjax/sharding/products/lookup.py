"""Lookups in what a grid splits: rows of a table, and one entry for each row out of a split dim (a target's logit)."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation
from cjax.sharding.products.region import in_region, raised_on_cpu
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.jaxpr.evaluate import bind_as_is


def picked_dim(eqn: Equation) -> int | None:
    """The dim out of which a gather picks one entry for each row, as `jnp.take_along_axis` does; None for others."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    dims = numbers.collapsed_slice_dims
    rows = tuple(d for d in range(len(shape)) if d not in dims)
    picks = len(dims) == 1 and tuple(numbers.start_index_map) == tuple(dims) and not numbers.offset_dims
    return dims[0] if picks and tuple(numbers.operand_batching_dims) == rows else None


def is_lookup(eqn: Equation) -> bool:
    """Whether a gather takes whole slices at indices of one dim, as `jnp.take` does."""
    numbers, shape, sizes = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    dims = numbers.collapsed_slice_dims
    if len(dims) != 1 or numbers.operand_batching_dims or tuple(numbers.start_index_map) != tuple(dims):
        return False
    return all(sizes[d] == n for d, n in enumerate(shape) if d != dims[0])


def pick(eqn: Equation, operand: jax.Array, indices: jax.Array, spec: PartitionSpec, dim: int, mesh: Mesh) -> jax.Array:
    """The result of such a gather; each device looks in its own shard along `dim`, and what they find is added up.

    Args:
      eqn: the gather.
      operand: [..., n, ...].
      indices: of dim `dim`, one for each row.
      spec: placement of `operand`.
      dim: the dim picked from, split in `spec`.
      mesh: the mesh.
    """
    entries = [axes_of_entry(e) for e in spec]
    numbers = eqn.params["dimension_numbers"]
    rows: list[tuple[str, ...]] = [()] * indices.ndim
    for d, at in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        rows[at] = entries[d]
    return _found(eqn, operand, indices, spec, dim, as_spec(rows), as_spec(rows[:-1]), mesh)


def find_rows(
    eqn: Equation, table: jax.Array, indices: jax.Array, spec: PartitionSpec, rows: PartitionSpec, mesh: Mesh
) -> jax.Array:
    """The rows of a table; each device looks in its own shard of them, and what they find is added up.

    Args:
      eqn: the gather, of whole slices along all dims but one.
      table: a weight.
      indices: of rows.
      spec: placement of the table, split along the dim looked up and no other.
      rows: placement of the indices; over the axes of the table they are whole.
      mesh: the mesh.
    """
    numbers = eqn.params["dimension_numbers"]
    (dim,) = numbers.collapsed_slice_dims
    split = axes_of_entry(spec[dim])
    out: list[tuple[str, ...]] = [tuple(a for a in axes_of_entry(e) if a not in split) for e in rows]
    whole = as_spec(out)
    out = out[:-1]
    for at in numbers.offset_dims:
        out.insert(at, ())
    return _found(eqn, table, indices, spec, dim, whole, as_spec(out), mesh)


def _found(
    eqn: Equation,
    operand: jax.Array,
    indices: jax.Array,
    spec: PartitionSpec,
    dim: int,
    rows: PartitionSpec,
    out: PartitionSpec,
    mesh: Mesh,
) -> jax.Array:
    """The result, placed as `out`, of a gather at `indices`, placed as `rows`, of dim `dim`, which `spec` splits."""
    split, size = axes_of_entry(spec[dim]), operand.shape[dim]
    shards = math.prod(mesh.shape[a] for a in split)
    padded = jnp.pad(operand, [(0, -size % shards if d == dim else 0) for d in range(operand.ndim)])
    numbers = eqn.params["dimension_numbers"]
    params = eqn.params | {"mode": lax.GatherScatterMode.CLIP}

    def local(part: jax.Array, indices: jax.Array) -> list[jax.Array]:
        first = lax.axis_index(split) * part.shape[dim]
        mine = (indices >= first) & (indices < first + part.shape[dim])
        (found,) = bind_as_is(eqn, (part, jnp.where(mine, indices - first, 0)), params)
        return [jnp.where(_beside(mine[..., 0], numbers.offset_dims, found.ndim), found, 0)]

    clipped = jnp.clip(indices, 0, size - 1)
    (found,) = in_region(local, (padded, clipped), (spec, rows), (out,), mesh, (split,))
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = eqn.params.get("fill_value")
    fill = jnp.nan if fill is None and jnp.issubdtype(found.dtype, jnp.inexact) else fill or 0
    inside = ((indices >= 0) & (indices < size))[..., 0]
    return jnp.where(_beside(inside, numbers.offset_dims, found.ndim), found, jnp.asarray(fill, found.dtype))


def _beside(rows: jax.Array, offset_dims: Sequence[int], ndim: int) -> jax.Array:
    """Values of rows, against whatever was looked up for each."""
    return jnp.expand_dims(rows, [d for d in range(ndim) if d in offset_dims])


def look_up(
    eqn: Equation, table: jax.Array, indices: jax.Array, spec: PartitionSpec, rows: PartitionSpec, mesh: Mesh
) -> jax.Array:
    """The rows of a table, which is gathered along the dim looked up; its gradient is scattered along it.

    Args:
      eqn: the gather, of whole slices along all dims but one.
      table: a weight.
      indices: of rows.
      spec: placement of the table, its dims padded to what it divides.
      rows: placement of the indices.
      mesh: the mesh.
    """
    numbers = eqn.params["dimension_numbers"]
    (dim,) = numbers.collapsed_slice_dims
    entries = [axes_of_entry(e) for e in spec]
    shards = [math.prod(mesh.shape[a] for a in axes) for axes in entries]
    size = table.shape[dim]
    padded = jnp.pad(raised_on_cpu(table, mesh), [(0, -n % s) for n, s in zip(table.shape, shards, strict=True)])
    out: list[tuple[str, ...]] = [axes_of_entry(e) for e in rows[:-1]]
    for at, d in zip(numbers.offset_dims, (d for d in range(table.ndim) if d != dim), strict=True):
        out.insert(at, entries[d])

    def local(part: jax.Array, indices: jax.Array) -> list[jax.Array]:
        whole = lax.all_gather(part, entries[dim], axis=dim, tiled=True) if entries[dim] else part
        whole = lax.slice_in_dim(whole, 0, size, axis=dim)
        params = eqn.params | {"slice_sizes": tuple(1 if d == dim else n for d, n in enumerate(whole.shape))}
        return bind_as_is(eqn, (whole, indices), params)

    (found,) = in_region(local, (padded, indices), (spec, rows), (as_spec(out),), mesh)
    return found[tuple(slice(n) for n in eqn.outvars[0].aval.shape)].astype(table.dtype)
