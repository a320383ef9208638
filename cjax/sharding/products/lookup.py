"""Lookups in what a grid splits: rows of a table, and one entry for each row out of a split dim (a target's logit)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from cjax.jax_compat.core import Equation, Params
from cjax.sharding.products.region import in_region, raised_on_cpu
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import facts_of, name_of

LOW_DTYPES = (jnp.bfloat16, jnp.float16)


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


def in_int32(eqn: Equation, ins: Sequence[Any]) -> Sequence[Any]:
    """What a gather or a scatter reads, its indices as int32: the same places. XLA ends the process where it fills up
    indices of another type, so that devices have as many each (JAX 0.10.2 to 0.12.0.1)."""
    if name_of(eqn) != "gather" and not facts_of(eqn).scatter:
        return ins
    indices = jnp.asarray(ins[1])
    if indices.dtype == jnp.int32:
        return ins
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if jnp.iinfo(indices.dtype).max > most:  # what is outside of int32 is outside of any tensor, and stays so
        indices = jnp.minimum(indices, most)
    if jnp.iinfo(indices.dtype).min < least:
        indices = jnp.maximum(indices, least)
    return [ins[0], indices.astype(jnp.int32), *ins[2:]]


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
      rows: placement of the indices; over the axes of the table they are whole, and so is what is found.
      mesh: the mesh.
    """
    numbers = eqn.params["dimension_numbers"]
    (dim,) = numbers.collapsed_slice_dims
    return _found(eqn, table, indices, spec, dim, *_whole_over(axes_of_entry(spec[dim]), eqn, rows), mesh)


def find_across(
    eqn: Equation, table: jax.Array, indices: jax.Array, spec: PartitionSpec, rows: PartitionSpec, mesh: Mesh
) -> jax.Array:
    """The rows of a table whose features are split by the axis that splits the batch, and that are to have features
    split by the axis of the table's rows.

    Each device looks up all rows of its line of the grid, in the part of the table that it has. The sum is scattered
    over the rows, and what is found changes places across the grid's diagonal. The table stays where it is.

    Args:
      eqn: the gather, of whole slices along all dims but one.
      table: a weight of two dims.
      indices: of rows.
      spec: placement of the table, one axis for each dim.
      rows: placement of the indices, of which one dim is split by the features' axis, last of the axes that split it.
      mesh: the mesh, whose two axes are as long.
    """
    numbers = eqn.params["dimension_numbers"]
    (dim,), (at,) = numbers.collapsed_slice_dims, numbers.offset_dims
    (across,), (along,) = axes_of_entry(spec[dim]), axes_of_entry(spec[1 - dim])
    num, size = mesh.shape[along], table.shape[dim]
    batch = next(d for d, entry in enumerate(rows) if along in axes_of_entry(entry))
    padded = jnp.pad(raised_on_cpu(table, mesh), [(0, -n % num) for n in table.shape])
    out: list[tuple[str, ...]] = [axes_of_entry(e) for e in rows[:-1]]
    out.insert(at, (across,))
    place = batch + (at <= batch)  # of the batch among the dims of what is found

    def local(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
        params = eqn.params | {"slice_sizes": tuple(1 if d == dim else n for d, n in enumerate(shard.shape))}
        every = lax.all_gather(indices, along, axis=batch, tiled=True)
        found = _in_shard(eqn, shard, every, (across,), params)
        mine = lax.psum_scatter(found, across, scatter_dimension=place, tiled=True)
        pairs = [(i * num + j, j * num + i) for i in range(num) for j in range(num)]
        return [lax.ppermute(mine, (along, across), pairs)]

    clipped = jnp.clip(indices, 0, size - 1)
    (found,) = in_region(local, (padded, clipped), (spec, rows), (as_spec(out),), mesh, as_is=True)
    found = found[tuple(slice(n) for n in eqn.outvars[0].aval.shape)].astype(table.dtype)
    return _filled(eqn, found, indices, size)


def find_own(
    eqn: Equation,
    copies: jax.Array,
    lead: int,
    indices: jax.Array,
    spec: PartitionSpec,
    rows: PartitionSpec,
    mesh: Mesh,
) -> jax.Array:
    """The rows of a table of which each device has a copy, looked up by its own indices.

    Args:
      eqn: the gather, of whole slices along all dims but one.
      copies: of the table, on `lead` more dims in front.
      lead: how many these are.
      indices: of rows.
      spec: placement of the copies; the table itself is split along the dim looked up, or not at all.
      rows: placement of the indices; over the axes of the table they are whole, and so is what is found.
      mesh: the mesh.
    """
    numbers = eqn.params["dimension_numbers"]
    (dim,) = numbers.collapsed_slice_dims
    split, size = axes_of_entry(spec[lead + dim]), copies.shape[lead + dim]
    shards = math.prod(mesh.shape[a] for a in split)
    dtype, copies = copies.dtype, raised_on_cpu(copies, mesh)
    padded = jnp.pad(copies, [(0, -size % shards if d == lead + dim else 0) for d in range(copies.ndim)])
    rows, out = _whole_over(split, eqn, rows)
    if not split:

        def whole(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
            return bind_as_is(eqn, (shard.reshape(shard.shape[lead:]), indices))

        specs = (spec, rows), (out,)
        (found,) = in_region(
            whole, (padded, indices), *specs, mesh, alone=True, differentiated=_wide(whole), as_is=True
        )  # fmt: skip
        return found.astype(dtype)

    def local(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
        shard = shard.reshape(shard.shape[lead:])
        return [_in_shard(eqn, shard, indices, split)]

    clipped = jnp.clip(indices, 0, size - 1)
    (found,) = in_region(
        local, (padded, clipped), (spec, rows), (out,), mesh, (split,), alone=True,
        differentiated=_wide(local), as_is=True,
    )  # fmt: skip
    return _filled(eqn, found.astype(dtype), indices, size)


def find_among(
    eqn: Equation,
    values: jax.Array,
    indices: jax.Array,
    spec: PartitionSpec,
    rows: PartitionSpec,
    mesh: Mesh,
    own: bool = False,
) -> jax.Array:
    """Rows of what is made of the batch, such as tokens in another order: each device has a stretch of them, and looks
    up some of all. They are gathered for it, and their gradient is scattered.

    Args:
      eqn: the gather, of whole slices along all dims but one.
      values: [..., n, ...].
      indices: of rows.
      spec: placement of `values`, split along the dim looked up.
      rows: placement of the indices, of which the axes of that dim split one, and no others any.
      mesh: the mesh.
      own: whether each device finds all among its own.
    """
    numbers = eqn.params["dimension_numbers"]
    (dim,) = numbers.collapsed_slice_dims
    axes = axes_of_entry(spec[dim])
    out = [axes_of_entry(entry) for entry in rows[:-1]]
    beside = [axes_of_entry(entry) for d, entry in enumerate(spec) if d != dim]
    for at, entry in zip(numbers.offset_dims, beside, strict=True):
        out.insert(at, entry)

    def look_up(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
        return [look_up_among(eqn, shard, indices, axes, mesh, own=own)]

    (found,) = in_region(look_up, (values, indices), (spec, rows), (as_spec(out),), mesh, alone=True, as_is=True)
    return found


def look_up_among(
    eqn: Equation,
    shard: jax.Array,
    indices: jax.Array,
    axes: tuple[str, ...],
    mesh: Mesh,
    times: int | None = None,
    own: bool = False,
) -> jax.Array:
    """In a region: what a device finds among the rows of all devices along `axes`, whose gradient goes back to them.

    Args:
      eqn: the gather, of whole slices along all dims but one.
      shard: the device's own of what is looked up, split by `axes` along that dim.
      indices: the device's own.
      axes: of the mesh; none where each device has all rows.
      mesh: the mesh.
      times: how often every row is found, where each device has all, or looks up its own.
      own: whether it finds all among its own.
    """
    (dim,), dtype = eqn.params["dimension_numbers"].collapsed_slice_dims, shard.dtype
    every = raised_on_cpu(shard, mesh)
    if own:
        indices = indices - first_of(axes, shard.shape[dim], mesh).astype(indices.dtype)
    elif axes:
        every = lax.all_gather(every, axes, axis=dim, tiled=True)
    params = eqn.params | {"slice_sizes": tuple(1 if d == dim else n for d, n in enumerate(every.shape))}
    (found,) = look_up_whole(eqn, (every, indices), params, times)
    return found.astype(dtype)


def first_of(axes: tuple[str, ...], num: int, mesh: Mesh) -> jax.Array:
    """In a region: the number of a device's first row, of as many on each along `axes`."""
    number = jnp.int32(0)
    for axis in axes:
        number = number * mesh.shape[axis] + lax.axis_index(axis)
    return number * num


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

    def local(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
        return [_in_shard(eqn, shard, indices, split)]

    clipped = jnp.clip(indices, 0, size - 1)
    (found,) = in_region(local, (padded, clipped), (spec, rows), (out,), mesh, (split,), as_is=True)
    return _filled(eqn, found, indices, size)


def _whole_over(split: tuple[str, ...], eqn: Equation, rows: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
    """Placements of a lookup's indices and of what it finds: as `rows`, but that those that share a table are whole."""
    kept = [tuple(a for a in axes_of_entry(e) if a not in split) for e in rows]
    out = kept[:-1]
    for at in eqn.params["dimension_numbers"].offset_dims:
        out.insert(at, ())
    return as_spec(kept), as_spec(out)


def _in_shard(
    eqn: Equation, shard: jax.Array, indices: jax.Array, split: tuple[str, ...], params: Params | None = None
) -> jax.Array:
    """What a device finds in its shard of the dim looked up, which `split` splits; zeros for what is elsewhere."""
    numbers = eqn.params["dimension_numbers"]
    (dim,) = numbers.start_index_map
    first = lax.axis_index(split) * shard.shape[dim]
    mine = (indices >= first) & (indices < first + shard.shape[dim])
    params = (params or eqn.params) | {"mode": lax.GatherScatterMode.CLIP}
    (found,) = look_up_whole(eqn, (shard, jnp.where(mine, indices - first, 0)), params)
    return jnp.where(_beside(mine[..., 0], numbers.offset_dims, found.ndim), found, 0)


def _filled(eqn: Equation, found: jax.Array, indices: jax.Array, size: int) -> jax.Array:
    """What was found at indices that were clipped, as the gather has it for those out of range."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = eqn.params.get("fill_value")
    fill = jnp.nan if fill is None and jnp.issubdtype(found.dtype, jnp.inexact) else fill or 0
    inside = ((indices >= 0) & (indices < size))[..., 0]
    offset_dims = eqn.params["dimension_numbers"].offset_dims
    return jnp.where(_beside(inside, offset_dims, found.ndim), found, jnp.asarray(fill, found.dtype))


def _wide(local: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """The same lookup in a table, whose gradient is added up in float32 on each device, and rounded once: a frequent
    token's is a sum of thousands, of which each addition would be rounded to the dtype of the table."""

    def wide(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
        if shard.dtype not in LOW_DTYPES:
            return local(shard, indices)
        return [found.astype(shard.dtype) for found in local(shard.astype(jnp.float32), indices)]

    return wide


def look_up_whole(eqn: Equation, ins: Sequence[ArrayLike], params: Params, times: int | None = None) -> list[jax.Array]:
    """A gather as it stands, but that the gradient of rows of 16 bits is added up in float32, and rounded once.

    With `times`, it finds every row so often (`cjax.trace.jaxpr.evenly`): their gradients are looked up in turn.

    And that of one entry for each row is compared for: scattered, zeros as large as the operand would be written, and
    read again by whatever is added. GPUs add numbers of 16 bits one by one, each waiting for the last: 75 ms for the
    16,384 rows of 1,024 that BERT's table of segments gets (an H100, JAX 0.11.2).
    """
    operand, indices = map(jnp.asarray, ins)
    dim = picked_dim(eqn)
    numbers, mode = eqn.params["dimension_numbers"], params["mode"]
    rows = tuple(range(operand.ndim - 1))
    picks = dim == operand.ndim - 1 and tuple(numbers.start_indices_batching_dims) == rows
    picks = picks and math.prod(indices.shape[operand.ndim - 1 :]) == 1
    is_low = is_lookup(eqn) and operand.dtype in LOW_DTYPES
    if not jnp.issubdtype(operand.dtype, jnp.floating) or not (picks or is_low or times):
        return bind_as_is(eqn, (operand, indices), params)

    def plain(operand: jax.Array, indices: jax.Array) -> jax.Array:
        return bind_as_is(eqn, (operand, indices), params)[0]

    def forward(operand: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return plain(operand, indices), indices

    def backward(indices: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
        if times:
            order, rows = jnp.argsort(indices.reshape(-1)), gradient.reshape(-1, *operand.shape[1:])
            each = rows.at[order].get(mode="promise_in_bounds", unique_indices=True)
            each = each.reshape(len(operand), times, *operand.shape[1:])
            wide = jnp.promote_types(operand.dtype, jnp.float32)
            return (each[:, 0] if times == 1 else each.sum(1, dtype=wide)).astype(operand.dtype), None
        if not picks:
            shape = jax.ShapeDtypeStruct(operand.shape, jnp.float32)
            (summed,) = jax.linear_transpose(lambda table: plain(table, indices), shape)(gradient.astype(jnp.float32))
            return summed.astype(operand.dtype), None
        one = (*operand.shape[:-1], 1)
        at = indices.reshape(one)
        at = at.astype(jnp.int32) if at.dtype.itemsize < 4 else at  # places go further than a byte counts
        at = jnp.clip(at, 0, operand.shape[-1] - 1) if mode == lax.GatherScatterMode.CLIP else at
        places = lax.broadcasted_iota(at.dtype, operand.shape, operand.ndim - 1)
        return jnp.where(places == at, gradient.reshape(one), 0), None

    found = jax.custom_vjp(plain)
    found.defvjp(forward, backward)
    return [found(operand, indices)]


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

    def local(shard: jax.Array, indices: jax.Array) -> list[jax.Array]:
        whole = lax.all_gather(shard, entries[dim], axis=dim, tiled=True) if entries[dim] else shard
        whole = lax.slice_in_dim(whole, 0, size, axis=dim)
        params = eqn.params | {"slice_sizes": tuple(1 if d == dim else n for d, n in enumerate(whole.shape))}
        return look_up_whole(eqn, (whole, indices), params)

    (found,) = in_region(local, (padded, indices), (spec, rows), (as_spec(out),), mesh, as_is=True)
    return found[tuple(slice(n) for n in eqn.outvars[0].aval.shape)].astype(table.dtype)
