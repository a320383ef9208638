"""How products relate the dims of their operands and results, and what they tell a layout: which of them multiply a
weight by an activation, and which two activations."""

from cjax.jax_compat.core import Equation, Literal
from cjax.trace.dims.classes import Dims, Ids, Matmul, Scope
from cjax.trace.jaxpr.sources import WEIGHT
from cjax.trace.jaxpr.view import is_by_rows, variable_of


def dot_general(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    dims.unite_all([lhs[i] for i in lc], [rhs[i] for i in rc])
    dims.unite_all([lhs[i] for i in lb], [rhs[i] for i in rb])
    out = [lhs[i] for i in lb]
    out += [d for i, d in enumerate(lhs) if i not in lc and i not in lb]
    out += [d for i, d in enumerate(rhs) if i not in rc and i not in rb]
    dims.unite_all(out, outs[0])
    origin = [None if isinstance(v, Literal) else scope.origin.get(v) for v in eqn.invars]
    contracted, batched = tuple(lhs[i] for i in lc), tuple(lhs[i] for i in lb)
    numbers = (tuple(lc), tuple(rc))
    out, weights, of_batch = tuple(outs[0]), _are_weights(eqn, scope), _are_of_batch(eqn, scope)
    dims.matmuls.append(
        Matmul(
            tuple(lhs), tuple(rhs), contracted, batched, out, origin[0], origin[1], numbers,
            weights=weights, of_batch=of_batch,
        )
    )  # fmt: skip


def ragged_dot_general(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    """Rows in groups and a weight for each group; of other forms nothing is said. Groups are no dim that a layout may
    split: how many rows each has is known when they are there."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((left, right), (batched, _)), groups = numbers.dot_dimension_numbers, numbers.rhs_group_dimensions
    lhs, rhs = ins[0], ins[1]
    if batched or len(groups) != 1:
        return
    dims.unite_all([lhs[i] for i in left], [rhs[i] for i in right])
    out = [d for i, d in enumerate(lhs) if i not in left] + [d for i, d in enumerate(rhs) if i not in (*right, *groups)]
    dims.unite_all(out, outs[0])
    if is_by_rows(eqn) and _is_weight_of(eqn, 1, scope):
        contracted, numbers = tuple(lhs[i] for i in left), (tuple(left), tuple(right))
        origin = scope.origin.get(variable_of(eqn, 1))
        dims.grouped.append(
            Matmul(
                tuple(lhs), tuple(rhs), contracted, (rhs[0],), tuple(outs[0]), None, origin, numbers,
                weights=(False, True), of_batch=_are_of_batch(eqn, scope),
            )
        )  # fmt: skip


def _are_weights(eqn: Equation, scope: Scope) -> tuple[bool, bool]:
    return _is_weight_of(eqn, 0, scope), _is_weight_of(eqn, 1, scope)


def _are_of_batch(eqn: Equation, scope: Scope) -> tuple[bool, bool]:
    """Whether operands depend on the batch."""
    first, second = (
        not isinstance(v, Literal) and v not in scope.origin and v not in scope.source for v in eqn.invars[:2]
    )
    return first, second


def _is_weight_of(eqn: Equation, place: int, scope: Scope) -> bool:
    var = eqn.invars[place]
    return not isinstance(var, Literal) and (var in scope.origin or scope.source.get(var) == WEIGHT)


def conv(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    x, w, y = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims.unite(lhs[x[0]], outs[0][y[0]])
    dims.unite_all([rhs[w[0]]], [outs[0][y[1]]])
    grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    if not grouped:
        dims.unite(lhs[x[1]], rhs[w[1]])
        origin = [None if isinstance(v, Literal) else scope.origin.get(v) for v in eqn.invars]
        channels = (rhs[w[1]], rhs[w[0]])  # the window's own dims are never split
        contracting = ((x[1],), (0,))
        out = tuple(outs[0])
        left, right, weights = origin[0], origin[1], _are_weights(eqn, scope)
        dims.matmuls.append(
            Matmul(tuple(lhs), channels, channels[:1], (), out, left, right, contracting, True, weights=weights)
        )
    elif dims.size[lhs[x[1]]] == dims.size[outs[0][y[1]]]:
        dims.unite(lhs[x[1]], outs[0][y[1]])  # depthwise: the channel goes straight through
