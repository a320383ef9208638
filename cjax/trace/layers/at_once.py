"""Loops that add up, evaluated at once: all turns together, in the place of one after the other.

An author who never wants to hold the logits of all positions classifies some of them in each turn of a loop, and adds
up their losses. A grid of devices has no use for that: it splits the logits both ways already, while the product in
each turn would send the classifier again. So under a grid such a loop is one pass over all its turns.

Only what is the same either way is taken, in numbers and but for the turns' own values in memory: turns that see
nothing but weights, single numbers and a part of their own, and nothing of each other but the sum; whose every product
is with a weight. What looks at all rows in each turn, scores of a part of the queries say, stays in its loop: all at
once is what its author avoided.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var, jaxprs_in_params, make_jaxpr
from cjax.jax_compat.jaxprs import called_from, name_stack, new_var, place_of, traceback_of
from cjax.trace.jaxpr.evaluate import bind_as_is, put_in_place
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named
from cjax.trace.jaxpr.simplify import replaced, simplify
from cjax.trace.jaxpr.view import scan_of, variable_of

# What would branch or loop for each turn apart, and what draws other numbers for many turns than for each.
_APART = named("scan while cond rng_bit_generator rng_uniform") | having("remat")


def all_at_once(closed: ClosedJaxpr, num_weights: int) -> ClosedJaxpr:
    """`closed`, a flat trace whose first inputs are weights, with the loops above evaluated at once.

    >>> def loss(w, x):
    ...     return lax.scan(lambda total, part: (total + (part @ w).sum(), None), 0.0, x)[0]
    >>> flat = simplify(jax.make_jaxpr(loss)(jnp.ones((3, 5)), jnp.ones((4, 2, 3))))
    >>> [eqn.primitive.name for eqn in all_at_once(flat, 1).eqns]
    ['dot_general', 'reduce_sum', 'add']
    """
    jaxpr = closed.jaxpr
    of_weights: set[Var] = set(jaxpr.invars[:num_weights])
    eqns: list[Equation] = []
    env: dict[Var, Atom] = {}
    for eqn in jaxpr.eqns:
        if all(type(atom) is Literal or atom in of_weights for atom in eqn.invars):
            of_weights.update(eqn.outvars)
        eqn = eqn.replace(invars=[replaced(env, atom) for atom in eqn.invars])
        turns = _Turns(eqn, of_weights) if name_of(eqn) == "scan" else None
        if turns is None or not turns.add_up:
            eqns.append(eqn)
            continue
        env.update(zip(eqn.outvars, turns.together(eqns), strict=True))
    if not env:
        return closed
    outvars = [replaced(env, atom) for atom in jaxpr.outvars]
    return simplify(ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts))


class _Turns:
    """The turns of one scan, whose body is written out."""

    def __init__(self, scan: Equation, of_weights: set[Var]) -> None:
        loop = scan_of(scan)
        self._scan, self._jaxpr = scan, loop.body
        self._eqns, self._outs = _written_out(loop.body)
        self._carries, self._own = loop.carries(loop.body.invars), set(loop.xs(loop.body.invars))
        consts = list(zip(loop.consts(loop.body.invars), loop.consts(scan.invars), strict=True))
        weights = {var for var, atom in consts if type(atom) is Literal or atom in of_weights}
        sees_rows = any(var not in weights and math.prod(_struct(var).shape) > 1 for var, _ in consts)
        self._adding = [self._addition(i) for i in range(loop.num_carry)]
        adding = {id(eqn) for eqn, _ in self._adding}
        self._made = [eqn for eqn in self._eqns if id(eqn) not in adding]
        for eqn in self._made:
            if not self._own.isdisjoint(_variables(eqn)):
                self._own.update(eqn.outvars)
            elif all(type(atom) is Literal or atom in weights for atom in eqn.invars):
                weights.update(eqn.outvars)
        products = [eqn for eqn in self._made if facts_of(eqn).product]
        self.add_up = (
            not sees_rows
            and not loop.closed.consts
            and not loop.closed.effects
            and not loop.ys(self._outs)
            and bool(products)
            and all(term is not None and term in self._own for _, term in self._adding)
            and not any(_is_apart(eqn) for eqn in self._made)
            and not any(set(self._carries) & set(_variables(eqn)) for eqn in self._made)
            and all(self._is_of_weight(eqn, weights) for eqn in products)
        )

    def _addition(self, carry: int) -> tuple[Equation | None, Var | None]:
        """The equation that adds to a carry, and what it adds; nothing where the carry changes otherwise."""
        old, new = self._carries[carry], self._outs[carry]
        for eqn in self._eqns:
            if any(new is var for var in eqn.outvars) and name_of(eqn) == "add":
                terms = [atom for atom in eqn.invars if atom is not old]
                if len(terms) == 1 and type(terms[0]) is Var and _struct(terms[0]).shape == _struct(old).shape:
                    return eqn, terms[0]
        return None, None

    def _is_of_weight(self, eqn: Equation, weights: set[Var]) -> bool:
        """Whether a product is of a weight, the same in each turn, and what differs from turn to turn."""
        is_plain = name_of(eqn) == "dot_general" and not any(eqn.params["dimension_numbers"][1])
        own = [type(atom) is not Literal and atom in self._own for atom in eqn.invars]
        held = [type(atom) is not Literal and atom in weights for atom in eqn.invars]
        return is_plain and sorted(own) == [False, True] and sorted(held) == [False, True]

    def together(self, eqns: list[Equation]) -> list[Atom]:
        """Appends the equations of all turns, and gives the results."""
        env: dict[Var, Atom] = dict(zip(self._jaxpr.invars, self._scan.invars, strict=True))
        made = {var: eqn for eqn in self._made for var in eqn.outvars}
        # A sum within each turn, and over the turns, is one.
        sums = {
            term: made[term]
            for _, term in self._adding
            if term is not None and term in made and self._is_read_once(term)
        }
        sums = {term: eqn for term, eqn in sums.items() if name_of(eqn) == "reduce_sum"}
        summed = {id(eqn) for eqn in sums.values()}
        for eqn in self._made:
            if id(eqn) not in summed:
                self._append(eqn, [type(a) is not Literal and a in self._own for a in eqn.invars], env, eqns)
        results = []
        for (adding, term), carry in zip(self._adding, self._carries, strict=True):
            assert adding is not None and term is not None
            last = sums.get(term)
            of, axes = (term, ()) if last is None else (variable_of(last, 0), tuple(last.params["axes"]))
            axes = (0, *(axis + 1 for axis in axes))

            def total(old: jax.Array, terms: jax.Array, axes: tuple[int, ...] = axes) -> list[jax.Array]:
                return [lax.add(old, lax.reduce(terms, np.zeros((), terms.dtype), lax.add, axes))]

            results += _traced(total, [env[carry], env[of]], adding, self._scan, eqns)
        return results

    def _is_read_once(self, var: Var) -> bool:
        return sum(atom is var for eqn in self._eqns for atom in eqn.invars) == 1

    def _append(self, eqn: Equation, own: list[bool], env: dict[Var, Atom], eqns: list[Equation]) -> None:
        def bind(*ins: jax.Array) -> list[jax.Array]:
            return bind_as_is(eqn, ins)

        axes = [0 if each else None for each in own]
        function = jax.vmap(bind, in_axes=axes) if any(own) else bind
        outs = _traced(function, [replaced(env, atom) for atom in eqn.invars], eqn, self._scan, eqns)
        env.update(zip(eqn.outvars, outs, strict=True))


def _written_out(jaxpr: Jaxpr) -> tuple[list[Equation], list[Atom]]:
    """The equations of a body, those that a checkpoint holds among them, and what results. What makes a number of
    JAX's out of one of Python's, the same in bits, is left out."""
    eqns: list[Equation] = []
    env: dict[Var, Atom] = {}
    for eqn in jaxpr.eqns:
        ins = [replaced(env, atom) for atom in eqn.invars]
        if name_of(eqn) == "convert_element_type" and _struct(ins[0]).dtype == _struct(eqn.outvars[0]).dtype:
            env[eqn.outvars[0]] = ins[0]
        elif not facts_of(eqn).remat:
            eqns.append(eqn.replace(invars=ins))
        else:
            inner, outs = _written_out(eqn.params["jaxpr"])
            known: dict[Var, Atom] = dict(zip(eqn.params["jaxpr"].invars, ins, strict=True))
            for each in inner:
                eqns.append(_renamed(each, known, eqn))
            env.update((var, replaced(known, atom)) for var, atom in zip(eqn.outvars, outs, strict=True))
    return eqns, [replaced(env, atom) for atom in jaxpr.outvars]


def _renamed(eqn: Equation, known: dict[Var, Atom], around: Equation) -> Equation:
    """An equation of the body of another, as it stands outside; what it makes gets new variables, since bodies are
    shared."""
    outs = [new_var(var.aval) for var in eqn.outvars]
    place = called_from(eqn, name_stack(around), traceback_of(eqn))
    ins = [replaced(known, atom) for atom in eqn.invars]
    known.update(zip(eqn.outvars, outs, strict=True))
    return eqn.replace(invars=ins, outvars=outs, **place)


def _traced(
    function: Callable[..., list[jax.Array]],
    atoms: Sequence[Atom],
    near: Equation,
    scan: Equation,
    eqns: list[Equation],
) -> list[Atom]:
    """Appends the equations of `function` on `atoms`, told as `near` is, within `scan`."""
    shapes = [_struct(atom) for atom in atoms]
    place = place_of(near) | called_from(near, name_stack(scan), traceback_of(near))
    return put_in_place(make_jaxpr(function)(*shapes), atoms, eqns, lambda eqn: place)


def _struct(atom: Atom) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _is_apart(eqn: Equation) -> bool:
    """Whether an equation is of another kind for all turns, or holds a product that nobody has looked at."""
    dtypes = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
    draws = any(dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes)
    if draws or eqn.effects or name_of(eqn) in _APART:
        return True
    inside = [each for body in jaxprs_in_params(eqn.params) for each in body.eqns]
    return any(facts_of(each).product or _is_apart(each) for each in inside)


def _variables(eqn: Equation) -> list[Var]:
    return [atom for atom in eqn.invars if type(atom) is not Literal]
