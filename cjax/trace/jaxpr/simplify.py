"""A trace made flat: calls inlined, scalar arithmetic on literals folded, dead equations dropped.

Everything else in `cjax.trace` reads flat traces. Flattening is substitution, never re-tracing: a deep model has tens
of thousands of equations, and binding each again would cost more than tracing the model did.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Params, Var
from cjax.jax_compat.functions import called_within
from cjax.jax_compat.jaxprs import NameStack, called_from, name_stack, names_its_operands, new_var, traceback_of
from cjax.trace.jaxpr.fold import fold, literal
from cjax.trace.jaxpr.joined import kept_apart
from cjax.trace.jaxpr.primitives import FACTS, facts_of, having, name_of
from cjax.trace.jaxpr.tracebacks import in_model, is_jax_alone
from cjax.trace.jaxpr.view import standing_for

_INLINED = {name: FACTS[name].body for name in having("inlined")}
_REMATS = having("remat")
_HIGHER_ORDER = _REMATS | having("loop") | having("branches") | having("own_derivative")
_DERIVATIVES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk"})
_NO_MESH = jax.sharding.AbstractMesh((), ())


def simplify(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The flat form of a trace: same inputs, same outputs, same values.

    Calls (`jit` and its kin) are inlined at every depth, with the module names of their callers in front of their own;
    scalar equations on literals are evaluated; scalar constants become literals; equations that nothing needs are
    dropped; what is joined and taken apart again stays apart. `scan`, `while`, `cond`, remat and custom derivatives
    stay equations with flat bodies. Integers that seed random numbers inside remat become operands of it, so that
    blocks that differ in nothing else are equal.

    >>> import jax
    >>> inner = jax.jit(lambda x: x * (1.0 + 1.0))
    >>> [e.primitive.name for e in simplify(jax.make_jaxpr(lambda x: inner(inner(x)))(1.0)).eqns]
    ['mul', 'mul']
    """
    with np.errstate(all="ignore"):  # folded integers wrap around, as they do on the device
        return _close(_Flattener(hoist=True), closed.jaxpr, closed.consts)


def _close(flattener: "_Flattener", jaxpr: Jaxpr, consts: Sequence[ArrayLike]) -> ClosedJaxpr:
    env: dict[Var, Atom] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = literal(const, var.aval) or flattener.keep(const, var)
    flattener.walk(jaxpr.eqns, env, None)
    eqns, outvars = _needed(flattener.eqns, [replaced(env, atom) for atom in jaxpr.outvars])
    needed = {atom for eqn in eqns for atom in eqn.invars if type(atom) is not Literal}
    needed.update(atom for atom in outvars if type(atom) is not Literal)
    kept = [(var, const) for var, const in flattener.consts.values() if var in needed]
    flat = jaxpr.replace(constvars=[var for var, _ in kept], outvars=outvars, eqns=eqns)
    return ClosedJaxpr(flat, [const for _, const in kept])


def replaced(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    """What stands for `atom` in equations that are written anew: itself, if it is a number or nothing replaces it."""
    return atom if type(atom) is Literal else env.get(atom, atom)


def _needed(eqns: Sequence[Equation], outvars: Sequence[Atom]) -> tuple[list[Equation], list[Atom]]:
    """The equations that results need, none of which joins what others take apart, and these results."""
    found, env = kept_apart(_drop_dead(eqns, outvars), outvars)
    outvars = [standing_for(atom, env) for atom in outvars]
    return (_drop_dead(found, outvars) if env else found), outvars


def _drop_dead(eqns: Sequence[Equation], outvars: Sequence[Atom]) -> list[Equation]:
    live = {atom for atom in outvars if type(atom) is not Literal}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update([atom for atom in eqn.invars if type(atom) is not Literal])
    kept.reverse()
    return kept


class _Flattener:
    """Collects the flat equations of one jaxpr, and the constants they use."""

    def __init__(self, hoist: bool, memo: dict[int, tuple[object, tuple[Literal, ...]]] | None = None):
        self.hoist = hoist
        self.eqns: list[Equation] = []
        self.consts: dict[int, tuple[Var, ArrayLike]] = {}
        # Bodies by identity: layers that share one cached body go on sharing it.
        self.memo: dict[int, tuple[object, tuple[Literal, ...]]] = {} if memo is None else memo

    def keep(self, const: ArrayLike, var: Var) -> Var:
        """The variable that stands for an array constant; one for each array, however often it is inlined."""
        return self.consts.setdefault(id(const), (var, const))[0]

    def walk(
        self, eqns: Sequence[Equation], env: dict[Var, Atom], stack: NameStack | None, traceback: object | None = None
    ) -> None:
        """Append the flat form of `eqns`; `env` maps their variables. `stack` is the caller's name stack, or None at
        the top, where variables keep their identity; `traceback` the caller's: theirs end where they are called."""
        for eqn in eqns:
            invars = [atom if type(atom) is Literal else env.get(atom, atom) for atom in eqn.invars]
            name = name_of(eqn)
            if name in _INLINED and self._inline(eqn, invars, env, stack, traceback):
                continue
            folded = fold(eqn, invars)
            if folded is not None:
                env[eqn.outvars[0]] = folded
                continue
            params = eqn.params
            if name in _HIGHER_ORDER:
                invars, params = self._flatten_bodies(name, invars, params)
            if stack is None:
                self.eqns.append(eqn.replace(invars=invars, params=params))
                continue
            outvars = [new_var(var.aval) for var in eqn.outvars]  # an inlined body may be inlined again
            env.update(zip(eqn.outvars, outvars, strict=True))
            own = traceback_of(eqn)
            told = own if traceback is None or not (in_model(traceback) or is_jax_alone(own)) else traceback
            place = called_from(eqn, stack, told)
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, **place))

    def _inline(
        self, eqn: Equation, invars: list[Atom], env: dict[Var, Atom], stack: NameStack | None, traceback: object | None
    ) -> bool:
        if names_its_operands(eqn):
            return False  # which are the call's own variables
        body = eqn.params[_INLINED[name_of(eqn)]]
        jaxpr = body.jaxpr if hasattr(body, "jaxpr") else body
        body_env: dict[Var, Atom] = dict(zip(jaxpr.invars, invars, strict=True))
        for var, const in zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True):
            atom = literal(const, var.aval)
            if atom is None and not self.hoist:
                return False  # a body cannot grow operands for arrays, and JAX does not expect it to own any
            body_env[var] = atom or self.keep(const, new_var(var.aval))
        names = name_stack(eqn)
        own = traceback_of(eqn)
        if traceback is None or not (in_model(traceback) or is_jax_alone(own)):
            traceback = own
        self.walk(jaxpr.eqns, body_env, names if stack is None else stack + names, traceback)
        for outvar, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
            env[outvar] = replaced(body_env, atom)
        return True

    def _flatten_bodies(self, name: str, invars: list[Atom], params: Params) -> tuple[list[Atom], Params]:
        new = dict(params)
        for key, value in params.items():
            if isinstance(value, Jaxpr | ClosedJaxpr):
                new[key], seeds = self._flatten_body(value, name in _REMATS)
                if seeds:
                    invars = [*invars, *seeds]
                    if isinstance(params.get("prevent_cse"), tuple):
                        new["prevent_cse"] = (*params["prevent_cse"], *(False for _ in seeds))
            elif key == "branches":
                new[key] = tuple(self._flatten_body(branch, False)[0] for branch in value)
            elif key in _DERIVATIVES:
                new[key] = self._without_mesh(value)
        return invars, new

    def _without_mesh(self, thunk: Callable[..., object]) -> object:
        """A custom derivative that is traced as the rest of the trace was: with no mesh around it.

        JAX traces it where it is first differentiated, and keeps that. Plans share a trace, so that what the first of
        them traced within its pipeline or ring would carry that one's mesh into the next plan's program.
        """
        if id(thunk) not in self.memo:
            self.memo[id(thunk)] = called_within(thunk, lambda: jax.sharding.use_abstract_mesh(_NO_MESH)), ()
        return self.memo[id(thunk)][0]

    def _flatten_body(self, body: ClosedJaxpr | Jaxpr, is_remat: bool) -> tuple[object, tuple[Literal, ...]]:
        if id(body) not in self.memo:
            flattener = _Flattener(hoist=False, memo=self.memo)
            # Remat alone may grow operands. Its jaxpr is an open one; JAX 0.12 has one class for both kinds.
            if is_remat:
                assert isinstance(body, Jaxpr)
                env: dict[Var, Atom] = {}
                flattener.walk(body.eqns, env, None)
                eqns, outvars = _needed(flattener.eqns, [replaced(env, atom) for atom in body.outvars])
                eqns, seeds = _seeds_as_operands(eqns)
                flat = body.replace(invars=[*body.invars, *seeds], outvars=outvars, eqns=eqns)
                self.memo[id(body)] = flat, tuple(seeds.values())
            else:
                assert isinstance(body, ClosedJaxpr)
                self.memo[id(body)] = _close(flattener, body.jaxpr, body.consts), ()
        return self.memo[id(body)]


def _seeds_as_operands(eqns: Sequence[Equation]) -> tuple[list[Equation], dict[Var, Literal]]:
    """Replace the integer literals that seed random numbers by new variables. Linen folds a hash of the module's path
    into its keys: the one thing in which two layers' bodies differ."""
    seeds: dict[Var, Literal] = {}
    new: list[Equation] = []
    for eqn in eqns:
        facts = facts_of(eqn)
        if facts.seeds or facts.remat:
            invars: list[Atom] = list(eqn.invars)
            for position, atom in enumerate(invars):
                if type(atom) is Literal and np.shape(atom.val) == () and np.asarray(atom.val).dtype.kind in "iu":
                    invars[position] = var = new_var(atom.aval)
                    seeds[var] = atom
            eqn = eqn.replace(invars=invars)
        new.append(eqn)
    return new, seeds
