"""Re-emit a flat trace, with stacks of layers rolled into scans and hooks at every equation.

`emit` evaluates a trace again under whatever transformation is running (jit, grad). The caller's `Hooks` say how a
weight becomes ready for use, how an equation is evaluated (precision, a matmul of our own) and where its results live
(sharding constraints). Nothing of this stays at run time: the outcome is one jaxpr, as if written by hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Params, Var
from cjax.jax_compat.jaxprs import name_stack
from cjax.trace.dims.find import Scope
from cjax.trace.emit.pieces import adds_up, summed
from cjax.trace.jaxpr.compared import SCATTERED, scattered
from cjax.trace.jaxpr.evaluate import Step, bind_as_is, equation, evaluate
from cjax.trace.jaxpr.groups import Changed, Group, arrange, variables
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.view import is_scan, literal_of, scan_of
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.tree import PyTree

Values = list[jax.Array]
Outs = tuple[Values, list[jax.Array | None]]  # of a turn, and what the loop keeps of its weights
Body = Callable[..., Any]  # of a loop, or a layer: what it takes and gives is its maker's


class Hooks:
    """What happens at each equation; this one changes nothing.

    Args:
      unrolls: how many layers a stack may have to be evaluated one by one, rather than in a loop.
      sums_ahead: whether a sum over pieces makes its gradient along with it (`pieces.py`).
    """

    unrolls: int = 0
    sums_ahead: bool = False

    def weight(self, leaf: int, value: jax.Array) -> jax.Array:
        """Input `leaf`, or one layer of it, is about to be used."""
        return value

    def taken(self, value: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """A layer of an input that a loop takes apart, to be made ready for use, and what the loop keeps of it."""
        return value, None

    def handed_out_stack(self, leaf: int, stack: jax.Array) -> None:
        """What a loop has kept of the layers of input `leaf`."""

    def knows(self, value: object) -> bool:
        """Whether a value is known by the array that it is, and so has to stay that one inside of a checkpoint."""
        return False

    def handed(self, values: Values) -> tuple[Values, Callable[[Values], Values]]:
        """What to hand to a function in place of values, some of them known by the arrays that they are, and how to get
        from what it is handed to the values that it evaluates with."""
        return values, list

    def equation(self, eqn: Equation, ins: Values, scope: Scope) -> Values:
        """The results of one equation."""
        return bind(eqn, ins)

    def groups(self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope) -> Sequence[Group[object]]:
        """Which of these equations to evaluate together; `results` are variables read after the last of them."""
        return []

    def group(self, group: Group[object], ins: Values, changed: Changed, scope: Scope) -> Values:
        """The results of a group, of which some literals may be `changed`."""
        raise AssertionError("whoever makes groups evaluates them")

    def carry(self, var: Var, value: jax.Array, scope: Scope) -> jax.Array:
        """A value enters, or is handed on within, a stack of layers."""
        return value

    def handed_out(self, own: Atom, var: Var, value: jax.Array, scope: Scope) -> jax.Array:
        """The last layer of a stack has made `own`, which is `var` behind the stack."""
        return value

    def looped(self, eqn: Equation, values: Values, scope: Scope) -> Values:
        """The results of a loop that the author wrote."""
        return values

    def layer(self, body: Body) -> Body:
        """The body of a stack of layers: the place for remat."""
        return body

    def block(self, body: Body) -> Body:
        """One layer whose weights are ready for use: the place for remat, where no loop is around it."""
        return body


def bind(eqn: Equation, ins: Sequence[ArrayLike], params: Params | None = None) -> Values:
    """Evaluate one equation as it stands, or with other parameters; its derivative is defined wherever the author's is
    meant to be."""
    if name_of(eqn) in SCATTERED:
        return [scattered(eqn, eqn.params if params is None else params, *map(jnp.asarray, ins))]
    return bind_as_is(eqn, ins, params)


def layer_of(eqns: Sequence[Equation], run: RepeatedLayers) -> tuple[Sequence[Equation], list[Var]]:
    """The equations of the layer that stands for all of a stack, and the variables of it that are read afterwards."""
    t = run.template
    results = [written for _, _, written, _ in run.carries]
    results += [group[t] for group in (*run.last_only, *run.outputs)]
    return eqns[run.start + t * run.period : run.start + (t + 1) * run.period], results


def in_turn(body: Body, carry: PyTree, xs: PyTree, length: int, reverse: bool = False) -> tuple[PyTree, PyTree]:
    """What `lax.scan` gives, each turn evaluated by itself: what a turn saves lies where it was made.

    >>> total, parts = in_turn(lambda c, x: (c + x, c), 0.0, jnp.arange(3.0), 3)
    >>> float(total), parts.tolist()
    (3.0, [0.0, 0.0, 1.0])
    """
    if length == 0:
        return lax.scan(body, carry, xs, length=0)
    leaves, tree = jax.tree.flatten(xs)
    layers = list(zip(*map(_apart, leaves), strict=True)) if leaves else [()] * length
    outs: list[PyTree] = [None] * length
    for k in reversed(range(length)) if reverse else range(length):
        carry, outs[k] = body(carry, jax.tree.unflatten(tree, layers[k]))
    return carry, jax.tree.map(lambda *each: jnp.stack(each), *outs)


def _apart(stack: jax.Array) -> tuple[jax.Array, ...]:
    """The layers of a stack. Their gradients are stacked, where JAX would add each to zeros as large as the stack."""

    def take(stack: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(stack[k] for k in range(stack.shape[0]))

    if not jnp.issubdtype(stack.dtype, jnp.inexact):
        return take(stack)
    apart = jax.custom_vjp(take)
    apart.defvjp(lambda stack: (take(stack), None), lambda _, gradients: (jnp.stack(gradients),))
    return apart(stack)


@dataclass
class ReadyWeight:
    """An input not used yet: a whole leaf, or layer `index` of a stacked array."""

    leaf: int
    value: jax.Array
    index: int | None = None


@dataclass
class Env:
    """What the variables of a trace, or of a body in it, stand for."""

    scope: Scope
    values: dict[Var, jax.Array | ReadyWeight] = field(default_factory=dict)
    stacks: dict[tuple[Atom, ...], jax.Array | ReadyWeight] = field(default_factory=dict)

    def give(self, leaves: Sequence[int], variables: Sequence[Var], value: jax.Array) -> None:
        """Inputs of the trace as they are stored: one as it is, several stacked on dim 0."""
        if len(leaves) == 1:
            self.values[variables[0]] = ReadyWeight(leaves[0], value)
            return
        self.stacks[tuple(variables)] = ReadyWeight(leaves[0], value)
        for index, (leaf, var) in enumerate(zip(leaves, variables, strict=True)):
            self.values[var] = ReadyWeight(leaf, value, index)


def emit(
    closed: ClosedJaxpr,
    runs: Sequence[RepeatedLayers],
    scope: Scope,
    in_groups: Sequence[tuple[int, ...]],
    out_groups: Sequence[tuple[int, ...]],
    hooks: Hooks,
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """A function from stored inputs to stored outputs that computes the trace.

    Args:
      closed: a flat trace.
      runs: its stacks of layers, each evaluated as one `lax.scan`.
      scope: the dims of its variables, handed to the hooks.
      in_groups: partition of the inputs. A group of one is given as it is; a longer one stacked on a new dim 0.
      out_groups: partition of the results, likewise.
      hooks: what to do at weights, equations and results.
    """
    emitter = Emitter(hooks)
    invars, outvars = closed.jaxpr.invars, closed.jaxpr.outvars

    def run(stored: Sequence[jax.Array]) -> list[jax.Array]:
        env = Env(scope)
        env.values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        for group, value in zip(in_groups, stored, strict=True):
            env.give(group, [invars[i] for i in group], value)
        emitter.body(closed.jaxpr, env, runs)
        return [emitter.collect(env, tuple(outvars[i] for i in group)) for group in out_groups]

    return run


def number(changed: Changed) -> Callable[[Equation, int], jax.Array]:
    """Reads an operand that is a number: as it is written, or as it is `changed`."""
    return lambda eqn, place: changed.get((id(eqn), place), literal_of(eqn, place).val)


def _step(item: Equation | Group[object]) -> Step[Equation | Group[object], Var]:
    if isinstance(item, Group):
        return Step(item, item.ins, item.outs)
    # A loop takes its operands itself: weights as they are stored.
    return Step(item, (), tuple(item.outvars)) if is_scan(item) else Step(item, *equation(item)[1:])


class Emitter:
    """Evaluates a trace, or parts of one."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self._remakes = True  # what the author has made again in the backward pass

    def read(self, env: Env, atom: Atom) -> jax.Array:
        if isinstance(atom, Literal):
            return atom.val
        value = env.values[atom]
        if isinstance(value, ReadyWeight):
            array = value.value if value.index is None else value.value[value.index]
            value = env.values[atom] = self.hooks.weight(value.leaf, array)
        return value

    def raw(self, env: Env, atom: Atom) -> jax.Array:
        """The value as it is stored, for a loop that will take it apart itself."""
        if not isinstance(atom, Literal):
            value = env.values[atom]
            if isinstance(value, ReadyWeight) and value.index is None:
                return value.value
        return self.read(env, atom)

    def collect(self, env: Env, group: tuple[Atom, ...]) -> jax.Array:
        """One output group: an array that is there already, or its members stacked."""
        if len(group) == 1:
            return jnp.asarray(self.raw(env, group[0]))
        if group in env.stacks:
            stack = env.stacks[group]
            return stack.value if isinstance(stack, ReadyWeight) else stack
        return jnp.stack([self.read(env, var) for var in group])

    def body(self, jaxpr: Jaxpr, env: Env, runs: Sequence[RepeatedLayers] = ()) -> None:
        index = 0
        for run in runs:
            self.stretch(jaxpr, index, run.start, env)
            self.roll(jaxpr.eqns, run, env)
            index = run.stop
        self.stretch(jaxpr, index, len(jaxpr.eqns), env)

    def stretch(self, jaxpr: Jaxpr, start: int, stop: int, env: Env) -> None:
        later = [var for eqn in jaxpr.eqns[stop:] for var in variables(eqn)]
        self.evaluate(jaxpr.eqns[start:stop], [*later, *jaxpr.outvars], env, {})

    def evaluate(self, eqns: Sequence[Equation], results: Sequence[Atom], env: Env, changed: Changed) -> None:
        """All of `eqns`, of which `results` are read afterwards and some literals `changed`."""

        def apply(step: Step[Equation | Group[object], Var], ins: Values) -> Values:
            of = step.of
            with jax.named_scope(str(name_stack(of.eqns[0] if isinstance(of, Group) else of))):
                if isinstance(of, Group):
                    return self.hooks.group(of, ins, changed, env.scope)
                if is_scan(of):
                    return self.hooks.looped(of, self.scan(of, env), env.scope)
                return self.remat(of, env, ins) if facts_of(of).remat else self.hooks.equation(of, ins, env.scope)

        def literal(of: Equation | Group[object], place: int) -> jax.Array:
            assert not isinstance(of, Group), "a group reads variables"
            return number(changed)(of, place)

        steps = map(_step, arrange(eqns, self.hooks.groups(eqns, results, env.scope)))
        evaluate(steps, lambda var: self.read(env, var), env.values.update, literal, apply)

    def roll(self, eqns: Sequence[Equation], run: RepeatedLayers, env: Env) -> None:
        """A stack of unrolled layers as one scan over its weights."""
        t = run.template
        xs, leaves = [], []
        for group in run.stacked:
            stack = env.stacks.get(group)
            if stack is None:
                stack = jnp.stack([self.read(env, var) for var in group])
            leaves.append(stack.leaf if isinstance(stack, ReadyWeight) else None)
            xs.append(stack.value if isinstance(stack, ReadyWeight) else stack)
        literals = [jnp.asarray(values) for values in run.literals.values()]
        carries = [initial for initial, _, _, _ in run.carries]
        # A result of the last layer alone is a carry: as a stacked output it would be kept for every layer.
        initial = [self.hooks.carry(var, self.read(env, var), env.scope) for var in carries]
        empty = [jnp.zeros(g[0].aval.shape, g[0].aval.dtype) for g in run.last_only]

        def layer(carry: tuple[Values, Values], x: tuple[Values, Values]) -> tuple[tuple[Values, Values], Outs]:
            arrays, values = x
            inner = Env(env.scope, dict(env.values), env.stacks)
            taken, kept = self.taken(leaves, arrays)
            inner.values.update((group[t], value) for group, value in zip(run.stacked, taken, strict=True))
            new, tail, outs = self.layer(eqns, run, inner, carry[0], values)
            return (new, tail), (outs, kept)

        turn = in_turn if run.repeats <= self.hooks.unrolls else lax.scan
        (final, tail), (outs, kept) = turn(
            self.hooks.layer(layer), (initial, empty), (xs, literals), length=run.repeats
        )
        self.hand_out(leaves, kept)
        for group, value in zip(run.outputs, outs, strict=True):
            env.stacks[group] = value
            env.values.update((var, value[i]) for i, var in enumerate(group))
        for (_, _, new, last), value in zip(run.carries, final, strict=True):
            env.values[last] = self.hooks.handed_out(new, last, value, env.scope)
        for group, value in zip(run.last_only, tail, strict=True):
            env.values[group[-1]] = self.hooks.handed_out(group[t], group[-1], value, env.scope)

    def layer(
        self, eqns: Sequence[Equation], run: RepeatedLayers, env: Env, carry: Values, literals: Values
    ) -> tuple[Values, Values, Values]:
        """One layer of a stack: what it hands on, what only the last one's is read of, what all of them give.

        Args:
          eqns: the trace's.
          run: the stack.
          env: with what the layer reads of outside, its weights included.
          carry: what it is handed.
          literals: of this layer.
        """
        t = run.template
        layer_eqns, results = layer_of(eqns, run)
        env.values.update(zip([read for _, read, _, _ in run.carries], carry, strict=True))
        changed = {
            (id(layer_eqns[at]), place): value for (at, place), value in zip(run.literals, literals, strict=True)
        }
        self.evaluate(layer_eqns, results, env, changed)
        new = [self.read(env, written) for _, _, written, _ in run.carries]
        new = [value.astype(old.dtype) for value, old in zip(new, carry, strict=True)]
        new = [self.hooks.carry(first, x, env.scope) for (first, *_), x in zip(run.carries, new, strict=True)]
        tail = [self.read(env, g[t]).astype(g[t].aval.dtype) for g in run.last_only]
        return new, tail, [self.read(env, g[t]) for g in run.outputs]

    def taken(
        self, leaves: Sequence[int | None], layers: Values
    ) -> tuple[list[jax.Array | ReadyWeight], list[jax.Array | None]]:
        """What a layer has of what its loop takes apart, inputs and others; and what the loop keeps of each."""
        given, kept = list[jax.Array | ReadyWeight](), list[jax.Array | None]()
        for leaf, layer in zip(leaves, layers, strict=True):
            taken, stays = (layer, None) if leaf is None else self.hooks.taken(layer)
            given.append(taken if leaf is None else ReadyWeight(leaf, taken))
            kept.append(stays)
        return given, kept

    def hand_out(self, leaves: Sequence[int | None], kept: Sequence[jax.Array | None]) -> None:
        for leaf, stack in zip(leaves, kept, strict=True):
            if leaf is not None and stack is not None:
                self.hooks.handed_out_stack(leaf, stack)

    def scan(self, eqn: Equation, env: Env) -> Values:
        """A loop that the author wrote: its layers' weights stay stacked, and are made ready one layer at a time."""
        loop, scope = scan_of(eqn), env.scope.inner[id(eqn)]
        consts = [self.read(env, atom) for atom in loop.consts(eqn.invars)]
        initial = [
            self.hooks.carry(var, jnp.asarray(self.read(env, atom)), scope)
            for var, atom in zip(loop.carries(loop.body.invars), loop.carries(eqn.invars), strict=True)
        ]
        xs = [self.raw(env, atom) for atom in loop.xs(eqn.invars)]
        sources = [None if isinstance(a, Literal) else env.values[a] for a in loop.xs(eqn.invars)]
        leaves = [x.leaf if isinstance(x, ReadyWeight) and x.index is None else None for x in sources]

        def body(carry: Values, x: Values) -> tuple[Values, Outs]:
            given, kept = self.taken(leaves, x)
            carry, outs = self.turn(eqn, scope, consts, carry, given)
            return carry, (outs, kept)

        layered = any(isinstance(source, ReadyWeight) for source in sources)
        # A loop over what a batch or a table has for each position is over time, and not over layers with matrices.
        atoms = [atom for atom in loop.xs(eqn.invars) if not isinstance(atom, Literal)]
        weighted = any(atom in env.scope.origin and atom.aval.ndim > 2 for atom in atoms)
        if self.hooks.sums_ahead and not layered and adds_up(eqn):
            return [self._summed(eqn, scope, consts, initial[0], xs)]
        if layered and weighted and loop.length <= self.hooks.unrolls:
            final, (outs, kept) = in_turn(self.hooks.layer(body), initial, xs, loop.length, loop.reverse)
        else:
            final, (outs, kept) = lax.scan(
                self.hooks.layer(body) if layered else body,
                initial, xs, length=loop.length, reverse=loop.reverse, unroll=eqn.params["unroll"],
            )  # fmt: skip
        self.hand_out(leaves, kept)
        return [*final, *outs]

    def _summed(self, eqn: Equation, scope: Scope, consts: Values, initial: jax.Array, xs: Values) -> jax.Array:
        """The result of a loop that adds up pieces."""
        loop = scan_of(eqn)
        numbers = zip(consts, loop.consts(eqn.invars), strict=True)
        consts = [jnp.asarray(x, atom.aval.dtype) if isinstance(atom, Literal) else x for x, atom in numbers]
        handed, known = self.hooks.handed(consts)

        def part(consts: Values, x: Values) -> jax.Array:
            self._remakes = False
            try:
                (new,), _ = self.turn(eqn, scope, known(consts), [jnp.zeros_like(initial)], x)
            finally:
                self._remakes = True
            return new

        return summed(part, initial, handed, xs, loop.reverse, loop.length)

    def turn(
        self, eqn: Equation, scope: Scope, consts: Values, carry: Values, xs: Sequence[jax.Array | ReadyWeight]
    ) -> tuple[Values, Values]:
        """One turn of a loop that the author wrote: what it hands on, and what it gives."""
        loop = scan_of(eqn)
        env = Env(scope)
        env.values.update(zip(loop.body.constvars, loop.closed.consts, strict=True))
        env.values.update(zip(loop.body.invars, (*consts, *carry, *xs), strict=True))
        self.body(loop.body, env)
        outs = [jnp.asarray(self.read(env, atom)) for atom in loop.body.outvars]
        new = [
            self.hooks.carry(var, out.astype(old.dtype), scope)
            for var, out, old in zip(loop.carries(loop.body.invars), loop.last(outs), carry, strict=True)
        ]
        return new, loop.ys(outs)

    def remat(self, eqn: Equation, env: Env, ins: Values) -> Values:
        """The author's `jax.checkpoint`, around the re-emitted inside."""
        inner = eqn.params["jaxpr"]
        scope = env.scope.inner[id(eqn)]

        def inside(*args: jax.Array) -> Values:
            local = Env(scope)
            kept = [x if self.hooks.knows(x) else arg for x, arg in zip(ins, args, strict=True)]
            local.values.update(zip(inner.invars, kept, strict=True))
            self.body(inner, local)
            return [self.read(local, atom) for atom in inner.outvars]

        if not self._remakes:
            return inside(*ins)
        return jax.checkpoint(inside, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])(*ins)
