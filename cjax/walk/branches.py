"""Branches whose operands belong to several layers, both taken: which of them counts is then said result by result.

An optimizer that moves every second step (`optax.MultiSteps`) is one branch over all that it has. Taken apart into
layers it has to be one branch for each, and a choice between two results is one.
"""

from collections.abc import Mapping, Sequence

import jax
from jax import lax

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var, make_jaxpr
from cjax.jax_compat.jaxprs import place_of
from cjax.trace.jaxpr.evaluate import put_in_place
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.simplify import replaced
from cjax.trace.jaxpr.view import cond_of, open_bodies


def both_branches(closed: ClosedJaxpr, layers_of: Mapping[Var, int]) -> ClosedJaxpr:
    """A flat trace in which each `cond` on several layers is both its branches, and a choice.

    Args:
      closed: a flat trace.
      layers_of: the layers that inputs belong to, as bits; none where it is left out.

    >>> import jax.numpy as jnp
    >>> choose = lambda c, x, y: lax.cond(c, lambda: x + y, lambda: x)
    >>> closed = make_jaxpr(choose)(True, jnp.ones(2), jnp.ones(2))
    >>> [eqn.primitive.name for eqn in both_branches(closed, dict(zip(closed.jaxpr.invars[1:], (1, 2)))).eqns][-2:]
    ['add', 'select_n']
    """
    taken = _Taken(layers_of)
    taken.add(closed.jaxpr.eqns)
    outvars = [replaced(taken.env, atom) for atom in closed.jaxpr.outvars]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=taken.eqns, outvars=outvars), closed.consts)


class _Taken:
    def __init__(self, layers_of: Mapping[Var, int]) -> None:
        self.eqns: list[Equation] = []
        self.env: dict[Var, Atom] = {}
        self._layers = dict(layers_of)

    def add(self, eqns: Sequence[Equation]) -> None:
        for eqn in eqns:
            ins = [replaced(self.env, atom) for atom in eqn.invars]
            bits = 0
            for atom in ins:
                bits |= 0 if type(atom) is Literal else self._layers.get(atom, 0)
            results = self._results(eqn, ins) if bits & (bits - 1) else None
            if results is None:
                self.eqns.append(eqn.replace(invars=ins))
                self._layers.update(dict.fromkeys(eqn.outvars, bits))
            else:
                self.env.update(zip(eqn.outvars, results, strict=True))

    def _results(self, eqn: Equation, ins: Sequence[Atom]) -> list[Atom] | None:
        """What stands for the results of an equation whose bodies are put in its place; None for any other."""
        facts = facts_of(eqn)
        if facts.body and (facts.remat or facts.own_derivative):  # nobody takes a derivative of an update
            return self._inlined(eqn.params[facts.body], ins)
        if not facts.branches or any(_may_not_end(body) for body in open_bodies(eqn)):
            return None
        cond = cond_of(eqn)
        cases = [case for branch in cond.branches if (case := self._inlined(branch, cond.given(ins))) is not None]
        if len(cases) < len(cond.branches):
            return None
        return [self._chosen(cond.which(ins), atoms, eqn) for atoms in zip(*cases, strict=True)]

    def _inlined(self, body: ClosedJaxpr | Jaxpr, ins: Sequence[Atom]) -> list[Atom] | None:
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, [])
        if closed.consts or closed.effects:
            return None
        eqns: list[Equation] = []
        outs = put_in_place(closed, ins, eqns, place_of)
        self.add(eqns)
        return [replaced(self.env, atom) for atom in outs]

    def _chosen(self, which: Atom, cases: Sequence[Atom], eqn: Equation) -> Atom:
        if all(case is cases[0] for case in cases):
            return cases[0]
        shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in (which, *cases)]
        eqns: list[Equation] = []
        (out,) = put_in_place(make_jaxpr(lax.select_n)(*shapes), [which, *cases], eqns, lambda _: place_of(eqn))
        self.add(eqns)
        return replaced(self.env, out)


def _may_not_end(body: Jaxpr) -> bool:
    """Whether a loop is in it that ends on a condition: in the branch that is not meant it may run for ever."""
    return any(name_of(eqn) == "while" or any(_may_not_end(inner) for inner in open_bodies(eqn)) for eqn in body.eqns)
