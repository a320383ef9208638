"""Scoring in programs that walk over layers: forward, layer by layer, and nothing is kept for a way back."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cjax.gradients import LaidOut
from cjax.mesh import compiler_options
from cjax.planner.homes import Homes, Kind
from cjax.program.composed import Composed, batch_shardings
from cjax.program.passing import check_room, inputs_of, weight_rows
from cjax.program.scores import (
    Pair,
    Piece,
    Subject,
    combined,
    layout_of,
    num_results,
    pieces_of,
    put_together,
)
from cjax.program.state import Arrays, State
from cjax.program.walked import WalkedState
from cjax.sharding.place.model import place_loss
from cjax.sharding.storage.storage import Storage
from cjax.tree import PyTree
from cjax.walk.forward import ForwardWalk, LayerReads, held_still, read_layers
from cjax.walk.jitted import Jitted
from cjax.walk.measured import num_bytes
from cjax.walk.stores import ROOM
from cjax.walk.tally import Tally
from cjax.walk.walk import in_turn

Score = Callable[[State, PyTree], list[Pair]]
SlotRows = Mapping[tuple[Kind, int], Mapping[int, jax.Array]]  # a slot's arrays, by layer


def walked_score(composed: Composed, subject: Subject) -> Score:
    """What scores batches like the subject's: `(state, placed batch) -> pairs of total and weight`.

    Raises:
      ValueError: when it is called, where what is scored needs weights of more layers at once than there is room for.
    """
    walker = composed.walker
    assert walker is not None
    reads = read_layers(held_still(subject.trace), walker)
    if not reads.in_turn:
        return _gathered_score(composed, subject, reads)
    # A function of the user's may make a number of its rows that is no mean over them: it sees all of them at once.
    pieces = pieces_of(composed, subject, in_parts=subject.call is None)
    loss = LaidOut(composed.trace, composed.storage, composed.plan, composed.mesh)
    walks, shapes = [], [jax.eval_shape(piece.of, subject.source.batch_shape) for piece in pieces]
    for piece, shape in zip(pieces, shapes, strict=True):
        layout, found = layout_of(composed, piece.trace), read_layers(held_still(piece.trace), walker)
        walks.append(ForwardWalk(found, walker, loss, layout, piece.num_parts, shape))
    options = compiler_options(composed.mesh)
    placed = [batch_shardings(composed.mesh, shape) for shape in shapes]
    cut = jax.jit(lambda batch: [piece.of(batch) for piece in pieces], out_shardings=placed, compiler_options=options)

    def put(outs: list[list[Arrays]]) -> list[Pair]:
        results = [_whole(piece, parts) for piece, parts in zip(pieces, outs, strict=True)]
        return combined(subject.trace, pieces, results)

    combine = jax.jit(put, out_shardings=composed.whole, compiler_options=options)

    @functools.cache
    def peak() -> int:
        """What a device holds beside weights, the fuller of whole micro-batches and of what is left over."""
        whole = num_bytes(composed.with_batch(subject.source.batch_shape))
        found = [
            walk.compile(weight_rows(walker), inputs_of(composed, shape))
            for walk, shape in zip(walks, shapes, strict=True)
        ]
        return max(found) + (whole if len(found) > 1 else 0)

    def score(state: State, batch: PyTree) -> list[Pair]:
        assert isinstance(state, WalkedState)
        if composed.plan.budget is not None:
            check_room(composed, state._held.homes, peak(), subject.source.num_rows)
        some = [batch] if len(pieces) == 1 else cut(batch)
        rest = (state._params, state._frozen, state._model_state)
        outs = [walk(state._held, *rest, part, state._key) for walk, part in zip(walks, some, strict=True)]
        return combine(outs)

    return score


def _whole(piece: Piece, parts: list[Arrays]) -> list[jax.Array]:
    """The results of a piece, from those of its parts."""
    if piece.num_parts == 1:
        return list(parts[0])
    return put_together(piece.trace, [jnp.stack(values) for values in zip(*parts, strict=True)])


def _check_layers(composed: Composed, subject: Subject, reads: LayerReads, homes: Homes) -> None:
    """A walk has room for two layers of each stack; more must be on the devices anyway."""
    away: dict[tuple[Kind, int], set[int]] = {}
    for kind, _, k, layer in reads.rows:
        if homes.of[kind][k][layer] != "device":
            away.setdefault((kind, k), set()).add(layer)
    most = max(map(len, away.values()), default=0)
    if most <= ROOM:
        return
    what = "the loss in evaluation mode" if subject.call is None else "`fn`"
    raise ValueError(
        f"under plan {str(composed.plan)!r} layers' weights are brought to the devices one after the other, and {what} "
        f"reads those of {most} layers at once, not each in its layer's turn: it looks at weights beside the layers, "
        "calls layers twice, or skips some. Score what one call of the model returns; look at weights themselves in "
        "program.params(state), whose arrays are where the layers are; or take a plan without budget= and offload=: "
        "other = program.replan(...), other.evaluate(other.restore(state), ...)."
    )


def _gathered_score(composed: Composed, subject: Subject, reads: LayerReads) -> Score:
    """One program that is given all rows that it reads."""
    walker, storage, trace = composed.walker, composed.storage, reads.trace
    assert walker is not None
    loss, num = place_loss(trace, storage, composed.plan, composed.mesh, layout_of(composed, trace)), num_results(trace)
    wanted: dict[tuple[Kind, int], dict[int, list[int]]] = {}  # of a kind and a stack: layers, slots of each
    for kind, at, k, layer in reads.rows:
        wanted.setdefault((kind, k), {}).setdefault(layer, []).append(at)
    piece = Piece(slice(None), subject.source.num_rows, trace, 1)

    def run(params: Arrays, frozen: Arrays, rows: SlotRows, model_state: Arrays, batch: PyTree, key: jax.Array) -> Any:
        trees: list[tuple[Kind, Storage, Arrays]] = [
            ("params", storage.params, params), ("frozen", storage.frozen, frozen)
        ]  # fmt: skip
        whole = [
            _stored(shelf, walker.outside(kind), outside, {at: found for (k, at), found in rows.items() if k == kind})
            for kind, shelf, outside in trees
        ]
        outs = loss(*whole, model_state, jax.tree.leaves(batch), key, jnp.int32(0))[:num]
        return combined(subject.trace, [piece], [outs])

    program = Jitted(run, composed.mesh, placed=composed.whole)

    @functools.cache
    def peak() -> int:
        """What a device holds beside weights outside of layers: all that is read of layers, at once."""
        given: dict[tuple[Kind, int], dict[int, Any]] = {}
        for (kind, k), layers in wanted.items():
            structs = dict(zip(walker.slots(kind, k), walker.structs(kind, k), strict=True))
            for layer, places in layers.items():
                for at in places:
                    given.setdefault((kind, at), {})[layer] = structs[at]
        params, frozen, model_state, batch, key = inputs_of(composed, subject.source.batch_shape)
        tally = Tally()
        tally.run(program, params, frozen, given, model_state, batch, key, handed=(given, batch))
        return tally.peak

    def score(state: State, batch: PyTree) -> list[Pair]:
        assert isinstance(state, WalkedState)
        _check_layers(composed, subject, reads, state._held.homes)
        if composed.plan.budget is not None:
            check_room(composed, state._held.homes, peak(), subject.source.num_rows)
        rows: dict[tuple[Kind, int], dict[int, jax.Array]] = {}
        for (kind, k), layers in wanted.items():
            slots = walker.slots(kind, k)
            for layer, (row,) in in_turn([getattr(state._held, kind)[k]], sorted(layers)):
                for at in layers[layer]:
                    rows.setdefault((kind, at), {})[layer] = row[slots.index(at)]
        return program(state._params, state._frozen, rows, state._model_state, batch, state._key)

    return score


def _stored(shelf: Storage, places: tuple[int, ...], outside: Arrays, rows: Mapping[int, Any]) -> Arrays:
    """A stored tree of what is outside and some layers' rows. The rest is zeros, which nobody reads or makes."""
    found: dict[int, jax.Array] = dict(zip(places, outside, strict=True))
    for at, slot in enumerate(shelf.slots):
        if at in rows:
            # A slice of what is put together is taken from what it was put together of.
            some = rows[at]
            like = next(iter(some.values()))
            num = slot.stored_shape[0]
            found[at] = jnp.stack([some[i] if i in some else jnp.zeros_like(like) for i in range(num)])
        elif at not in found:
            found[at] = jnp.zeros(slot.stored_shape, slot.dtype)
    return tuple(found[at] for at in range(len(shelf.slots)))
