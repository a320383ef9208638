"""Rows added to others at places of their own (`x.at[places].add(rows)`), of all of which devices have a stretch."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation
from cjax.sharding.products.lookup import LOW_DTYPES, first_of
from cjax.sharding.products.region import in_region, raised_on_cpu
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import name_of


def added_to_dim(eqn: Equation) -> int | None:
    """The dim along which a scatter adds whole slices, each at a place of its own; None for all other equations.

    >>> import jax, jax.numpy as jnp
    >>> add = lambda x, places, rows: x.at[places].add(rows)
    >>> closed = jax.make_jaxpr(add)(jnp.ones((4, 3)), jnp.arange(6), jnp.ones((6, 3)))
    >>> added_to_dim(closed.jaxpr.eqns[-1])
    0
    """
    if name_of(eqn) != "scatter-add":
        return None
    numbers, shape, updates = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    dims = tuple(numbers.inserted_window_dims)
    if len(dims) != 1 or numbers.operand_batching_dims or tuple(numbers.scatter_dims_to_operand_dims) != dims:
        return None
    slices = [updates[d] for d in numbers.update_window_dims]
    return dims[0] if slices == [n for d, n in enumerate(shape) if d != dims[0]] else None


def add_to_rows(
    eqn: Equation,
    operands: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    mesh: Mesh,
    low: Any = None,
    own: bool = False,
) -> jax.Array:
    """The result of such a scatter: each device adds its own rows up, and is given its stretch of all devices' sums.

    Args:
      eqn: the scatter.
      operands: what is added to, places, and rows.
      specs: their placements. The same axes split what is added to, along that dim, and the rows.
      mesh: the mesh.
      low: the dtype that sums are reduced in; None for their own.
      own: whether each device adds to its own alone.
    """
    dim = added_to_dim(eqn)
    assert dim is not None
    axes = axes_of_entry(specs[0][dim])

    def inside(shard: jax.Array, places: jax.Array, rows: jax.Array) -> list[jax.Array]:
        return [add_among(eqn, shard, places, rows, axes, mesh, low, own)]

    (found,) = in_region(inside, operands, specs, [specs[0]], mesh, alone=True, as_is=True)
    return found


def add_among(
    eqn: Equation,
    shard: jax.Array,
    places: jax.Array,
    rows: jax.Array,
    axes: tuple[str, ...],
    mesh: Mesh,
    low: Any = None,
    own: bool = False,
) -> jax.Array:
    """In a region: what a device is given of all devices' rows along `axes`, added to its own shard.

    Args:
      eqn: the scatter.
      shard: the device's own of what is added to, split by `axes` along the dim added to.
      places, rows: the device's own.
      axes: of the mesh; none where each device has all.
      mesh: the mesh.
      low: the dtype that sums are reduced in; None for their own.
      own: whether it adds to its own alone.
    """
    dim, num = added_to_dim(eqn), math.prod(mesh.shape[axis] for axis in axes)
    assert dim is not None
    if own:
        places = places - first_of(axes, shard.shape[dim], mesh).astype(places.dtype)
    if own or not axes:
        return bind_as_is(eqn, (shard, places, rows))[0]
    sent = low if low is not None and rows.dtype == jnp.float32 else rows.dtype
    wide = jnp.float32 if rows.dtype in LOW_DTYPES else rows.dtype
    zeros = jnp.zeros([n * num if d == dim else n for d, n in enumerate(shard.shape)], wide)
    (sums,) = bind_as_is(eqn, (zeros, places, rows.astype(wide)))
    mine = lax.psum_scatter(raised_on_cpu(sums.astype(sent), mesh), axes, scatter_dimension=dim, tiled=True)
    return shard + mine.astype(shard.dtype)
