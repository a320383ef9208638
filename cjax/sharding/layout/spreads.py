"""The matmuls of a trace that `cjax.sharding.products.matmul` multiplies: which they are, and how each is spread.

They are the products of a grid, and under `sequence=gather` those between which positions are split over the tensor
axis: one side gathers them, the other scatters (Korthikanti et al., 2022). Those of one input go together.
"""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.grid import Operand, spread_of
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.matmul import Move, Spread
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.groups import Group, make_group
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import variable_of


class Spreads:
    """Finds the products that a layout spreads. A group is of the spread of each of its equations, by the id."""

    def __init__(self, dims: Dims, layout: Layout) -> None:
        self._dims, self._layout = dims, layout
        self._gathers = any(layout.axes_of.get(c) == (TENSOR,) for c in layout.positions)

    def find(self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope) -> list[Group[dict[int, Spread]]]:
        """Groups of matmuls with a weight each, that share the activation."""
        if self._layout.grid is None and not self._gathers:
            return []
        together: dict[tuple[Atom, Move | None, str, str], list[tuple[Equation, Spread]]] = {}
        for eqn in eqns:
            spread = self._spread(eqn, scope)
            if spread is not None:
                x = eqn.invars[1 - weight_at(eqn, scope)]
                key = (x, spread.gather_x, str(spread.x), str(eqn.params["precision"]))
                together.setdefault(key, []).append((eqn, spread))
        groups = []
        for found in together.values():
            members = [eqn for eqn, _ in found]
            spreads = {id(eqn): spread for eqn, spread in found}
            whole = make_group(members, eqns, results, spreads)
            alone = [make_group([eqn], eqns, results, spreads) for eqn in members] if whole is None else [whole]
            groups += [group for group in alone if group is not None]
        return groups

    def _spread(self, eqn: Equation, scope: Scope) -> Spread | None:
        layout = self._layout
        if name_of(eqn) != "dot_general":
            return None
        (contracting, batched) = eqn.params["dimension_numbers"]
        literal = any(isinstance(v, Literal) for v in eqn.invars)
        leaves = [] if literal else [scope.origin[v] for v in eqn.invars if v in scope.origin]
        if any(batched) or len(leaves) != 1 or (layout.grid is not None and leaves[0] not in layout.weights):
            return None
        at = weight_at(eqn, scope)
        x, w = (self._operand(variable_of(eqn, i), scope) for i in (1 - at, at))
        contracted = tuple(contracting[1 - at]), tuple(contracting[at])
        if layout.grid is None:
            return self._between(x, w, contracted)
        return spread_of(layout.grid, layout.axes_of, layout.batch, x, w, contracted)

    def _between(self, x: Operand, w: Operand, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Spread | None:
        """Of a matmul of 1D whose input or result has its positions split: gathered before, or scattered after."""
        place = next((d for d, c in enumerate(x.classes) if c in self._layout.positions), None)
        if place is None or place in contracted[0] or x.shape[place] < self._layout.axis_sizes[TENSOR]:
            return None
        x_free = [d for d in range(len(x.shape)) if d not in contracted[0]]
        w_free = [d for d in range(len(w.shape)) if d not in contracted[1]]
        y = [x.spec[d] for d in x_free] + [w.spec[d] for d in w_free]
        at = x_free.index(place)
        if TENSOR in axes_of_entry(x.spec[place]) and any(TENSOR in axes_of_entry(w.spec[d]) for d in w_free):
            y[at] = tuple(a for a in axes_of_entry(x.spec[place]) if a != TENSOR) or None
            return Spread(contracted, x.spec, w.spec, PartitionSpec(*y), Move(TENSOR, place), None)
        pairs = zip(*contracted, strict=True)
        if any(TENSOR in axes_of_entry(x.spec[i]) and TENSOR in axes_of_entry(w.spec[j]) for i, j in pairs):
            y[at] = (*axes_of_entry(x.spec[place]), TENSOR)
            return Spread(contracted, x.spec, w.spec, PartitionSpec(*y), None, None, Move(TENSOR, at))
        return None

    def _operand(self, var: Var, scope: Scope) -> Operand:
        classes, shape = self._dims.of(var, scope), var.aval.shape
        return Operand(self._layout.spec(classes, shape), classes, shape)


def weight_at(eqn: Equation, scope: Scope) -> int:
    """Which operand is the weight."""
    return int(eqn.invars[1] in scope.origin) if not isinstance(eqn.invars[1], Literal) else 0
