"""Products that devices' own shards are put in, so that less is reduced: found, and evaluated.

They are products that are added up before they are reduced (`cjax.sharding.layout.late`), and those that read copies of
rows (`cjax.sharding.layout.copied_rows`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from cjax.jax_compat.core import Atom, Equation, Params
from cjax.mesh import TENSOR
from cjax.sharding.layout.copied_rows import CopiedRows, RowsToCopy
from cjax.sharding.layout.late import LateSums
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.copied_rows import evaluate_copied
from cjax.sharding.place.copies import Copies
from cjax.sharding.place.grouped import GroupedProducts
from cjax.sharding.place.late_sums import evaluate_late
from cjax.sharding.place.own_rows import OwnRows
from cjax.sharding.place.regions import Regions
from cjax.trace.dims.find import Scope
from cjax.trace.emit.precision import Lowering
from cjax.trace.jaxpr.evenly import found_evenly
from cjax.trace.jaxpr.groups import Changed, Group, variables
from cjax.trace.reading import Trace


class OnShards:
    """Finds and evaluates such products.

    Args:
      trace: the model.
      layout: how its dims are split.
      mesh: the mesh.
      lowering: what is rounded, if anything is.
      copies: of weights, which such products are not made with.
      grouped: evaluates products of rows in groups.
      own: rows that devices sort by themselves.
      mark: says of a result that devices have parts of it, which are added up before it can be read.
    """

    def __init__(
        self, trace: Trace, layout: Layout, mesh: Mesh, lowering: Lowering | None, copies: Copies,
        grouped: GroupedProducts, own: OwnRows, mark: Callable[[jax.Array], jax.Array],
    ) -> None:  # fmt: skip
        self._late, self._copied = LateSums(trace.dims, layout), RowsToCopy(trace, layout)
        self._evenly = found_evenly(trace.closed.jaxpr) if mesh.shape.get(TENSOR, 1) > 1 else {}
        self._mesh, self._lowering, self._copies, self._grouped = mesh, lowering, copies, grouped
        self._own, self._mark = own, mark

    def find(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, others: Sequence[Group[Any]]
    ) -> list[Group[Any]]:
        """Groups of them; arguments as for `LateSums.find`."""
        found = self._late.find(eqns, results, scope, others)
        return [*found, *self._copied.find(eqns, results, scope, [*others, *found])]

    def evaluate(self, group: Group[Any], ins: list[Any], changed: Changed, scope: Scope) -> list[jax.Array] | None:
        """The results of such a group; None where it is best evaluated one by one."""
        mine, is_copied = {id(eqn) for eqn in group.eqns}, isinstance(group.of, CopiedRows)
        # A table that is looked up to be added to parts is read as it is, whoever else has copies of it.
        fed = () if is_copied else group.of.fed
        tables = {v for eqn in group.eqns if eqn.outvars[0] in fed for v in variables(eqn)}
        known = [x for v, x in zip(group.ins, ins, strict=True) if v not in tables]
        if any(map(self._copies.has, known)) or any(key in mine for key, _ in changed):
            return None
        entries, lowering = self._late.shards.of(scope), self._lowering

        def given(eqn: Equation, read: list[Any]) -> tuple[list[Any], Params]:
            return lowering.given(eqn, read, scope) if lowering else (read, eqn.params)

        def multiply(eqn: Equation, operands: list[Any], params: Params, **where: str) -> jax.Array:
            return self._grouped.multiply(eqn, operands, params, scope, **where)[0]

        regions = Regions(entries, self._mesh, self._own, self._evenly, lowering.low if lowering else None, self._mark)
        if is_copied:
            return evaluate_copied(group, ins, regions, given, functools.partial(multiply, copied=TENSOR))
        return evaluate_late(group, ins, regions, given, functools.partial(multiply, apart=TENSOR))
