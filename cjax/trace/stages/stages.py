"""What a pipeline runs, as functions: what comes before the first layer, one layer, what comes after the last."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.trace.emit.emit import Emitter, Env, Hooks
from cjax.trace.jaxpr.view import scan_of
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.stages.counters import narrowed, run
from cjax.trace.stages.stacks import CutTrace, Entry, States, writes
from cjax.trace.stages.stacks import reads as item_reads

Arrays = list[jax.Array]
Piece = list[Equation] | RepeatedLayers


class Stages:
    """The parts of a trace that was cut at its stacks.

    Inputs are given as they are stored, in groups of one or stacked: `trained` (parameters that are no layer's own),
    and `given` (all other inputs but the weights of the stacks: frozen weights, the model state, a micro-batch, a
    key, an index). What a stack is handed is its payload: a list of arrays, alike before and after each layer.

    Args:
      cut: the trace and its stacks.
      hooks: what happens at weights, equations and results.
      trained: groups of inputs.
      given: groups of inputs.
    """

    def __init__(
        self, cut: CutTrace, hooks: Hooks, trained: Sequence[tuple[int, ...]], given: Sequence[tuple[int, ...]]
    ) -> None:
        self.cut, self.hooks = cut, hooks
        self._emitter = Emitter(hooks)
        self._groups = (*trained, *given)
        self._num_trained = len(trained)

    def without_states(self) -> "Stages":
        """The same, of a model state that stays as it is."""
        found = copy.copy(self)
        found.cut = replace(self.cut, states=States(((),) * len(self.cut.stacks), (), ()))
        return found

    # -- around the stacks --
    def enter(self, trained: Arrays, given: Arrays) -> Arrays:
        """The payload of the first stack's first layer."""
        env = self._env(trained, given)
        self._compute(self._sources(0), (), env)
        return self._payload(0, env)

    def leave(self, k: int, trained: Arrays, given: Arrays, payload: Arrays) -> Arrays:
        """From what the last layer of stack `k` hands on: the next stack's payload, or the results of the loss and
        behind them the new model state that is made of examples there."""
        env = self._env(trained, given)
        # Behind the layers nothing is computed again that went through them: the stage of the last layer has no other's
        # weights, and could not.
        known = self._restore(k, payload, env)
        if k + 1 < len(self.cut.stacks):
            self._compute(self._sources(k + 1), known, env)
            return self._payload(k + 1, env)
        results = [*self.cut.results(), *self._new(self.cut.states.after)]
        self._compute(results, known, env)
        return [jnp.asarray(self._emitter.read(env, atom)) for atom in results]

    def states_before(self, trained: Arrays, given: Arrays) -> Arrays:
        """The new model state that is made of examples before the first layer."""
        env, atoms = self._env(trained, given), self._new(self.cut.states.before)
        self._compute(atoms, (), env)
        return [jnp.asarray(self._emitter.read(env, atom)) for atom in atoms]

    def _new(self, model_state: Sequence[int]) -> list[Atom]:
        outvars = self.cut.trace.closed.jaxpr.outvars
        return [outvars[len(self.cut.results()) + i] for i in model_state]

    def once(self, k: int, trained: Arrays, given: Arrays) -> Arrays:
        """What layers of stack `k` read that depends on no micro-batch, weights ready for use."""
        return self._entries(self.cut.once[k], trained, given)

    def recomputed(self, k: int, trained: Arrays, given: Arrays) -> Arrays:
        """What layers of stack `k` read that depends on the micro-batch, and on no parameter."""
        return self._entries(self.cut.recomputed[k], trained, given)

    def next_model_state(self, trained: Arrays, given: Arrays, groups: Sequence[tuple[int, ...]]) -> Arrays:
        """The new model state, in these groups: leaves that need no layer, such as the state of random numbers."""
        env = self._env(trained, given)
        targets = self.cut.trace.closed.jaxpr.outvars[len(self.cut.results()) :]
        old = [self.cut.trace.closed.jaxpr.invars[i] for i in self.cut.trace.leaves_of("model_state")]
        states = self.cut.states.every
        # No more than these leaves need, of loops too: all of the loss would be computed once more, on every stage.
        items = narrowed(self.cut.trace.closed.jaxpr.eqns, [v for i, v in enumerate(targets) if i not in states])
        run(items, lambda var: self._emitter.read(env, var), env.values.update)
        now = [old[i] if i in states else v for i, v in enumerate(targets)]  # what is made of examples stays for now
        return [self._emitter.collect(env, tuple(now[i] for i in group)) for group in groups]

    # -- in a stack --
    def ready(self, k: int, weights: Arrays) -> Arrays:
        """One layer's weights of stack `k`, ready for use."""
        groups = self.cut.stacks[k].weights
        return [self.hooks.weight(group[0], w) for group, w in zip(groups, weights, strict=True)]

    def layer(
        self,
        k: int,
        ready: Arrays,
        once: Arrays,
        recomputed: Arrays,
        index: jax.Array,
        payload: Arrays,
        states: bool = False,
    ) -> Arrays:
        """What one layer of stack `k` hands on, or the new values of what it carries and makes of examples.

        Args:
          k: the stack.
          ready: the layer's weights.
          once, recomputed: what `once` and `recomputed` returned.
          index: which layer it is.
          payload: what it is handed.
          states: which of both.
        """
        stack, cut = self.cut.stacks[k], self.cut
        carry, outputs, last, transferred = self._split(k, payload)
        values: dict[Entry, jax.Array] = dict(zip(cut.once[k], once, strict=True))
        values.update(zip(cut.recomputed[k], recomputed, strict=True))
        values.update(zip(cut.transferred[k], transferred, strict=True))
        invars = cut.trace.closed.jaxpr.invars
        own = {tuple(invars[i] for i in g): w for g, w in zip(stack.weights, ready, strict=True)}
        # Weights come one layer's alone, as a stage holds them. All else that layers have one each of is there for all
        # of them, and looked up by the layer's number.
        xs = {
            inner: own[entry] if entry in own else lax.dynamic_index_in_dim(values[entry], index, keepdims=False)
            for inner, entry in stack.xs
        }
        if isinstance(stack.of, RepeatedLayers):
            env = Env(cut.trace.dims.top, {entry[0]: value for entry, value in values.items() if len(entry) == 1})
            env.values.update(xs)
            # Numbers that differ from layer to layer (a drop path rate) are looked up by the layer's index: one program
            # runs whichever layer a stage has.
            literals = [jnp.asarray(numbers)[index] for numbers in stack.of.literals.values()]
            carry, last, outs = self._emitter.layer(cut.trace.closed.jaxpr.eqns, stack.of, env, carry, literals)
        else:
            scope = cut.trace.dims.top.inner[id(stack.of)]
            consts = scan_of(stack.of).consts(stack.of.invars)
            read = [atom.val if isinstance(atom, Literal) else values[(atom,)] for atom in consts]
            last = []
            carry, outs = self._emitter.turn(stack.of, scope, read, carry, list(xs.values()))
        # New values of states and what is handed on are asked for apart: one goes to the next stage and is derived
        # through, the other stays, and nobody waits for it.
        if states:
            return [outs[j] for j, _ in cut.states.layers[k]]
        outs = [out for entry, out in zip(stack.outputs, outs, strict=True) if entry]
        last = [out for var, out in zip(stack.last_only, last, strict=True) if var is not None]
        outputs = [
            lax.dynamic_update_index_in_dim(whole, out.astype(whole.dtype), index, 0)
            for whole, out in zip(outputs, outs, strict=True)
        ]
        return [*carry, *outputs, *last, *transferred]

    # -- payloads --
    def _sources(self, k: int) -> list[Atom]:
        return [*self.cut.stacks[k].initial, *(v for entry in self.cut.transferred[k] for v in entry)]

    def _payload(self, k: int, env: Env) -> Arrays:
        """What the first layer of stack `k` is handed, with room for what each layer gives."""
        stack = self.cut.stacks[k]
        if isinstance(stack.of, RepeatedLayers):
            scope, names = env.scope, [first for first, *_ in stack.of.carries]
        else:
            loop = scan_of(stack.of)
            scope, names = env.scope.inner[id(stack.of)], loop.carries(loop.body.invars)
        carry = [
            self.hooks.carry(name, jnp.asarray(self._emitter.read(env, atom)), scope)
            for name, atom in zip(names, stack.initial, strict=True)
        ]
        # The author's own scan stacks its results itself, so that their variables have the dim already.
        lead = (stack.length,) if stack.is_run else ()
        # What each layer gives goes along in an array with a row for each, filled on the way: behind the last layer, on
        # another device, all of them are read.
        avals = [entry[0].aval for entry in stack.outputs if entry]
        outputs = [jnp.zeros((*lead, *aval.shape), aval.dtype) for aval in avals]
        last = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in stack.last_only if var is not None]
        return [*carry, *outputs, *last, *(self._read(env, entry) for entry in self.cut.transferred[k])]

    def _split(self, k: int, payload: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        stack = self.cut.stacks[k]
        a = len(stack.initial)
        b = a + sum(map(bool, stack.outputs))
        c = b + sum(var is not None for var in stack.last_only)
        return payload[:a], payload[a:b], payload[b:c], payload[c:]

    def _restore(self, k: int, payload: Arrays, env: Env) -> list[Var]:
        """Into `env`, what the payload stands for after the last layer; the variables that are there now."""
        stack = self.cut.stacks[k]
        carry, outputs, last, transferred = self._split(k, payload)
        kept = [entry for entry in stack.outputs if entry]
        known = dict(zip(stack.final, carry, strict=True))
        known |= dict(zip([var for var in stack.last_only if var is not None], last, strict=True))
        for entry, value in zip((*kept, *self.cut.transferred[k]), (*outputs, *transferred), strict=True):
            # A whole stack is kept as one array beside its members: what reads all of them (a loop behind) takes it as
            # it is, and would put them together again otherwise.
            stacked = len(entry) > 1 or (stack.is_run and entry in kept)
            if stacked:
                env.stacks[entry] = value
                known |= {var: value[i] for i, var in enumerate(entry)}
            else:
                known |= dict.fromkeys(entry, value)
        env.values.update(known)
        return list(known)

    # -- evaluation --
    def _env(self, trained: Arrays, given: Arrays) -> Env:
        """The values of all inputs, by their variables."""
        closed = self.cut.trace.closed
        env = Env(self.cut.trace.dims.top)
        env.values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        for group, value in zip(self._groups, (*trained, *given), strict=True):
            env.give(group, [closed.jaxpr.invars[i] for i in group], value)
        return env

    def _compute(self, targets: Sequence[Atom], known: Sequence[Var], env: Env) -> None:
        """Into `env`, the values of `targets`, from inputs and from what is known of others."""
        cut, eqns = self.cut, self.cut.trace.closed.jaxpr.eqns
        wanted = list(targets)
        while True:
            items = cut.needed(wanted, known)
            pieces = self._pieces(items, targets)
            made = {v for item in items for v in writes(item, cut.trace)} | set(env.values)
            read = [
                v
                for piece, results in pieces
                if not isinstance(piece, RepeatedLayers)
                for group in self.hooks.groups(piece, results, env.scope)
                for v in group.ins
            ]
            # A group of equations (an attention) may read what none of its equations reads at full size, its masks'
            # positions; so what is needed is asked again until nothing is added.
            if made.issuperset(read):
                break
            wanted += [v for v in read if v not in made]
        for piece, results in pieces:
            if isinstance(piece, RepeatedLayers):
                self._emitter.roll(eqns, piece, env)
            else:
                self._emitter.evaluate(piece, results, env, {})

    def _pieces(
        self, items: Sequence[Equation | RepeatedLayers], targets: Sequence[Atom]
    ) -> list[tuple[Piece, list[Atom]]]:
        """Stretches of equations and single runs, each with what is read afterwards."""
        # Equations side by side are evaluated together, so that groups of them, such as an attention, are found whole.
        pieces: list[Piece] = []
        for item in items:
            if isinstance(item, RepeatedLayers):
                pieces.append(item)
            elif pieces and isinstance(pieces[-1], list):
                pieces[-1].append(item)
            else:
                pieces.append([item])
        later: list[Atom] = list(targets)
        found: list[tuple[Piece, list[Atom]]] = []
        for piece in reversed(pieces):
            found.append((piece, list(later)))
            inside = [piece] if isinstance(piece, RepeatedLayers) else piece
            later += [v for item in inside for v in item_reads(item, self.cut.trace)]
        return found[::-1]

    def _entries(self, entries: Sequence[Entry], trained: Arrays, given: Arrays) -> Arrays:
        env = self._env(trained, given)
        self._compute([v for entry in entries for v in entry], (), env)
        return [self._read(env, entry) for entry in entries]

    def _read(self, env: Env, entry: Entry) -> jax.Array:
        if len(entry) > 1:
            return jnp.stack([jnp.asarray(self._emitter.read(env, v)) for v in entry])
        return jnp.asarray(self._emitter.read(env, next(iter(entry))))
