"""What attentions over split positions move, as `cjax.sharding.attention` has them."""

import math
from collections.abc import Iterator

import numpy as np

from cjax.jax_compat.core import Var
from cjax.mesh import SEQUENCE, TENSOR
from cjax.plan import Sequence as SequencePlan
from cjax.planner.reading.placed import PlacedTrace
from cjax.planner.work import Kind, RingWork
from cjax.sharding.place.order import Order, blocks_left, in_zigzag
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.dims.find import Scope

# A collective: its kind, what goes in on a device, whether in the forward pass, whether in float32 in any case.
Passed = tuple[Kind, float, bool, bool]


def over_positions(
    attention: Attention, sequence: SequencePlan, placed: PlacedTrace, scope: Scope, order: Order | None
) -> Iterator[Passed]:
    """The collectives of an attention whose positions are split over the sequence's axis; `order` is of its values."""
    held = [placed.local(node.var, scope) for node in (attention.query, attention.key, attention.value, attention.out)]
    if sequence.mode == "ring":
        size = placed.layout.axis_sizes[SEQUENCE]
        in_order = order is not None and order.asked_of(attention, size)[1] is not None
        return _ring(attention, held, size, in_order)
    return _exchanged(attention, held, placed.layout.axis_sizes[SEQUENCE], placed, scope)


def turned(order: Order, size: int) -> Iterator[tuple[Kind, float, bool, bool, int]]:
    """What is put in a ring's order, or back: the same, and how often."""
    for times, each, scope in order.turns:
        passes = [True, False] if each.has_gradient else [True]
        for forward in passes:
            moved = order.held(each.atom, scope) * ((each.before is not None) + (each.after is not None))
            yield "collective-permute", moved * _share(size), forward, not each.has_gradient, times


def _share(size: int) -> float:
    """Of two devices each keeps one of its halves where it is."""
    return 0.5 if size == 2 else 1.0


def _ring(attention: Attention, held: list[float], size: int, in_order: bool) -> Iterator[Passed]:
    """Keys and values go round once in each pass, their gradients once and home in the backward pass."""
    query, key, value, out = held
    yield "collective-permute", (size - 1) * (key + value), True, False
    yield "collective-permute", (size - 1) * (key + value), False, False
    yield "collective-permute", size * (key + value), False, False
    if in_zigzag(attention, size) and not in_order:
        query, key, value, out = (part * _share(size) for part in held)
        rows = out / max(1, _features(attention.out))
        yield "collective-permute", query + key + value + out, True, False
        yield "collective-permute", query + key + value + out, False, False
        yield "collective-permute", rows, False, True


def held_by_leaf(attention: Attention, var: Var, placed: PlacedTrace, scope: Scope) -> float:
    """How much a device sends of one of a ring's biases or masks to put it in the ring's order, in numbers of four
    bytes: 0 where it is none, has no queries' positions, or the ring has no order of its own."""
    size = placed.layout.axis_sizes[SEQUENCE]
    leaves = [node for node in attention.leaves if node.var is var]
    if not leaves or "query" not in attention.dims_of(var) or not in_zigzag(attention, size):
        return 0.0
    return placed.local(var, scope) * _share(size) * var.aval.dtype.itemsize / 4


def ring_of(attention: Attention, size: int) -> RingWork:
    """How a ring of so many devices computes scores: blocks that a mask leaves empty are left out.

    With an early and a late chunk, all devices have as much to do in each turn. Otherwise they wait for the fullest.
    """
    if in_zigzag(attention, size):
        return RingWork(float(blocks_left(attention, 2 * size).mean()), 2)
    found = blocks_left(attention, size)
    turns = (np.arange(len(found)) + np.arange(len(found))[:, None]) % len(found)
    return RingWork(float(np.take_along_axis(found, turns.T, axis=1).any(axis=0).mean()), 1)


def _features(node: Node) -> int:
    shape = node.var.aval.shape
    return math.prod(size for label, size in zip(node.labels, shape, strict=True) if not label)


def _exchanged(
    attention: Attention, held: list[float], size: int, placed: PlacedTrace, scope: Scope
) -> Iterator[Passed]:
    """Queries, keys and values to all positions of some heads, the result back; gradients the other way. Where keys
    have fewer heads than there are devices, those that share one get a copy each."""
    query, key, value, out = held
    heads = _heads(attention, placed, scope)
    copies = size // math.gcd(heads, size)
    for forward in (True, False):
        yield "all-to-all", query + copies * (key + value) + out, forward, False


def of_few_heads(
    attention: Attention, placed: PlacedTrace, scope: Scope
) -> Iterator[tuple[Kind, float, bool, bool | None]]:
    """What a tensor axis moves of an attention whose keys have fewer heads than it has devices: a kind, the numbers
    that a device receives, whether in the forward pass, and `is_kept` of its move.

    A head of keys and its group of queries share the axis, which no spec can say: scores that are saved are gathered
    whole, or where they are not, queries and keys, and so is the gradient of queries. Devices with the same head add up
    what they have of its gradient, and all get those of all.
    """
    size = placed.layout.axis_sizes.get(TENSOR, 1)
    if placed.layout.grid is not None or size == 1:
        return
    key, classes = attention.key, placed.trace.dims.of(attention.key.var, scope)
    few = [
        n
        for label, c, n in zip(key.labels, classes, key.var.aval.shape, strict=True)
        if label and attention.roles[label[0]] == "heads" and TENSOR in placed.layout.axes_of.get(c, ())
    ]
    heads = max(few, default=1)
    if not 1 < heads < size or size % heads:
        return
    scores, queries, keys = (placed.local(node.var, scope) for node in (attention.scores, attention.query, key))
    ready = queries * (size - 1) / size
    yield "all-gather", scores * (size - 1) / size, True, True
    yield "all-gather", ready, True, False
    yield "all-gather", keys * (heads - 1) / heads, True, False
    yield "all-gather", ready, False, None
    yield "all-reduce", 2 * keys / heads * (1 - heads / size), False, None
    yield "all-gather", keys * (heads - 1) / heads, False, None


def _heads(attention: Attention, placed: PlacedTrace, scope: Scope) -> int:
    """The heads of keys on a device, as far as an exchange splits them: those of the largest dim."""
    key = attention.key
    entries = placed.entries(key.var, scope)
    found = [
        math.ceil(n / placed.size(axes))
        for label, axes, n in zip(key.labels, entries, key.var.aval.shape, strict=True)
        if label and attention.roles[label[0]] == "heads"
    ]
    return max(found, default=1)
