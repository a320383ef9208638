"""The lookups of a trace that are not left to the partitioner: it would move more, or stop the process.

They are those in what a grid splits, those in stages of a pipeline, and those by positions that an axis splits which
splits what is looked up as well: of these no device can find its own; nor can it of the batch's rows in another order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Literal, Var
from cjax.mesh import PIPE
from cjax.sharding.layout.grid import Grid, crosses
from cjax.sharding.layout.layout import Layout
from cjax.sharding.layout.rows import adds_among_rows, is_among_rows
from cjax.sharding.layout.shards import looked_up_dim
from cjax.sharding.place.copies import Copies
from cjax.sharding.place.own_rows import OwnRows
from cjax.sharding.products.addition import add_to_rows, added_to_dim
from cjax.sharding.products.lookup import (
    find_across,
    find_among,
    find_own,
    find_rows,
    is_lookup,
    look_up,
    pick,
    picked_dim,
)
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Scope
from cjax.trace.emit.precision import Lowering
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import variable_of
from cjax.trace.reading import Trace

Indexed = Callable[[Equation, list[Any], Scope], list[Any] | None]


class Lookups:
    """Evaluates the lookups of a trace."""

    def __init__(
        self, trace: Trace, layout: Layout, mesh: Mesh, lowering: Lowering | None, copies: Copies, own: OwnRows
    ) -> None:
        self._own = own
        self._trace, self._layout, self._mesh, self._lowering, self._copies = trace, layout, mesh, lowering, copies

    def find(self, eqn: Equation, ins: list[Any], scope: Scope, indexed: Indexed) -> jax.Array | None:
        """The result of a gather, or of a scatter that adds rows up; None for those that the partitioner is left, and
        for all other equations.

        Args:
          eqn: the equation.
          ins: its operands.
          scope: the dims of its variables.
          indexed: evaluates gathers of other forms at which the compiler could stop the process.
        """
        if adds_among_rows(eqn, self._trace, scope):
            return self._added(eqn, ins, scope)
        grid = self._layout.grid
        if name_of(eqn) != "gather" or self._copies.has(ins[0]):
            return None
        if any(isinstance(var, Literal) for var in eqn.invars):
            return None
        operand, indices = variable_of(eqn, 0), variable_of(eqn, 1)
        looked_up, dim = eqn.params["dimension_numbers"].collapsed_slice_dims, picked_dim(eqn)
        spec, rows = self.in_region(operand, scope), self.in_region(indices, scope)
        if is_among_rows(eqn, self._trace, scope) and self._are_stretches(eqn, spec, rows):
            values, places = self._lowering.given(eqn, ins, scope)[0] if self._lowering else ins
            return find_among(eqn, values, places, spec, rows, self._mesh, self._own.has(eqn))
        shared = self._axes_of(operand, looked_up, scope, False)
        shared &= self._axes_of(indices, range(len(rows)), scope, True)
        if grid is None and not shared and PIPE not in jax.sharding.get_abstract_mesh().manual_axes:
            return None
        if dim is not None and spec[dim] is not None:
            value = self._lowering.raised(ins[0], operand) if self._lowering else ins[0]
            return pick(eqn, value, ins[1], spec, dim, self._mesh)
        if grid is not None and scope.origin.get(operand) in self._layout.weights and is_lookup(eqn):
            return self._in_grid(eqn, grid, ins, scope, rows)
        split = [d for d, axes in enumerate(spec) if axes]
        if grid is None and is_lookup(eqn) and split == list(looked_up):
            return find_rows(eqn, ins[0], ins[1], spec, rows, self._mesh)
        if grid is None and is_lookup(eqn) and not split and operand in scope.origin:
            return find_own(eqn, ins[0], 0, ins[1], spec, rows, self._mesh)
        return next(iter(indexed(eqn, ins, scope) or ()), None)

    def _added(self, eqn: Equation, ins: list[Any], scope: Scope) -> jax.Array | None:
        """The result of a scatter that adds the batch's rows to others; None where devices do not have a stretch."""
        spec, rows, added = (self.in_region(variable_of(eqn, place), scope) for place in range(3))
        dim, window = added_to_dim(eqn), eqn.params["dimension_numbers"].update_window_dims
        beside = [axes_of_entry(spec[d]) for d in range(len(spec)) if d != dim]
        placed = [axes_of_entry(added[d]) for d in window] == beside
        placed &= [axes_of_entry(e) for d, e in enumerate(added) if d not in window] == [*map(axes_of_entry, rows[:-1])]
        if not placed or not self._are_stretches(eqn, spec, rows):
            return None
        given = self._lowering.given(eqn, ins, scope)[0] if self._lowering else ins
        low = self._lowering.low if self._lowering else None
        return add_to_rows(eqn, [*map(jnp.asarray, given)], [spec, rows, added], self._mesh, low, self._own.has(eqn))

    def _are_stretches(self, eqn: Equation, spec: PartitionSpec, rows: PartitionSpec) -> bool:
        """Whether the same axes split what is looked up and what looks it up, both in equal parts, and no others the
        latter."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        sizes = {axis: size for axis, size in self._mesh.shape.items() if size > 1 and axis not in manual}
        found = []
        for var, entries in zip(eqn.invars, (spec, rows), strict=False):
            split = [tuple(axis for axis in axes_of_entry(entry) if axis in sizes) for entry in entries]
            even = all(n % self._size(axes) == 0 for n, axes in zip(var.aval.shape, split, strict=True))
            found.append([(d, axes) for d, axes in enumerate(split) if axes] if even else [])
        mine, theirs = found
        dim = looked_up_dim(eqn) if name_of(eqn) == "gather" else added_to_dim(eqn)
        return len(theirs) == 1 and (dim, theirs[0][1]) in mine

    def in_region(self, var: Var, scope: Scope) -> PartitionSpec:
        """Where a region has a variable, in which devices have equal parts: positions that don't divide are whole."""
        classes, shape = self._trace.dims.of(var, scope), var.aval.shape
        places = [d for d, c in enumerate(classes) if c in self._layout.positions]
        return self.even(self._layout.spec(classes, shape), shape, places)

    def even(self, spec: PartitionSpec, shape: Sequence[int], dims: Sequence[int]) -> PartitionSpec:
        """`spec`, those of `dims` whole of which devices would have unequal parts."""
        sizes = [self._size(entry) for entry in spec]
        uneven = {d for d in dims if d < len(spec) and shape[d] % sizes[d]}
        return PartitionSpec(*(None if d in uneven else entry for d, entry in enumerate(spec)))

    def _in_grid(self, eqn: Equation, grid: Grid, ins: list[Any], scope: Scope, rows: PartitionSpec) -> jax.Array:
        """The rows of a table that a grid splits: they are moved, or the table, whichever is less."""
        table, layout, numbers = variable_of(eqn, 0), self._layout, eqn.params["dimension_numbers"]
        (dim,), shape, classes = numbers.collapsed_slice_dims, table.aval.shape, self._trace.dims.of(table, scope)
        own = layout.weight_spec(scope.origin[table], classes, shape)
        of_table, of_rows = ([axes_of_entry(e) for e in each] for each in (own, rows))
        apart = math.prod(self._size(tuple(a for a in axes if a != grid.weight)) for axes in of_rows)
        if crosses(grid, of_table, of_rows, dim) and math.prod(ins[1].shape[:-1]) < shape[dim] * apart:
            return find_across(eqn, ins[0], ins[1], own, rows, self._mesh)
        rest = layout.spec([-1 if d == dim else c for d, c in enumerate(classes)], shape)
        spec = PartitionSpec(*(grid.weight if d == dim else axes for d, axes in enumerate(rest)))
        # As the result will be: features on one axis leave the batch the others.
        out = self.in_region(eqn.outvars[0], scope)
        behind = [axes for d, axes in enumerate(out) if d not in numbers.offset_dims]
        return look_up(eqn, ins[0], ins[1], spec, PartitionSpec(*behind, *rows[len(behind) :]), self._mesh)

    def _axes_of(self, var: Var, places: Sequence[int], scope: Scope, of_positions: bool) -> set[str]:
        """What splits those dims of a variable that are of positions, or those that are not."""
        classes, spec = self._trace.dims.of(var, scope), self.in_region(var, scope)
        mine = [d for d in places if (classes[d] in self._layout.positions) is of_positions]
        return {axis for d in mine for axis in axes_of_entry(spec[d])}

    def _size(self, entry: Any) -> int:
        return math.prod(self._mesh.shape[axis] for axis in axes_of_entry(entry))
