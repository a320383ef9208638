"""Passes forward alone, over the layers of another trace of the same model: what they compute is kept for nobody."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cjax.gradients import LaidOut, divide_by, total_of
from cjax.jax_compat.core import ClosedJaxpr, Literal
from cjax.planner.homes import Kind
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.staged import StagedModel, stage_model
from cjax.trace.jaxpr.groups import variables
from cjax.trace.reading import Trace
from cjax.trace.stages.alike import find_alike_stacks
from cjax.trace.stages.stacks import LayerStack
from cjax.tree import PyTree
from cjax.walk.measured import num_bytes
from cjax.walk.model import Arrays, WalkModel
from cjax.walk.programs import Programs
from cjax.walk.tally import Tally
from cjax.walk.walk import Held, Row, in_turn
from cjax.walk.walker import Walker

KINDS: tuple[Kind, ...] = ("params", "frozen")
RowsOf = Callable[[int], Sequence[tuple[Any, ...]]]  # a stack of the walker -> a layer's params and frozen


@dataclass(frozen=True)
class LayerReads:
    """Which weights of a walker's layers a trace reads.

    Args:
      trace: what is computed.
      stacks: the stacks in it whose layers are those of one of the walker's, in order.
      whose: the walker's stack for each.
      rows: all that is read: the kind, the slot, the walker's stack and the layer.
      in_turn: whether each row is read by its own layer in its turn, and by nobody else.
    """

    trace: Trace
    stacks: tuple[LayerStack, ...]
    whose: tuple[int, ...]
    rows: tuple[tuple[Kind, int, int, int], ...]
    in_turn: bool


def read_layers(trace: Trace, walker: Walker) -> LayerReads:
    """What a trace of the walker's model, of whatever is done with it, reads of its layers.

    Args:
      trace: whose new model state nobody asks for; see `held_still`.
      walker: the walker.
    """
    storage = walker.storage
    groups: list[dict[tuple[int, ...], tuple[Kind, int]]] = []
    for k in range(len(walker.lengths)):
        groups.append({})
        for kind in KINDS:
            slots = getattr(storage, kind).slots
            first = 0 if kind == "params" else storage.num_params
            groups[k] |= {tuple(i + first for i in slots[at].layer_leaves): (kind, at) for at in walker.slots(kind, k)}
    stacks, whose = [], []
    for stack in find_alike_stacks(trace, least=0):  # a stack may be dearer in the loss than in what is scored
        mine = [k for k, found in enumerate(groups) if found.keys() & set(stack.weights)]
        if len(mine) == 1 and stack.length == walker.lengths[mine[0]]:
            stacks.append(_with_weights(trace, stack, groups[mine[0]]))
            whose.append(mine[0])
    covered = {i for stack in stacks for group in stack.weights for i in group}
    read, rows, in_turn = read_leaves(trace), [], bool(stacks)
    for k, found in enumerate(groups):
        for group, (kind, at) in found.items():
            # One leaf that holds all layers is read as a whole.
            mine = [layer for layer in range(walker.lengths[k]) if group[layer % len(group)] in read]
            rows += [(kind, at, k, layer) for layer in mine]
            in_turn = in_turn and (not mine or set(group) <= covered)
    return LayerReads(trace, tuple(stacks), tuple(whose), tuple(rows), in_turn)


def _with_weights(trace: Trace, stack: LayerStack, known: Collection[tuple[int, ...]]) -> LayerStack:
    """`stack` with weights that layers have rows of; others are read from outside."""
    invars, others = trace.closed.jaxpr.invars, [group for group in stack.weights if group not in known]
    more = (tuple(invars[i] for i in group) for group in others)
    weights = tuple(group for group in stack.weights if group in known)
    return dataclasses.replace(stack, weights=weights, reads=(*stack.reads, *more))


def held_still(trace: Trace) -> Trace:
    """`trace` with a model state that stays as it is: nobody asks for the new one."""
    jaxpr, states = trace.closed.jaxpr, trace.leaves_of("model_state")
    outvars = [*jaxpr.outvars[: len(jaxpr.outvars) - len(states)], *(jaxpr.invars[i] for i in states)]
    return dataclasses.replace(trace, closed=ClosedJaxpr(jaxpr.replace(outvars=outvars), trace.closed.consts))


def read_leaves(trace: Trace) -> set[int]:
    """The inputs that results are made of."""
    jaxpr = trace.closed.jaxpr
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if live & set(eqn.outvars):
            live |= set(variables(eqn))
    return {i for i, var in enumerate(jaxpr.invars) if var in live}


def forward_programs(
    staged: StagedModel, reads: LayerReads, walker: Walker, loss: LaidOut, num_parts: int, batch_shape: PyTree
) -> Programs:
    """The programs of a trace that is in stages; arguments as of `ForwardWalk`."""
    read = {(kind, at) for found in staged.slots for kind, at in found}
    unread = {
        kind: frozenset(
            at for k in range(len(walker.lengths)) for at in walker.slots(kind, k) if (kind, at) not in read
        )
        for kind in KINDS
    }
    model = WalkModel(staged, num_parts, total_of(reads.trace, num_parts), unread)
    of_trace = LaidOut(reads.trace, loss.storage, loss.plan, loss.mesh)
    return Programs(model, loss.storage, loss.mesh, divide_by(of_trace), batch_shape)


class Picked:
    """Of the rows of a walker's layers, what a trace reads: in another order, it may be, or not all."""

    def __init__(self, model: WalkModel, whose: Sequence[int], walker: Walker) -> None:
        self._picks = [
            [[walker.slots(kind, mine).index(at) for at in model.places(k, kind)] for kind in KINDS]
            for k, mine in enumerate(whose)
        ]

    def __call__(self, k: int, rows: Sequence[Row]) -> tuple[Row, ...]:
        return tuple(tuple(row[i] for i in pick) for row, pick in zip(rows, self._picks[k], strict=True))


class ForwardWalk:
    """The results of a trace, by a walk over its layers. All parts of a batch go through a layer before the next.

    Args:
      reads: the trace, of a part of the batch, and its stacks, which read all that it reads of layers.
      walker: whose layers they are.
      loss: what the walker was made for.
      layout: of the trace.
      num_parts: how many parts.
      batch_shape: of all of them.
    """

    def __init__(
        self, reads: LayerReads, walker: Walker, loss: LaidOut, layout: Layout, num_parts: int, batch_shape: PyTree
    ) -> None:
        assert reads.in_turn, "what is read apart from its layer has no turn"
        staged = stage_model(reads.trace, reads.stacks, loss.storage, loss.plan, loss.mesh, layout)
        self._programs = forward_programs(staged, reads, walker, loss, num_parts, batch_shape)
        self._whose, self._lengths = reads.whose, [walker.lengths[k] for k in reads.whose]
        self._pick = Picked(self._programs.model, reads.whose, walker)

    def compile(self, rows: RowsOf, inputs: Sequence[Any]) -> int:
        """Compiles all programs; the bytes that a device holds at most beside weights and rows. Arguments as of
        `MemoryWalk.compile`."""
        programs, zero, tally, (params, frozen, *rest) = self._programs, np.int32(0), Tally(), inputs
        model = programs.model
        out, new, states = tally.run(programs.begin, params, frozen, *rest)
        tally.kept = num_bytes((out, new, states, rest[1]))
        out = dataclasses.replace(out, params=params, frozen=frozen)
        payload, _ = tally.run(programs.enter, out, zero, states)
        for k, mine in enumerate(self._whose):
            every = [payload] * model.num  # of each part its own
            once = tally.run(programs.once[k], out, states, handed=every)
            row = self._pick(k, rows(mine))
            args = (row, once, out, zero, zero, states, payload)
            moving, _ = tally.run(programs.forward[k], *args, handed=(once, every))
            payload = [*moving, *model.passing(k, payload)[1]]
            if k + 1 < len(self._whose):
                payload = tally.run(programs.leave[k], out, zero, states, payload, handed=(once, [payload] * model.num))
        values = programs.values.eval_shape(out, zero, states, payload)
        tally.run(
            programs.values, out, zero, states, payload, handed=([payload] * model.num, [values] * (model.num - 1))
        )
        return tally.peak

    def __call__(
        self, held: Held, params: Row, frozen: Row, model_state: Row, batch: PyTree, key: jax.Array
    ) -> list[Arrays]:
        """The results of each part; arguments as of `Walk.gradients`."""
        programs, model = self._programs, self._programs.model
        out, _, states = programs.begin(params, frozen, model_state, batch, key)
        out = dataclasses.replace(out, params=params, frozen=frozen)
        numbers = [np.int32(i) for i in range(model.num)]
        payloads: list[Arrays] = [programs.enter(out, i, states)[0] for i in numbers]
        for k, mine in enumerate(self._whose):
            once = programs.once[k](out, states)
            parts = [model.passing(k, payload) for payload in payloads]
            payloads.clear()
            moving, passing = [part[0] for part in parts], [part[1] for part in parts]
            parts.clear()
            for at, rows in in_turn([held.params[mine], held.frozen[mine]], range(self._lengths[k])):
                row = self._pick(k, rows)
                for i, behind in zip(numbers, passing, strict=True):
                    moving[i], _ = programs.forward[k](row, once, out, i, np.int32(at), states, [*moving[i], *behind])
                jax.block_until_ready(moving)
                del row
            payloads = [[*a, *b] for a, b in zip(moving, passing, strict=True)]
            if k + 1 < len(self._whose):
                payloads = [
                    programs.leave[k](out, i, states, payload) for i, payload in zip(numbers, payloads, strict=True)
                ]
        return [programs.values(out, i, states, payload) for i, payload in zip(numbers, payloads, strict=True)]
