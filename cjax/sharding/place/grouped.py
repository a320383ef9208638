"""Which rows and which features a device has of a product in groups, where all have as many."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cjax.jax_compat.core import Equation, Params
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.own_rows import OwnRows
from cjax.sharding.place.saved import saved
from cjax.sharding.products.ragged import multiply_rows
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.view import is_by_rows, variable_of


class GroupedProducts:
    """Multiplies rows in groups by each group's weight, on each device's own.

    Args:
      dims: of the trace.
      layout: how they are split.
      mesh: the mesh.
      remat: what layers save; where it is products, these are saved as all others.
      own: rows that devices sort by themselves.
    """

    def __init__(self, dims: Dims, layout: Layout, mesh: Mesh, remat: str, own: OwnRows) -> None:
        self._dims, self._layout, self._mesh, self._remat, self._own = dims, layout, mesh, remat, own

    def multiply(
        self,
        eqn: Equation,
        operands: Sequence[Any],
        params: Params,
        scope: Scope,
        apart: str | None = None,
        copied: str | None = None,
    ) -> list[jax.Array]:
        """The results of a product of rows in groups.

        Args:
          eqn: the equation.
          operands: rows, weights by group, and how many rows each group has.
          params: its parameters.
          scope: of the equation's variables.
          apart, copied: of `multiply_rows`.
        """
        assert is_by_rows(eqn)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        sizes = {axis: size for axis, size in self._mesh.shape.items() if size > 1 and axis not in manual}

        def split(place: int) -> list[tuple[str, ...]]:
            var = variable_of(eqn, place)
            spec, found = self._layout.spec(self._dims.of(var, scope), var.aval.shape), list[tuple[str, ...]]()
            for length, entry in zip(var.aval.shape, spec, strict=True):
                axes = tuple(axis for axis in axes_of_entry(entry) if axis in sizes)
                found.append(axes if length % math.prod(sizes[axis] for axis in axes) == 0 else ())
            return found

        (rows, *_), (_, *features) = split(0), split(1)
        features = [tuple(axis for axis in axes if axis not in rows) for axes in features]
        operands = [*map(jnp.asarray, operands)]
        weights, counts = as_spec([(), *features]), self._own.counts(eqn, rows)
        found = multiply_rows(eqn, operands, params, rows, weights, self._mesh, apart, copied, counts)
        return list(map(saved, found)) if self._remat == "dots" else found
