"""Rows looked up for products of which each device makes some features: the gradient of what is looked up is reduced.

Each device has a part of the rows' gradient. Tokens that are sent to two experts are two rows, and the gradients of
both are added up on the way back. So the rows of each device are taken for a copy of its own; their gradient goes back
to the tokens as it is, and is reduced there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.layout import Layout
from cjax.sharding.layout.rows import is_among_rows
from cjax.sharding.layout.shards import OwnShards
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.groups import Group, make_group, variables, waits_for_itself
from cjax.trace.jaxpr.view import is_by_rows
from cjax.trace.reading import Trace


@dataclass(frozen=True)
class CopiedRows:
    """A lookup, and the products that read what it finds.

    Args:
      lookup: the equation.
      rows: what it finds.
    """

    lookup: Equation
    rows: Var


class RowsToCopy:
    """Finds such lookups."""

    def __init__(self, trace: Trace, layout: Layout) -> None:
        self._trace, self._grid, self.shards = trace, layout.grid, OwnShards(trace.dims, layout)
        self._size = layout.axis_sizes.get(TENSOR, 1)

    def find(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, others: Sequence[Group[Any]]
    ) -> list[Group[CopiedRows]]:
        """Groups of them and their products; arguments as for `LateSums.find`."""
        if self._size == 1 or self._grid is not None:
            return []
        taken = {id(eqn) for group in others for eqn in group.eqns}
        read_later = {v for v in results if not isinstance(v, Literal)}
        found: list[Group[CopiedRows]] = []
        for eqn in eqns:
            if id(eqn) in taken or not is_among_rows(eqn, self._trace, scope) or not self._pays(eqn, scope):
                continue
            (rows,) = eqn.outvars
            readers = [each for each in eqns if rows in variables(each)]
            makes = [self._makes_features(each, rows, scope) and id(each) not in taken for each in readers]
            if not makes or not all(makes) or rows in read_later:
                continue
            group = make_group([eqn, *readers], eqns, results, CopiedRows(eqn, rows))
            if group is not None and not waits_for_itself(group, eqns, [*others, *found]):
                found.append(group)
        return found

    def _pays(self, eqn: Equation, scope: Scope) -> bool:
        looked_up, rows = eqn.invars[0].aval, eqn.outvars[0].aval
        is_less = looked_up.size <= rows.size and jnp.issubdtype(rows.dtype, jnp.floating)
        return is_less and self.shards.in_place(eqn, scope)

    def _makes_features(self, eqn: Equation, rows: Var, scope: Scope) -> bool:
        """Whether this multiplies the rows, and along the tensor axis makes some features a device of all of them."""
        if not is_by_rows(eqn) or eqn.invars.index(rows) != 0 or rows in variables(eqn)[1:]:
            return False
        return TENSOR in self.shards.entries(eqn.outvars[0], scope)[-1] and self.shards.are_shards(eqn, scope)
