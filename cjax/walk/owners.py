"""Whose each value of a flat trace is: one layer's, or nobody's ("outside"); and after how many passes it is known.

An equation on values of one layer is that layer's. One on values of several is *joint*: what it reads of layers is
exported, and what it makes is outside. A pass over all layers makes what the joint equations of a round read, a program
adds it up; what only depends on the outside is there from the beginning, in round 0.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Literal, Var, make_jaxpr
from cjax.jax_compat.jaxprs import new_var
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.layers.grouping import CHAINED

Owner = tuple[int, int]  # a stack, a layer of it


@dataclass(frozen=True)
class Owned:
    """A trace whose values have owners.

    Attributes:
      made: what makes a variable; inputs and constants are not in it.
      owner: of a variable: the layer that it belongs to, None for the outside. Constants are the outside's.
      round_of: the number of rounds behind which a variable is known.
      joint: variables that joint equations make, in order.
      exports: for each round (from 1) and layer, the variables that joint equations read, in order.
      consts: arrays that the trace closes over.
      copies: for results that the outside has and a layer makes, the joint variable that holds the same.
    """

    made: Mapping[Var, Equation]
    owner: Mapping[Var, Owner | None]
    round_of: Mapping[Var, int]
    joint: Mapping[Var, None]
    exports: Mapping[int, Mapping[Owner, tuple[Var, ...]]]
    consts: Mapping[Var, object]
    copies: Mapping[Atom, Atom]

    @property
    def num_rounds(self) -> int:
        return max(self.exports, default=0)


def own(closed: ClosedJaxpr, owner_of: Mapping[Var, Owner], outside: Sequence[Atom] = ()) -> Owned:
    """Find the owner and the round of each value.

    Args:
      closed: a flat trace without equations that nothing needs.
      owner_of: owners of inputs; those left out are outside.
      outside: results that the outside has.

    >>> import jax, jax.numpy as jnp
    >>> closed = jax.make_jaxpr(lambda x, y: (x / (x + y), y))(1.0, 2.0)
    >>> owned = own(closed, {var: (0, layer) for layer, var in enumerate(closed.jaxpr.invars)})
    >>> [(eqn.primitive.name, owned.owner[eqn.outvars[0]], owned.round_of[eqn.outvars[0]]) for eqn in closed.eqns]
    [('add', None, 1), ('div', (0, 0), 1)]
    """
    found = _Found({**dict.fromkeys(closed.jaxpr.invars), **owner_of})
    found.owner.update(dict.fromkeys(closed.jaxpr.constvars))
    chains, inner = _chains(closed)
    for eqn in closed.eqns:
        if id(eqn) in inner:
            continue
        chain = chains.get(id(eqn))
        if chain is None:
            found.add(eqn)
        else:
            found.add_chain(eqn, *chain)
    copies: dict[Atom, Atom] = {}
    for atom in outside:
        if type(atom) is not Literal and found.owner[atom] is not None:
            copies[atom] = found.add_copy(atom)
    exports = {
        number: {owner: tuple(dict.fromkeys(read)) for owner, read in layers.items()}
        for number, layers in found.exports.items()
    }
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return Owned(found.made, found.owner, found.round_of, dict.fromkeys(found.joint), exports, consts, copies)


@dataclass
class _Found:
    owner: dict[Var, Owner | None]
    made: dict[Var, Equation] = field(default_factory=dict)
    round_of: dict[Var, int] = field(default_factory=lambda: collections.defaultdict(int))
    joint: list[Var] = field(default_factory=list)
    exports: dict[int, dict[Owner, list[Var]]] = field(default_factory=dict)

    def owners(self, atoms: Iterable[Atom]) -> list[Owner]:
        """The layers that these belong to."""
        found = [self.owner[atom] for atom in atoms if type(atom) is not Literal]
        return list(dict.fromkeys(owner for owner in found if owner is not None))

    def add(self, eqn: Equation, is_joint: bool = False) -> None:
        read = variables(eqn)
        owners = self.owners(read)
        is_joint |= len(owners) > 1
        number = max((self.round_of[v] + (is_joint and self.owner[v] is not None) for v in read), default=0)
        self.made.update((var, eqn) for var in eqn.outvars)
        self.owner.update(dict.fromkeys(eqn.outvars, None if is_joint or not owners else owners[0]))
        self.round_of.update(dict.fromkeys(eqn.outvars, number))
        if is_joint:
            self.joint += eqn.outvars
            for var in read:
                owner = self.owner[var]
                if owner is not None:
                    self.exports.setdefault(number, {}).setdefault(owner, []).append(var)

    def add_copy(self, var: Var) -> Var:
        """The outside's own of a layer's value."""
        shape = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        (eqn,) = make_jaxpr(jax.lax.optimization_barrier)(shape).eqns  # of keys too
        # JAX keeps a trace by the shapes: of values of one shape, all copies would be the same variable.
        out = new_var(var.aval)
        self.add(eqn.replace(invars=[var], outvars=[out]), True)
        return out

    def add_chain(self, eqn: Equation, terms: Sequence[Atom], before: Sequence[Equation]) -> None:
        """A long sum. Each layer adds up its own terms, so that it exports one number; and the sum of all is joint at
        every link, or each would wait for the one before."""
        if len(self.owners(terms)) < 2:
            for one in (*before, eqn):
                self.add(one)
            return
        by_owner: dict[Owner | None, list[Atom]] = {}
        for term in terms:
            by_owner.setdefault(None if type(term) is Literal else self.owner[term], []).append(term)

        def link(is_joint: bool) -> Callable[[Atom, Atom], Atom]:
            def linked(total: Atom, term: Atom) -> Atom:
                out = new_var(eqn.outvars[0].aval)
                self.add(eqn.replace(invars=[total, term], outvars=[out]), is_joint)
                return out

            return linked

        totals = [functools.reduce(link(False), own_terms) for own_terms in by_owner.values()]
        *first, last = totals
        self.add(eqn.replace(invars=[functools.reduce(link(True), first), last]), True)


def _chains(closed: ClosedJaxpr) -> tuple[dict[int, tuple[list[Atom], list[Equation]]], set[int]]:
    """For the last equation of each long sum (its id) the terms and the equations before it, in order; and the ids of
    the latter."""
    uses = collections.Counter(v for eqn in closed.eqns for v in variables(eqn))
    uses.update(atom for atom in closed.jaxpr.outvars if type(atom) is not Literal)
    made = {eqn.outvars[0]: (index, eqn) for index, eqn in enumerate(closed.eqns) if len(eqn.outvars) == 1}
    chains: dict[int, tuple[list[Atom], list[Equation]]] = {}
    inner: set[int] = set()
    for root in reversed(closed.eqns):
        name = name_of(root)
        if name not in CHAINED or id(root) in inner or root.outvars[0].aval.dtype.kind not in CHAINED[name].kinds:
            continue
        terms: list[Atom] = []
        links: list[tuple[int, Equation]] = []
        pending = list(root.invars)[::-1]
        while pending:
            atom = pending.pop()
            index, link = (None, None) if type(atom) is Literal else made.get(atom, (None, None))
            if type(atom) is Literal or link is None or index is None or uses[atom] > 1:
                terms.append(atom)
            elif name_of(link) == name and atom.aval.shape == root.outvars[0].aval.shape:
                links.append((index, link))
                pending += list(link.invars)[::-1]
            else:
                terms.append(atom)
        if links:
            chains[id(root)] = terms, [link for _, link in sorted(links, key=lambda pair: pair[0])]
            inner |= {id(link) for _, link in links}
    return chains, inner
