"""Weights that grow before they meet examples: a small table looked up for each pair of positions, as T5's biases are.

Where they meet, the gradient is summed over examples, and there it is many times as large as the weight.
"""

import math
from collections.abc import Sequence

from cjax.jax_compat.core import Equation, Jaxpr, Literal, Var
from cjax.sharding.products.lookup import is_lookup
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.primitives import facts_of, name_of, named
from cjax.trace.jaxpr.view import is_scan, scan_of
from cjax.trace.reading import Trace

_WITH_OTHERS = named("dynamic_update_slice concatenate")


def grown(trace: Trace, batch: int | None) -> set[int]:
    """The weights that are larger where they meet examples, by way of equations that can be done of each copy.

    Args:
      trace: of a loss.
      batch: the class of the dims of examples; None if there is none.
    """
    if batch is None:
        return set()
    found = _Found(trace.dims, batch)
    jaxpr = trace.closed.jaxpr
    num = len(trace.leaves_of("params"))
    found.walk(jaxpr, trace.dims.top, {var: (i, _size(var)) for i, var in enumerate(jaxpr.invars[:num])})
    return found.leaves


def is_carried(eqn: Equation, place: int) -> bool:
    """Whether an equation can be done of each copy of an operand alone, its others being alike for all of them."""
    facts = facts_of(eqn)
    if facts.stops or len(eqn.outvars) != 1 or name_of(eqn) in _WITH_OTHERS:
        return False
    if name_of(eqn) == "gather":
        return place == 0 and is_lookup(eqn)
    return facts.elementwise or (facts.moves and place == 0)


def meeting_dim(eqn: Equation, place: int, at: Sequence[int]) -> int | None:
    """The dim of a result along which an operand, which has none of it, is repeated for examples; None elsewhere.

    Args:
      eqn: the equation.
      place: of the operand.
      at: the result's dims of examples.
    """
    if len(at) != 1:
        return None
    (dim,) = at
    shape = eqn.invars[place].aval.shape
    if name_of(eqn) == "broadcast_in_dim":
        of = {out: d for d, out in enumerate(eqn.params["broadcast_dimensions"])}
        return dim if place == 0 and (dim not in of or shape[of[dim]] == 1) else None
    same = facts_of(eqn).elementwise and len(shape) == len(eqn.outvars[0].aval.shape)
    return dim if same and shape[dim] == 1 else None


def dims_of(dims: Dims, var: Var, scope: Scope, wanted: int) -> list[int]:
    """The dims of a variable that are of a class, and longer than 1."""
    return [d for d, c in enumerate(dims.of(var, scope)) if c == wanted and var.aval.shape[d] > 1]


def _size(var: Var) -> int:
    return math.prod(var.aval.shape)


class _Found:
    """Goes along all that is made of one weight each, up to examples."""

    def __init__(self, dims: Dims, batch: int) -> None:
        self._dims, self._batch = dims, batch
        self.leaves: set[int] = set()

    def walk(self, jaxpr: Jaxpr, scope: Scope, made: dict[Var, tuple[int, int]]) -> None:
        """`made`: variables that are made of one weight, with its number and size."""
        for eqn in jaxpr.eqns:
            places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in made]
            if not places:
                continue
            if is_scan(eqn):
                loop = scan_of(eqn)
                pairs = zip(loop.consts(eqn.invars), loop.consts(loop.body.invars), strict=True)
                self._inside(eqn, loop.body, scope, made, list(pairs))
            elif facts_of(eqn).remat:
                inner: Jaxpr = eqn.params["jaxpr"]
                self._inside(eqn, inner, scope, made, list(zip(eqn.invars, inner.invars, strict=True)))
            elif len(places) == 1:
                self._follow(eqn, places[0], scope, made)

    def _inside(
        self,
        eqn: Equation,
        body: Jaxpr,
        scope: Scope,
        made: dict[Var, tuple[int, int]],
        pairs: Sequence[tuple[Var | Literal, Var]],
    ) -> None:
        known = {own: made[outer] for outer, own in pairs if not isinstance(outer, Literal) and outer in made}
        self.walk(body, scope.inner[id(eqn)], known)

    def _follow(self, eqn: Equation, place: int, scope: Scope, made: dict[Var, tuple[int, int]]) -> None:
        var = eqn.invars[place]
        assert not isinstance(var, Literal)
        leaf, size = made[var]
        if len(eqn.outvars) != 1:
            return
        at = dims_of(self._dims, eqn.outvars[0], scope, self._batch)
        if at:
            if meeting_dim(eqn, place, at) is not None and _size(var) > size:
                self.leaves.add(leaf)
        elif is_carried(eqn, place):
            made[eqn.outvars[0]] = leaf, size
