"""Layers that read rows of stacked weights, `for i in range(n): x = layer(x, w[i])`, as the scan that they are.

Each of these layers slices another row, so that no two are alike. Found to repeat nowhere, they would be compiled one
by one, remat and pipelines would see no layers, and the gradient of `w` would be made as large as `w` once for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Atom, Aval, ClosedJaxpr, Equation, Jaxpr, Literal, Var, jaxpr_as_fun, make_jaxpr
from cjax.jax_compat.jaxprs import new_var, place_of
from cjax.trace.jaxpr.evaluate import put_in_place
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.simplify import replaced, simplify
from cjax.trace.layers.repeats import RepeatedLayers, find_runs

Arrays = tuple[jax.Array, ...]
Row = tuple[Var, int]  # a weight, and which of its rows
LEAST_WEIGHTS = 2  # of a layer: one alone may lead from layer to layer, and as a loop's no axis could split it


def looped_over_rows(closed: ClosedJaxpr, num_weights: int) -> ClosedJaxpr:
    """`closed`, a flat trace whose first inputs are weights, with such layers as a scan.

    >>> def loss(w, v, x):
    ...     for i in range(3):
    ...         x = x + jnp.tanh(x @ w[i]) @ v[i]
    ...     return x.sum()
    >>> flat = simplify(jax.make_jaxpr(loss)(jnp.ones((3, 4, 5)), jnp.ones((3, 5, 4)), jnp.ones((2, 4))))
    >>> [eqn.primitive.name for eqn in looped_over_rows(flat, 2).eqns]
    ['scan', 'reduce_sum']
    """
    rows = _rows(closed.jaxpr, num_weights)
    if not rows:
        return closed
    # All rows in front: what is left of the layers is alike.
    eqns = sorted(closed.jaxpr.eqns, key=lambda eqn: rows.keys().isdisjoint(eqn.outvars))
    jaxpr = closed.jaxpr.replace(eqns=eqns)
    runs = [run for run in find_runs(ClosedJaxpr(jaxpr, closed.consts)) if _is_loop(run, jaxpr, rows)]
    if not runs:
        return closed
    env: dict[Var, Atom] = {}
    found, done, numbers = list[Equation](), 0, dict[Var, np.ndarray]()
    for run in runs:
        found += [_renamed(eqn, env) for eqn in eqns[done : run.start]]
        numbers |= _append(_Layers(jaxpr, run, rows), env, found)
        done = run.stop
    found += [_renamed(eqn, env) for eqn in eqns[done:]]
    outvars = [replaced(env, atom) for atom in jaxpr.outvars]
    jaxpr = jaxpr.replace(eqns=found, outvars=outvars, constvars=[*jaxpr.constvars, *numbers])
    return simplify(ClosedJaxpr(jaxpr, [*closed.consts, *numbers.values()]))


def _rows(jaxpr: Jaxpr, num_weights: int) -> dict[Var, Row]:
    """What stands for a row of a weight, of weights all rows of which are read; slices that lead to one too."""
    weights, found = set(jaxpr.invars[:num_weights]), dict[Var, Row]()
    readers: dict[Var, list[str]] = {}
    for eqn in jaxpr.eqns:
        for var in variables(eqn):
            readers.setdefault(var, []).append(name_of(eqn))
    for eqn in jaxpr.eqns:
        if not eqn.outvars:  # something is printed
            continue
        of, out = next(iter(variables(eqn)), None), eqn.outvars[0]
        if of in weights and name_of(eqn) == "slice" and set(readers.get(out, ())) == {"squeeze"}:
            first, last = eqn.params["start_indices"], eqn.params["limit_indices"]
            is_row = last[0] == first[0] + 1 and tuple(last[1:]) == of.aval.shape[1:] and not any(first[1:])
            if is_row and set(eqn.params["strides"] or {1}) == {1}:
                found[out] = of, first[0]
        elif of in found and name_of(eqn) == "squeeze" and tuple(eqn.params["dimensions"]) == (0,):
            found[out] = found[of]
        elif of in weights and name_of(eqn) == "unstack" and eqn.params["axis"] == 0:
            found |= {var: (of, i) for i, var in enumerate(eqn.outvars)}  # `for w in weights`, since JAX 0.12
    read = {of: {i for other, i in found.values() if other is of} for of, _ in found.values()}
    # Of weights read in part no run is a loop: to look for one would take time.
    return {var: (of, i) for var, (of, i) in found.items() if len(read[of]) == of.aval.shape[0] > 1}


def _is_loop(run: RepeatedLayers, jaxpr: Jaxpr, rows: dict[Var, Row]) -> bool:
    """Whether layers read all rows of some weights, in order, and no other input that each has one of."""
    of_rows = [group for group in run.stacked if _weight_of(group, rows) is not None]
    others = {var for group in run.stacked if group not in of_rows for var in group}
    kept = {var for group in (*run.outputs, *run.last_only) for var in group}
    eqns = jaxpr.eqns[run.start : run.stop]
    return (
        sum(group[0].aval.ndim > 1 for group in of_rows) >= LEAST_WEIGHTS
        # State that layers have one each of would be put together, and taken apart again.
        and others.isdisjoint([*jaxpr.invars, *rows])
        and kept.isdisjoint(var for var in jaxpr.outvars if not isinstance(var, Literal))
        and not any(eqn.effects for eqn in eqns)
    )


def _weight_of(group: Sequence[Var], rows: dict[Var, Row]) -> Var | None:
    """The weight whose rows these are, all of them and in order."""
    of = rows.get(group[0], (None, 0))[0]
    fits = of is not None and of.aval.shape[0] == len(group)
    return of if fits and [rows.get(var) for var in group] == [(of, i) for i in range(len(group))] else None


@dataclass(frozen=True)
class _Layers:
    """A run of layers in a trace, to be written as a loop."""

    jaxpr: Jaxpr
    run: RepeatedLayers
    rows: dict[Var, Row]

    @property
    def first(self) -> Equation:
        return self.jaxpr.eqns[self.run.start]

    def shared(self) -> list[Var]:
        """What all layers read from outside."""
        t, start, period = self.run.template, self.run.start, self.run.period
        eqns = self.jaxpr.eqns[start + t * period : start + (t + 1) * period]
        own = {group[t] for group in self.run.stacked} | {read for _, read, _, _ in self.run.carries}
        own |= {var for eqn in eqns for var in eqn.outvars}
        return list(dict.fromkeys(var for eqn in eqns for var in variables(eqn) if var not in own))

    def body(self, shared: Sequence[Var]) -> ClosedJaxpr:
        """One layer: what is shared, what is handed on, the last layer's results, what it has of its own and its
        numbers -> what it hands on, the last layer's results, and what all of them give."""
        run, t = self.run, self.run.template
        eqns = list(self.jaxpr.eqns[run.start + t * run.period : run.start + (t + 1) * run.period])
        numbers = list[Var]()
        for at, place in run.literals:
            aval = eqns[at].invars[place].aval
            numbers.append(new_var(Aval(aval.shape, aval.dtype)))
            invars = list(eqns[at].invars)
            invars[place] = numbers[-1]
            eqns[at] = eqns[at].replace(invars=invars)
        tails = [group[t] for group in run.last_only]
        ins = [*shared, *(read for _, read, _, _ in run.carries), *(new_var(var.aval) for var in tails)]
        ins += [*(group[t] for group in run.stacked), *numbers]
        outs = [*(written for _, _, written, _ in run.carries), *tails, *(group[t] for group in run.outputs)]
        return ClosedJaxpr(self.jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=eqns), [])

    def given(self) -> list[tuple[Var, ...]]:
        """For each of what layers have one each of, the weight, or the values one by one."""
        weights = [(group, _weight_of(group, self.rows)) for group in self.run.stacked]
        return [tuple(group) if weight is None else (weight,) for group, weight in weights]

    def loop(self, shared: Sequence[Var]) -> Callable[..., list[jax.Array]]:
        """A function of what is shared, what the first layer is handed, `given` and `numbers`: what is left behind the
        last layer."""
        run, body, sizes = self.run, jaxpr_as_fun(self.body(shared)), [len(group) for group in self.given()]
        num_carry = len(run.carries)

        def function(*args: jax.Array) -> list[jax.Array]:
            consts, left = args[: len(shared)], iter(args[len(shared) :])
            carry = [next(left) for _ in range(num_carry)]
            each = [[next(left) for _ in range(size)] for size in sizes]
            xs = [*(values[0] if len(values) == 1 else jnp.stack(values) for values in each), *left]
            tail = [jnp.zeros(group[0].aval.shape, group[0].aval.dtype) for group in run.last_only]

            def turn(carry: list[jax.Array], x: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
                outs = list(body(*consts, *carry, *x))
                return outs[: len(carry)], outs[len(carry) :]

            last, ys = lax.scan(turn, [*carry, *tail], xs, length=run.repeats)
            return [*last, *(y[i] for y in ys for i in range(run.repeats))]

        return function

    def numbers(self) -> dict[Var, np.ndarray]:
        """What is written as a number in each layer, and another one in the next: all of them, as a constant."""
        found = dict[Var, np.ndarray]()
        for (at, place), values in self.run.literals.items():
            array = np.array(values, self.jaxpr.eqns[self.run.start + at].invars[place].aval.dtype)
            found[new_var(Aval(array.shape, array.dtype))] = array
        return found

    def left(self) -> list[Var]:
        """The variables that are left behind the last layer, in the order of what `loop` gives."""
        run = self.run
        return [
            *(last for *_, last in run.carries),
            *(group[-1] for group in run.last_only),
            *(var for group in run.outputs for var in group),
        ]


def _append(layers: _Layers, env: dict[Var, Atom], eqns: list[Equation]) -> dict[Var, np.ndarray]:
    """The loop's equations, behind `eqns`, and in `env` what stands for what it leaves; the constants that it reads."""
    shared, numbers = layers.shared(), layers.numbers()
    given = [var for group in layers.given() for var in group]
    of = [*shared, *(first for first, *_ in layers.run.carries), *given, *numbers]
    structs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in of]
    place = place_of(layers.first)
    closed = make_jaxpr(layers.loop(shared))(*structs)
    outs = put_in_place(closed, [replaced(env, var) for var in of], eqns, lambda eqn: place)
    env.update(zip(layers.left(), outs, strict=True))
    return numbers


def _renamed(eqn: Equation, env: dict[Var, Atom]) -> Equation:
    return eqn.replace(invars=[replaced(env, atom) for atom in eqn.invars])
