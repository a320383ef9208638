"""Which rows and which features a device has of a product in groups, where all have as many."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cjax.jax_compat.core import Equation, Params
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.ragged import multiply_rows
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.dims.products import is_by_rows
from cjax.trace.jaxpr.view import variable_of


def multiply_in_groups(
    eqn: Equation, operands: Sequence[Any], params: Params, layout: Layout, dims: Dims, scope: Scope, mesh: Mesh
) -> list[jax.Array] | None:
    """The results of a product of rows in groups by each group's weight, on each device's own; None for all others.

    Args:
      eqn: an equation.
      operands: those of a product: rows, weights by group, and how many rows each group has.
      params: its parameters.
      layout: how dims are split.
      dims: of the trace.
      scope: of the equation's variables.
      mesh: the mesh.
    """
    if not is_by_rows(eqn):
        return None
    manual = jax.sharding.get_abstract_mesh().manual_axes
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in manual}

    def split(place: int) -> list[tuple[str, ...]]:
        var = variable_of(eqn, place)
        spec, found = layout.spec(dims.of(var, scope), var.aval.shape), list[tuple[str, ...]]()
        for length, entry in zip(var.aval.shape, spec, strict=True):
            axes = tuple(axis for axis in axes_of_entry(entry) if axis in sizes)
            found.append(axes if length % math.prod(sizes[axis] for axis in axes) == 0 else ())
        return found

    (rows, *_), (_, *features) = split(0), split(1)
    features = [tuple(axis for axis in axes if axis not in rows) for axes in features]
    return multiply_rows(eqn, [*map(jnp.asarray, operands)], params, rows, as_spec([(), *features]), mesh)
