"""Weights that loops over layers read: those of which each turn has a layer, and those that are read more than once."""

import collections
from collections.abc import Sequence

from cjax.jax_compat.core import Atom, Equation, Var
from cjax.trace.emit.emit import layer_of
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.view import is_scan, scan_of
from cjax.trace.reading import Trace


def stacked_leaves(trace: Trace) -> set[int]:
    """Inputs that a loop over layers takes apart: of a stack, or of the author's own loop."""
    return {leaf for stack in stacks_of_leaves(trace) for leaf in stack}


def stacks_of_leaves(trace: Trace) -> set[tuple[int, ...]]:
    """The same, those of one stack together."""
    jaxpr = trace.closed.jaxpr
    places = {var: i for i, var in enumerate(jaxpr.invars)}
    groups: list[Sequence[Atom]] = [group for run in trace.runs for group in run.stacked]
    groups += [(var,) for eqn in jaxpr.eqns if is_scan(eqn) for var in scan_of(eqn).xs(eqn.invars)]
    found = [tuple(places[var] for var in group if isinstance(var, Var) and var in places) for group in groups]
    return {group for group in found if group}


def read_again(trace: Trace) -> set[int]:
    """Inputs that are made ready for use more than once in a pass: by each turn of a loop over layers that have them in
    common, or in several places."""
    jaxpr = trace.closed.jaxpr
    places = {var: i for i, var in enumerate(jaxpr.invars)}
    uses: collections.Counter[int] = collections.Counter()
    outside: set[int] = set()
    found: set[int] = set()

    def read(eqns: Sequence[Equation]) -> None:
        for eqn in eqns:
            stacked = scan_of(eqn).xs(eqn.invars) if is_scan(eqn) else []
            uses.update(places[var] for var in stacked if isinstance(var, Var) and var in places)
            others = scan_of(eqn).consts(eqn.invars) + scan_of(eqn).carries(eqn.invars) if is_scan(eqn) else eqn.invars
            outside.update(places[var] for var in others if isinstance(var, Var) and var in places)

    start = 0
    for run in trace.runs:
        read(jaxpr.eqns[start : run.start])
        outside.update(places[first] for first, *_ in run.carries if first in places)
        stacked = {var for group in run.stacked for var in group}
        uses.update(places[var] for var in stacked if var in places)
        eqns, results = layer_of(jaxpr.eqns, run)
        inside = {var for eqn in eqns for var in variables(eqn)} | {var for var in results if isinstance(var, Var)}
        found |= {places[var] for var in inside - stacked if var in places}
        start = run.stop
    read(jaxpr.eqns[start:])
    uses.update(outside)
    return found | {leaf for leaf, count in uses.items() if count > 1}
