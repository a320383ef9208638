"""Which values of a forward pass have a gradient that anybody wants, and which of them its derivative needs."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from cjax.jax_compat.core import Equation, Var
from cjax.planner.reading.stretches import Body, Spot
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.reading import Trace
from cjax.trace.stages.counters import depends


@dataclass(frozen=True)
class Derived:
    """The derivative of a body.

    Args:
      learned: top-level variables whose gradient anybody wants; of what a loop is given, all floats count as such.
      wanted: of what the body makes, whether a gradient is wanted.
      needed: what a backward pass needs, and so what makes it: operands of all that is not linear in them.
    """

    learned: frozenset[Var]
    wanted: Mapping[Spot, bool]
    needed: frozenset[Spot]

    def has_gradient(self, node: Spot) -> bool:
        return self.wanted[node] if node in self.wanted else _comes_with_gradient(node, self.learned)


def derived(body: Body, learned: frozenset[Var]) -> Derived:
    """Follows a body there and back."""
    wanted: dict[Spot, bool] = {}
    for step in body.steps:
        read = (node for node in step.reads if node is not None)
        any_of = any(wanted[n] if n in wanted else _comes_with_gradient(n, learned) for n in read)
        stops = step.eqn is not None and facts_of(step.eqn).stops
        for node in step.writes:
            wanted[node] = any_of and not stops and _is_float(node)
    needed: set[Spot] = set()
    for step in reversed(body.steps):
        facts = None if step.eqn is None else facts_of(step.eqn)
        nodes = [node for node in step.reads if node is not None]
        linear = facts is not None and (facts.linear or facts.view or (len(nodes) == 1 and bool(facts.linear_in)))
        if needed.intersection(step.writes) or (not linear and any(wanted[node] for node in step.writes)):
            needed.update(nodes)
    return Derived(learned, wanted, frozenset(needed))


def learned_of(trace: Trace) -> frozenset[Var]:
    """The variables of a trace whose gradient anybody wants: those that trained parameters have a part in. What a layer
    hands to the next is one, so that of a stack of equal layers the first's input counts too, be it the batch's own."""
    trained, nothing = frozenset[str](("params",)), frozenset[str]()
    on: dict[Var, frozenset[str]] = {trace.closed.jaxpr.invars[i]: trained for i in trace.leaves_of("params")}

    def mark(eqn: Equation, kinds: frozenset[str]) -> frozenset[str]:
        return nothing if facts_of(eqn).stops else kinds

    depends(trace.closed.jaxpr.eqns, on, mark)
    found = {var for var, kinds in on.items() if kinds}
    return frozenset(found.union(own for run in trace.runs for _, own, new, _ in run.carries if new in found))


def _comes_with_gradient(node: Spot, learned: frozenset[Var]) -> bool:
    return _is_float(node) and (bool(node.path) or node.var in learned)


def _is_float(node: Spot) -> bool:
    return jnp.issubdtype(node.var.aval.dtype, jnp.inexact)
