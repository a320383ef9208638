"""Passes forward over layers that remember: each has a row of its own of what it knows of earlier passes."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from cjax.gradients import LaidOut
from cjax.jax_compat.core import ClosedJaxpr, Literal
from cjax.mesh import BATCH_AXES, compiler_options
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.staged import stage_model
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import LayerStack, States
from cjax.tree import PyTree
from cjax.walk.forward import Picked, RowsOf, forward_programs, read_layers, read_leaves
from cjax.walk.jitted import Jitted
from cjax.walk.measured import num_bytes
from cjax.walk.model import Arrays, Outside
from cjax.walk.stores import LayerRows
from cjax.walk.tally import Tally
from cjax.walk.walk import Held, Row, in_turn
from cjax.walk.walker import Walker

Places = Sequence[Sequence[int]]  # for each layer, the leaves of the model state that are its memory


@dataclass(frozen=True)
class Remembering:
    """A trace whose memory is model state, a leaf for each layer and array.

    Args:
      trace: gives the results, then the new model state with the new memory behind it.
      places: where each layer's memory is among the leaves of the model state.
    """

    trace: Trace
    places: Places


def remembering(trace: Trace, memory: Sequence[Sequence[int]]) -> Remembering:
    """A trace that is handed memory with its batch and returns it new.

    Args:
      trace: its results are the outcome, one array, and the new memory, layer by layer.
      memory: for each layer, which leaves of the batch are its memory.
    """
    jaxpr, batch, old = trace.closed.jaxpr, trace.leaves_of("batch"), trace.leaves_of("model_state")
    mine = [batch[i] for layer in memory for i in layer]
    outcome, *new = jaxpr.outvars[: len(jaxpr.outvars) - len(old)]
    assert mine == sorted(mine) and len(new) == len(mine), "memory comes back in the order in which it went in"
    leaves = tuple(
        dataclasses.replace(leaf, kind="model_state") if i in set(mine) else leaf for i, leaf in enumerate(trace.leaves)
    )
    outvars = [outcome, *(jaxpr.invars[i] for i in old), *new]
    closed = ClosedJaxpr(jaxpr.replace(outvars=outvars), trace.closed.consts)
    places, num = [], len(old)
    for layer in memory:
        places.append(list(range(num, num + len(layer))))
        num += len(layer)
    return Remembering(dataclasses.replace(trace, closed=closed, leaves=leaves), places)


class MemoryWalk:
    """One pass of a trace whose layers remember.

    Args:
      found: the trace and its memory.
      walker: whose layers they are.
      loss: what the walker was made for.
      layout: of the trace.
      batch_shape: of the batch, without the memory.

    Raises:
      ValueError: the layers that remember are not those that a walk goes through.
    """

    def __init__(self, found: Remembering, walker: Walker, loss: LaidOut, layout: Layout, batch_shape: PyTree) -> None:
        reads = read_layers(found.trace, walker)
        if not reads.in_turn:
            raise ValueError(_refusal(loss))
        stacks, self._read = [], []
        for stack in reads.stacks:
            stack, of = _with_memory(found, stack)
            stacks.append(stack)
            self._read.append(of)
        staged = stage_model(found.trace, stacks, loss.storage, loss.plan, loss.mesh, layout)
        if not _is_each_layers(found, staged.stages.cut.states, self._read):
            raise ValueError(_refusal(loss))
        self._remembering = staged.stages
        still = dataclasses.replace(staged, stages=staged.stages.without_states())
        self._programs = forward_programs(still, reads, walker, loss, 1, batch_shape)
        self._found, self._lengths = found, [walker.lengths[k] for k in reads.whose]
        self._whose, self._pick = reads.whose, Picked(self._programs.model, reads.whose, walker)
        self._begin = Jitted(self._make_begin, loss.mesh)
        self._layers = [Jitted(functools.partial(self._layer, k), loss.mesh, ("memory",)) for k in range(len(stacks))]
        self._mine = next(k for k, of in enumerate(self._read) if of)
        self.whose = self._whose[self._mine]  # the walker's stack that remembers

        placed, options = tuple(s.sharding for s in self.structs()), compiler_options(loss.mesh)
        self.empty = jax.jit(self._make_empty, out_shardings=placed, compiler_options=options)

    def _make_empty(self) -> Row:
        return tuple(jnp.zeros(s.shape, s.dtype) for s in self.structs())

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """A layer's memory: arrays as placed."""
        trace, layout = self._found.trace, self._programs.model.model.layout
        first, structs = trace.leaves_of("model_state"), []
        given_back = trace.closed.jaxpr.outvars[-len(first) :]
        for i in self._found.places[0]:
            leaf = trace.leaves[first[i]]
            # As the pass gives it back: a first one may not read it, and so knows nothing of how it is split.
            atom = given_back[i]
            spec = layout.spec(() if isinstance(atom, Literal) else trace.dims.of(atom), leaf.shape)
            x = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            structs.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._programs.sharding(x, spec)))
        return structs

    def compile(self, rows: RowsOf, inputs: Sequence[Any]) -> int:
        """Compiles all programs; the bytes that a device holds at most beside weights and rows.

        Args:
          rows: of each of the walker's stacks, a layer's params and frozen, as structs.
          inputs: params, frozen, model_state, batch and key of a call, as structs.
        """
        programs, zero, tally, (params, frozen, *rest) = self._programs, np.int32(0), Tally(), inputs
        out = tally.run(self._begin, *rest)
        tally.kept = num_bytes((out, rest[1]))
        out = dataclasses.replace(out, params=params, frozen=frozen)
        payload, _ = tally.run(programs.enter, out, zero, [])
        for k, mine in enumerate(self._whose):
            once = tally.run(programs.once[k], out, [], handed=payload)
            row, mem = self._pick(k, rows(mine)), tuple(self.structs()) if k == self._mine else ()
            moving, _ = tally.run(self._layers[k], row, mem, once, out, zero, payload, handed=(once, payload))
            payload = [*moving, *programs.model.passing(k, payload)[1]]
            if k + 1 < len(self._whose):
                payload = tally.run(programs.leave[k], out, zero, [], payload, handed=(once, payload))
        tally.run(programs.values, out, zero, [], payload, handed=payload)
        return tally.peak

    def __call__(
        self, held: Held, memory: LayerRows, params: Row, frozen: Row, model_state: Row, batch: PyTree, key: jax.Array
    ) -> jax.Array:
        """The outcome; `memory` is new behind it. Other arguments as of `Walk.gradients`."""
        programs, zero = self._programs, np.int32(0)
        out = dataclasses.replace(self._begin(model_state, batch, key), params=params, frozen=frozen)
        payload, _ = programs.enter(out, zero, [])
        for k, mine in enumerate(self._whose):
            once = programs.once[k](out, [])
            stores = [held.params[mine], held.frozen[mine], *([memory] if k == self._mine else [])]
            for at, (*rows, last) in in_turn(stores, range(self._lengths[k])):
                own, mem = ([*rows], last) if k == self._mine else ([*rows, last], ())
                row = self._pick(k, own)
                moving, new = self._layers[k](row, mem, once, out, np.int32(at), payload)
                payload = [*moving, *programs.model.passing(k, payload)[1]]
                del row, own, mem, last, rows, moving
                jax.block_until_ready((payload, new))
                if k == self._mine:
                    memory.put(at, new)
                del new
            if k + 1 < len(self._whose):
                payload = programs.leave[k](out, zero, [], payload)
        return programs.values(out, zero, [], payload)[0]

    def _make_begin(self, model_state: Row, batch: PyTree, key: jax.Array) -> Outside:
        axes = tuple(axis for axis in BATCH_AXES if axis in self._programs.mesh.axis_names)
        rows = [
            self._programs.place(x[None], PartitionSpec(None, axes, *[None] * (x.ndim - 1))) if x.ndim else x
            for x in jax.tree.leaves(batch)
        ]
        return Outside((), (), tuple(x[None] for x in model_state), tuple(rows), key)

    def _layer(
        self, k: int, row: tuple[Any, ...], memory: Row, once: Arrays, out: Outside, at: jax.Array, payload: Arrays
    ) -> tuple[Arrays, Row]:
        """What a layer hands on, and what it remembers."""
        model, stages = self._programs.model, self._remembering
        stack, places = stages.cut.stacks[k], self._found.places
        weights = model.weights(k, *row)
        groups = stack.weights[: len(weights)]
        ready = [stages.hooks.weight(group[0], w) for group, w in zip(groups, weights, strict=True)]
        # Each group has one leaf of each layer, in the same place of its memory.
        ready += [memory[places[0].index(group[0])] for group in self._read[k]]
        assert len(ready) == len(stack.weights)
        recomputed = model.recomputed(k, out, jnp.int32(0), [])
        outs = stages.layer(k, ready, once, recomputed, at, payload)
        made = stages.layer(k, ready, once, recomputed, at, payload, states=True)  # merged with the one above
        new = list(memory)
        for x, (_, group) in zip(made, stages.cut.states.layers[k], strict=True):
            place = places[0].index(group[0])
            new[place] = x.astype(memory[place].dtype)
        moving = model.passing(k, outs)[0]
        specs, structs = model.passing(k, model.payload_specs(k))[0], self.structs() if memory else []
        moving = [self._programs.place(x, spec) for x, spec in zip(moving, specs, strict=True)]
        return moving, tuple(self._programs.place(x, s.sharding.spec) for x, s in zip(new, structs, strict=True))


def _with_memory(found: Remembering, stack: LayerStack) -> tuple[LayerStack, list[tuple[int, ...]]]:
    """`stack` with memory among its weights, and which leaves of the model state these are."""
    trace = found.trace
    number = {trace.closed.jaxpr.invars[at]: i for i, at in enumerate(trace.leaves_of("model_state"))}
    entries = [
        entry
        for entry in stack.reads
        if [number.get(v) for v in entry] in [list(group) for group in zip(*found.places, strict=True)]
    ]
    first = trace.leaves_of("model_state")
    groups = [tuple(number[v] for v in entry) for entry in entries]
    weights = (*stack.weights, *(tuple(first[i] for i in group) for group in groups))
    reads = tuple(entry for entry in stack.reads if entry not in entries)
    return dataclasses.replace(stack, weights=weights, reads=reads), groups


def _is_each_layers(found: Remembering, states: States, read: list[list[tuple[int, ...]]]) -> bool:
    """Whether all that is remembered is read and made anew by the layers of one stack, each its own."""
    trace, groups = found.trace, {tuple(group) for group in zip(*found.places, strict=True)}
    first, outvars = trace.leaves_of("model_state"), trace.closed.jaxpr.outvars
    every = {i for group in groups for i in group}
    known = {i for of in read for group in of for i in group}
    needed = {i for i in every if first[i] in read_leaves(trace)}
    num = len(outvars) - len(first)
    new = {i for i in every if outvars[num + i] is not trace.closed.jaxpr.invars[first[i]]}
    made = {group for of in states.layers for _, group in of}
    whose = {k for k, of in enumerate(read) if of} | {k for k, of in enumerate(states.layers) if of}
    return needed <= known and made <= groups and new == {i for group in made for i in group} and len(whose) == 1


def _refusal(loss: LaidOut) -> str:
    return (
        f"under plan {str(loss.plan)!r} texts are generated layer by layer, and in this model's pass over new tokens "
        "these layers were not found, each with its own memory of earlier tokens: take a plan without budget= and "
        "offload=: other = program.replan(...), generate(other, ..., state=other.restore(state))."
    )
