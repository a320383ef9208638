"""The sequence of a trace: the positions of its attentions, and its attentions as groups of equations."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cjax.jax_compat.core import Atom, Equation
from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import layer_of
from cjax.trace.jaxpr.groups import Group
from cjax.trace.jaxpr.view import is_scan, opened, scan_of
from cjax.trace.reading import Trace, once


@once
def positions(trace: Trace) -> tuple[dict[int, int], list[str]]:
    """Classes of the dims that are positions in an attention, each with its length; and why what looks like an
    attention is none."""
    found: dict[int, int] = {}
    reasons: list[str] = []
    for eqns, results, scope, _ in evaluated(trace):
        attentions, why = find_attentions(eqns, results, _before(trace, eqns), list(scope.origin))
        reasons += why
        for attention in attentions:
            for node in (attention.query, attention.key):
                roles, classes = attention.dims_of(node.var), trace.dims.of(node.var, scope)
                sizes = node.var.aval.shape
                found |= {c: n for c, role, n in zip(classes, roles, sizes, strict=True) if role in ("query", "key")}
    return found, list(dict.fromkeys(reasons))


def attention_groups(
    trace: Trace, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope
) -> list[Group[Attention]]:
    """The attentions among the equations of a body, as groups of them."""
    attentions, _ = find_attentions(eqns, results, _before(trace, eqns), list(scope.origin))
    return [Group(a.group.eqns, a.group.ins, a.group.outs, a) for a in attentions]


def in_parts(trace: Trace, attentions: Sequence[Group[Attention]], scope: Scope) -> list[Group[Attention]]:
    """Those attentions whose positions are split where those of the trace are.

    Queries in blocks that see no others (local attention) have two dims of positions, and an axis splits the blocks:
    each device has some of them whole, as it has rows of a batch.
    """
    places = positions(trace)[0]

    def is_whole(attention: Attention) -> bool:
        var = attention.query.var
        dims = zip(trace.dims.of(var, scope), attention.dims_of(var), strict=True)
        return any(c in places and role != "query" for c, role in dims)

    return [group for group in attentions if not is_whole(group.of)]


class EquationList(NamedTuple):
    """Equations that are evaluated as a list, what is read behind them, and how often that is."""

    eqns: Sequence[Equation]
    results: Sequence[Atom]
    scope: Scope
    times: int


def evaluated(trace: Trace) -> Iterator[EquationList]:
    """Lists of equations as they are evaluated: what is between stacks of layers, a layer of each, bodies of loops."""
    top = trace.closed.jaxpr
    index = 0
    waiting: list[EquationList] = []
    for run in trace.runs:
        # Read behind it, and not within: scores that only their own softmax reads are no result.
        later = [*top.outvars, *(v for eqn in top.eqns[run.start :] for v in eqn.invars)]
        waiting.append(EquationList(top.eqns[index : run.start], later, trace.dims.top, 1))
        waiting.append(EquationList(*layer_of(top.eqns, run), trace.dims.top, run.repeats))
        index = run.stop
    waiting.append(EquationList(top.eqns[index:], top.outvars, trace.dims.top, 1))
    while waiting:
        body = waiting.pop(0)
        yield body
        for eqn in body.eqns:
            inner = eqn.params.get("jaxpr")
            if inner is not None and id(eqn) in body.scope.inner:
                inner = opened(inner)
                times = body.times * (scan_of(eqn).length if is_scan(eqn) else 1)
                waiting.append(EquationList(inner.eqns, inner.outvars, body.scope.inner[id(eqn)], times))


def _before(trace: Trace, eqns: Sequence[Equation]) -> list[Equation]:
    """The equations evaluated before, whose values are there for all layers: not those of other stacks."""
    top = trace.closed.jaxpr.eqns
    first = next((i for i, eqn in enumerate(top) if eqns and eqn is eqns[0]), None)
    if first is None:
        return []
    # Layers of a stack are evaluated as one, by the equations of one of them: what another layer makes is not there to
    # be read.
    first = next((run.start for run in trace.runs if run.start <= first < run.stop), first)
    inside = {i for run in trace.runs for i in range(run.start, run.stop)}
    return [eqn for i, eqn in enumerate(top[:first]) if i not in inside]
