"""Which results of equations are what was given, handed through as it is: by calls, scans and branches too. (What a
`while_loop` hands from turn to turn as it is, JAX takes out of the loop.)"""

from collections.abc import Sequence

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.trace.jaxpr.primitives import facts_of, name_of, named
from cjax.trace.jaxpr.view import cond_of, is_scan, opened, scan_of

_AS_IT_IS = named("copy name optimization_barrier sharding_constraint")


def unchanged(jaxpr: Jaxpr) -> list[Atom]:
    """For each result of a jaxpr, the input that it is; itself where it is none, or can't be told to be one.

    >>> import jax
    >>> f = lambda x, y: jax.lax.scan(lambda c, row: (c + 1.0, row), x, y)
    >>> jaxpr = jax.make_jaxpr(f)(1.0, jax.numpy.ones(3)).jaxpr
    >>> [found in jaxpr.invars for found in unchanged(jaxpr)]
    [False, True]
    """
    is_of: dict[Var, Atom] = {}
    for eqn in jaxpr.eqns:
        for out, given in zip(eqn.outvars, _given(eqn), strict=True):
            if given is not None:
                is_of[out] = given if isinstance(given, Literal) else is_of.get(given, given)
    return [atom if isinstance(atom, Literal) else is_of.get(atom, atom) for atom in jaxpr.outvars]


def _given(eqn: Equation) -> Sequence[Atom | None]:
    """For each result of an equation, the operand that it is."""
    if name_of(eqn) in _AS_IT_IS:
        return eqn.invars
    if is_scan(eqn):
        loop = scan_of(eqn)
        handed = _through(loop.body, eqn.invars)
        num = loop.num_carry
        # A carry is its beginning if each turn hands on what it has; a row that comes and goes is of the same stack.
        carries = [x if x is start else None for x, start in zip(handed[:num], loop.carries(eqn.invars), strict=True)]
        return [*carries, *(x if any(x is row for row in loop.xs(eqn.invars)) else None for x in handed[num:])]
    if name_of(eqn) == "cond":
        each = [_through(opened(branch), eqn.invars[1:]) for branch in cond_of(eqn).branches]
        return [first if all(x is first for x in others) else None for first, *others in zip(*each, strict=True)]
    facts = facts_of(eqn)
    if facts.inlined or facts.remat:
        return _through(opened(eqn.params[facts.body]), eqn.invars)
    return [None] * len(eqn.outvars)


def _through(body: Jaxpr, operands: Sequence[Atom]) -> list[Atom | None]:
    """Of each result of a body that reads these, which of them it is."""
    places = {var: operand for var, operand in zip(body.invars, operands, strict=True)}
    return [None if isinstance(atom, Literal) else places.get(atom) for atom in unchanged(body)]
