"""A loss traced for two numbers of rows, matched equation by equation, from the results back.

What a loss does with the number of its rows shows in nothing but a comparison: in one trace the 8 of a division may be
the batch or a width. An equation without a twin is one that another number of rows makes otherwise.
"""

from collections.abc import Iterable

import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from cjax.trace.jaxpr.view import bodies, consts_of, opened

# Parameters that say shapes. What they make has a shape of its own to look at.
_SHAPES = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "length"})
_PLAIN = (bool, int, float, str, np.number)


class Twins:
    """Which equation and which constant of `other` takes the place of one of `closed`.

    >>> import jax, jax.numpy as jnp
    >>> one, two = (jax.make_jaxpr(lambda x: x.sum() / x.size)(jnp.ones(n)) for n in (2, 4))
    >>> [float(eqn.invars[1].val) for eqn in (one.eqns[1], Twins(one, two)[one.eqns[1]])]
    [2.0, 4.0]
    """

    def __init__(self, closed: ClosedJaxpr, other: ClosedJaxpr) -> None:
        self._eqns: dict[int, tuple[Equation, Equation]] = {}
        self._consts: dict[Var, ArrayLike] = {}
        self._torn: set[int] = set()
        self._bodies: set[tuple[int, int]] = set()
        self._pair(closed, other)

    def __getitem__(self, eqn: Equation) -> Equation | None:
        if id(eqn) in self._torn:
            return None
        _, twin = self._eqns.get(id(eqn), (None, None))
        return twin

    def const(self, var: Var) -> ArrayLike | None:
        """The constant that takes the place of one that a variable stands for."""
        return self._consts.get(var)

    def _pair(self, closed: ClosedJaxpr | Jaxpr, other: ClosedJaxpr | Jaxpr) -> None:
        jaxpr, twin = opened(closed), opened(other)
        if (id(jaxpr), id(twin)) in self._bodies:
            return
        self._bodies.add((id(jaxpr), id(twin)))
        made, others = ({v: eqn for eqn in j.eqns for v in eqn.outvars} for j in (jaxpr, twin))
        places = {v: i for i, v in enumerate(jaxpr.invars)}
        other_places = {v: i for i, v in enumerate(twin.invars)}
        consts = dict(zip(twin.constvars, consts_of(other), strict=False))
        constvars = set(jaxpr.constvars)
        seen: dict[Var, Var] = {}
        left = _variables(zip(jaxpr.outvars, twin.outvars, strict=False))
        while left:
            a, b, eqn = left.pop()
            if a in seen:
                if seen[a] is not b and eqn is not None:
                    self._torn.add(id(eqn))
                continue
            seen[a] = b
            one, two = made.get(a), others.get(b)
            if one is not None:
                if two is not None and _alike(one, two) and one.outvars.index(a) == two.outvars.index(b):
                    left += self._match(one, two)
            elif a in constvars and b in consts:
                self._consts[a] = consts[b]
            elif places.get(a, -1) != other_places.get(b, -2) and eqn is not None:
                self._torn.add(id(eqn))

    def _match(self, eqn: Equation, twin: Equation) -> list[tuple[Var, Var, Equation | None]]:
        known = self._eqns.setdefault(id(eqn), (eqn, twin))[1]
        if known is not twin:
            self._torn.add(id(eqn))
        for a, b in zip(bodies(eqn), bodies(twin), strict=False):
            self._pair(a, b)
        return _variables(zip(eqn.invars, twin.invars, strict=True), eqn)


def _variables(
    pairs: Iterable[tuple[Atom, Atom]], eqn: Equation | None = None
) -> list[tuple[Var, Var, Equation | None]]:
    return [(a, b, eqn) for a, b in pairs if not isinstance(a, Literal) and not isinstance(b, Literal)]


def _alike(eqn: Equation, twin: Equation) -> bool:
    """Whether two equations do the same, shapes and numbers aside."""
    if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
        return False
    if len(eqn.outvars) != len(twin.outvars):
        return False
    for a, b in zip((*eqn.invars, *eqn.outvars), (*twin.invars, *twin.outvars), strict=True):
        if isinstance(a, Literal) != isinstance(b, Literal):
            return False
        if len(getattr(a.aval, "shape", ())) != len(getattr(b.aval, "shape", ())):
            return False
    return all(_same(name, value, twin.params.get(name)) for name, value in eqn.params.items())


def _same(name: str, a: object, b: object) -> bool:
    if name in _SHAPES:
        return True
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        return a == b or (a != a and b != b)  # what a gather fills with is NaN
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same("", x, y) for x, y in zip(a, b, strict=True))
    return True  # types, functions, bodies: what they hold is compared where it stands
