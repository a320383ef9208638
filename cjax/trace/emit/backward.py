"""One layer's derivative taken apart: a forward that says what it saves, the gradient of what the layer is handed, and
the gradients of its weights, which nobody waits for.

`jax.vjp` hands back a closure. Here what it keeps lies open: of its residuals, those are stored that took arithmetic
on what the layer is handed; a weight, or a rounded, reshaped or gathered form of it, is made again. The backward is one
trace, cut in two at what both halves need: for a matmul, the gradient of its result (Qi et al., Zero Bubble Pipeline
Parallelism, 2024).
"""

import collections
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var, make_jaxpr
from cjax.jax_compat.jaxprs import name_stack
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.evaluate import Step, equations, evaluate
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import is_cheap, name_of
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.jaxpr.view import literal_of
from cjax.tree import PyTree

Arrays = list[jax.Array]
Function = Callable[[Arrays, Arrays, Arrays], Arrays]  # weights, fixed, moving -> moving


def is_real(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


class Derivative:
    """The derivative of a layer, from the shapes of what it reads.

    Args:
      function: `(weights, fixed, moving) -> moving`, with arrays of the same shapes and dtypes moving out as in.
      weights: arrays with gradients.
      fixed: arrays without.
      moving: what the layer is handed; integers among it have no gradient.

    `saved` are the shapes of what `forward` keeps for the backward pass, `crossing` of what `backward` keeps for
    `weight_gradients`.
    """

    def __init__(self, function: Function, weights: Arrays, fixed: Arrays, moving: Arrays) -> None:
        self._real = [i for i, x in enumerate(moving) if is_real(x)]
        self._num_moving = len(moving)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*weights, *fixed, *moving)]
        self._sizes = len(weights), len(fixed), len(moving)
        trees: list[PyTree] = []

        def probe(*args: jax.Array) -> tuple[Arrays, Arrays]:
            weights, fixed, moving = self._cut(args)

            def of(weights: Arrays, real: Arrays) -> tuple[Arrays, Arrays]:
                given = list(moving)
                for i, x in zip(self._real, real, strict=True):
                    given[i] = x
                outs = function(weights, fixed, given)
                return [outs[i] for i in self._real], outs

            _, pull, outs = jax.vjp(of, weights, [moving[i] for i in self._real], has_aux=True)
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return outs, leaves

        self._forward = simplify(make_jaxpr(probe)(*structs))
        jaxpr = self._forward.jaxpr
        self._outs, self._leaves = jaxpr.outvars[: len(moving)], jaxpr.outvars[len(moving) :]
        self._saved = self._choose(jaxpr)
        self.saved = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._saved]

        def pulled(leaves: Arrays, gradients: Arrays) -> tuple[Arrays, Arrays]:
            return jax.tree.unflatten(trees[-1], leaves)(gradients)

        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._leaves]
        self._backward = simplify(make_jaxpr(pulled)(shapes, [structs[i - len(moving)] for i in self._real]))
        self._divide()

    def forward(self, weights: Arrays, fixed: Arrays, moving: Arrays) -> tuple[Arrays, Arrays]:
        """What the layer hands on, and what is to be saved."""
        env = self._inputs(weights, fixed, moving)
        _evaluate(self._forward.jaxpr.eqns, env)
        return _read(env, self._outs), _read(env, self._saved)

    def backward(self, weights: Arrays, fixed: Arrays, saved: Arrays, gradients: Arrays) -> tuple[Arrays, Arrays]:
        """The gradient of what the layer was handed, from that of what it handed on; and what crosses over to
        `weight_gradients`."""
        env = self._remade(weights, fixed, saved)
        self._take(env, gradients)
        _evaluate(self._first, env)
        _, moving = self._results()
        return self._filled(_read(env, moving), gradients), _read(env, self._crossing)

    def weight_gradients(self, weights: Arrays, fixed: Arrays, saved: Arrays, crossing: Arrays) -> Arrays:
        """The gradients of the weights, from what is saved and what `backward` handed over."""
        env = self._remade(weights, fixed, saved)
        env.update(zip(self._crossing, crossing, strict=True))
        _evaluate(self._second, env)
        return _read(env, self._results()[0])

    def both(self, weights: Arrays, fixed: Arrays, saved: Arrays, gradients: Arrays) -> tuple[Arrays, Arrays]:
        """`backward` and `weight_gradients` in one."""
        env = self._remade(weights, fixed, saved)
        self._take(env, gradients)
        _evaluate(self._backward.jaxpr.eqns, env)
        own, moving = self._results()
        return self._filled(_read(env, moving), gradients), _read(env, own)

    def _filled(self, real: Arrays, gradients: Arrays) -> Arrays:
        found = iter(real)
        return [next(found) if i in self._real else jnp.zeros_like(g) for i, g in enumerate(gradients)]

    # -- what is saved --
    def _choose(self, jaxpr: Jaxpr) -> list[Var]:
        """Residuals to store. All others are made again from weights, from what is fixed, and from these.

        Residuals that come of the same results of matmuls and reductions are looked at together: either those results
        are stored, or the residuals, whichever is less.
        """
        num_weights, num_fixed, _ = self._sizes
        known = set(jaxpr.invars[: num_weights + num_fixed]) | set(jaxpr.constvars)
        maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        order = {var: at for at, var in enumerate(v for eqn in jaxpr.eqns for v in eqn.outvars)}
        wanted = dict.fromkeys(v for v in self._leaves if not isinstance(v, Literal) and v not in known)
        saved: list[Var] = []
        for family in _families(sorted(wanted, key=lambda v: order.get(v, -1)), known, maker):
            there = known | set(saved)
            direct: list[Var] = []
            for var in family:
                if _roots(var, there | set(direct), maker):
                    direct.append(var)
            roots = list(dict.fromkeys(root for var in direct for root in _roots(var, there, maker)))
            saved += min((direct, roots), key=lambda some: sum(map(_bytes, some)))
        self._remake = _slice(jaxpr.eqns, [*self._leaves], known | set(saved))
        return saved

    def _remade(self, weights: Arrays, fixed: Arrays, saved: Arrays) -> dict[Var, jax.Array]:
        """The backward trace's residuals."""
        env = self._inputs(weights, fixed, [])
        env.update(zip(self._saved, saved, strict=True))
        _evaluate(self._remake, env)
        jaxpr = self._backward.jaxpr
        inside = dict(zip(jaxpr.constvars, self._backward.consts, strict=True))
        return inside | dict(zip(jaxpr.invars, _read(env, self._leaves), strict=False))

    def _take(self, env: dict[Var, jax.Array], gradients: Arrays) -> None:
        names = self._backward.jaxpr.invars[len(self._leaves) :]
        env.update(zip(names, [gradients[i] for i in self._real], strict=True))

    # -- the two halves --
    def _divide(self) -> None:
        jaxpr = self._backward.jaxpr
        weights, moving = self._results()
        self._first = _slice(jaxpr.eqns, moving, jaxpr.invars)
        made = {var for eqn in self._first for var in eqn.outvars}
        live = {v for eqn in self._first for v in variables(eqn)}
        live |= {v for v in moving if not isinstance(v, Literal)}
        # A gradient that the first half makes on the way crosses over. What only shares an equation with it is made
        # again: of a region's results the compiler drops those that are not read.
        there = {*jaxpr.invars[: len(self._leaves)], *jaxpr.constvars}
        given = {*(made & live), *jaxpr.invars[len(self._leaves) :]}
        self._second = _slice(jaxpr.eqns, weights, there | given)
        needed = {v for eqn in self._second for v in variables(eqn)}
        needed |= {v for v in weights if not isinstance(v, Literal)}
        every = dict.fromkeys([*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)])
        maker = {var: eqn for eqn in self._first for var in eqn.outvars}
        self._crossing = []
        for family in _families([v for v in every if v in needed and v in given], there, maker):
            self._crossing += min((family, _least(family, there, maker)), key=lambda some: sum(map(_bytes, some)))
        self._second = _slice(jaxpr.eqns, weights, there | set(self._crossing))
        self.crossing = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._crossing]

    def _results(self) -> tuple[list[Atom], list[Atom]]:
        outvars = self._backward.jaxpr.outvars
        return list(outvars[: self._sizes[0]]), list(outvars[self._sizes[0] :])

    # -- evaluation --
    def _cut(self, args: Sequence[jax.Array]) -> tuple[Arrays, Arrays, Arrays]:
        a, b, _ = self._sizes
        return list(args[:a]), list(args[a : a + b]), list(args[a + b :])

    def _inputs(self, weights: Arrays, fixed: Arrays, moving: Arrays) -> dict[Var, jax.Array]:
        jaxpr = self._forward.jaxpr
        env = dict(zip(jaxpr.constvars, self._forward.consts, strict=True))
        env.update(zip(jaxpr.invars, (*weights, *fixed, *moving), strict=False))
        return env


def _least(family: Sequence[Var], known: set[Var], maker: Mapping[Var, Equation]) -> list[Var]:
    """The fewest bytes to save for cheap equations to make a family of."""

    def ways(sums: set[Var]) -> list[Var]:
        return list(dict.fromkeys(root for var in family for root in _roots(var, known, maker, sums)))

    # Of several products of one input, the sum of what they add to its gradient: one array, and reduced once. But not
    # of what has to be saved for others as well, or takes less than a sum in float32.
    best, chosen = ways(set()), set[Var]()
    for candidate in _sums(family, known, maker):
        found = ways(chosen | {candidate})
        if sum(map(_bytes, found)) < sum(map(_bytes, best)):
            best, chosen = found, chosen | {candidate}
    return best


def _sums(family: Sequence[Var], known: set[Var], maker: Mapping[Var, Equation]) -> list[Var]:
    """Sums, the last first, on the cheap way to a family, of which neither part can be made of what is known."""
    found: dict[Var, None] = {}
    seen: set[Var] = set()
    queue = collections.deque(family)
    while queue:
        now = queue.popleft()
        eqn = maker.get(now)
        if now in known or now in seen or eqn is None or not is_cheap(name_of(eqn), eqn.params):
            continue
        seen.add(now)
        parts = [v for v in variables(eqn) if _roots(v, known, maker)]
        if name_of(eqn) in ("add", "add_any") and [v.aval.shape for v in parts] == [now.aval.shape] * 2:
            found[now] = None
        queue += variables(eqn)
    return list(found)


def _roots(var: Var, known: set[Var], maker: Mapping[Var, Equation], sums: Collection[Var] = ()) -> list[Var]:
    """What has to be saved for cheap equations to make `var` of it; nothing, if it can be made of what is known. Of
    `sums` nothing is made: they are saved themselves."""
    found: dict[Var, None] = {}
    seen: set[Var] = set()
    queue = [var]
    while queue:
        now = queue.pop()
        if now in known or now in seen:
            continue
        seen.add(now)
        eqn = maker.get(now)
        if eqn is not None and now not in sums and (is_cheap(name_of(eqn), eqn.params) or _is_key(now)):
            queue += variables(eqn)
        else:
            found[now] = None
    return list(found)


def _families(wanted: Sequence[Var], known: set[Var], maker: Mapping[Var, Equation]) -> list[list[Var]]:
    """`wanted` by the roots that they have in common."""
    families: list[tuple[set[Var], list[Var]]] = []
    for var in wanted:
        roots, members = set(_roots(var, known, maker)), [var]
        for other in [each for each in families if each[0] & roots]:
            families.remove(other)
            roots, members = roots | other[0], [*other[1], *members]
        families.append((roots, members))
    return [members for roots, members in families if roots]


def _bytes(var: Var) -> int:
    aval = var.aval
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def _is_key(var: Var) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))


def _slice(eqns: Sequence[Equation], targets: Sequence[Atom], known: Iterable[Var]) -> list[Equation]:
    """The equations that make `targets` of what is known."""
    known = set(known)
    live = {v for v in targets if not isinstance(v, Literal)} - known
    found = []
    for eqn in reversed(eqns):
        if live & set(eqn.outvars):
            found.append(eqn)
            live = (live - set(eqn.outvars)) | (set(variables(eqn)) - known)
    return found[::-1]


def _evaluate(eqns: Sequence[Equation], env: dict[Var, jax.Array]) -> None:
    """Into `env`, the results of equations, but for those that are there already: saved, or handed over."""

    def write(results: Iterable[tuple[Var, jax.Array]]) -> None:
        for var, out in results:
            env.setdefault(var, out)

    def apply(step: Step[Equation, Var], ins: Arrays) -> Arrays:
        with jax.named_scope(str(name_stack(step.of))):
            return bind(step.of, ins)

    evaluate(equations(eqns), env.__getitem__, write, lambda eqn, place: _number(literal_of(eqn, place)), apply)


def _read(env: dict[Var, jax.Array], atoms: Sequence[Atom]) -> Arrays:
    return [_number(atom) if isinstance(atom, Literal) else env[atom] for atom in atoms]


def _number(literal: Literal) -> jax.Array:
    return cast(jax.Array, np.asarray(literal.val, literal.aval.dtype))  # NumPy's serves wherever JAX's does
