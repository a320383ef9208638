"""What attentions over split positions move, as `cjax.sharding.attention` has them."""

import math
from collections.abc import Iterator

import numpy as np

from cjax.mesh import SEQUENCE, TENSOR
from cjax.plan import Sequence as SequencePlan
from cjax.planner.reading.placed import PlacedTrace
from cjax.planner.work import Kind, RingWork
from cjax.sharding.attention.ring import MARGIN
from cjax.sharding.storage.storage import filled_up
from cjax.trace.attention.bounds import bounds
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.dims.find import Scope

# A collective: its kind, what goes in on a device, whether in the forward pass, whether in float32 in any case.
Passed = tuple[Kind, float, bool, bool]

MOST_BLOCKS = 32  # of queries and of keys, by which a mask is looked at


def over_positions(attention: Attention, sequence: SequencePlan, placed: PlacedTrace, scope: Scope) -> Iterator[Passed]:
    """The collectives of an attention whose positions are split over the sequence's axis."""
    held = [placed.local(node.var, scope) for node in (attention.query, attention.key, attention.value, attention.out)]
    if sequence.mode == "ring":
        return _ring(attention, held, placed.layout.axis_sizes[SEQUENCE])
    return _exchanged(attention, held, placed.layout.axis_sizes[SEQUENCE], placed, scope)


def _ring(attention: Attention, held: list[float], size: int) -> Iterator[Passed]:
    """Keys and values go round once in each pass, their gradients once and home in the backward pass."""
    query, key, value, out = held
    yield "collective-permute", (size - 1) * (key + value), True, False
    yield "collective-permute", (size - 1) * (key + value), False, False
    yield "collective-permute", size * (key + value), False, False
    if _is_zigzag(attention, size):
        # Of two devices each keeps one of its halves where it is.
        query, key, value, out = (part * (0.5 if size == 2 else 1.0) for part in held)
        rows = out / max(1, _features(attention.out))
        yield "collective-permute", query + key + value + out, True, False
        yield "collective-permute", query + key + value + out, False, False
        yield "collective-permute", rows, False, True


def ring_of(attention: Attention, size: int) -> RingWork:
    """How a ring of so many devices computes scores: blocks that a mask leaves empty are left out.

    With an early and a late chunk, all devices have as much to do in each turn. Otherwise they wait for the fullest.
    """
    if _is_zigzag(attention, size):
        return RingWork(float(_filled(attention, 2 * size).mean()), 2)
    found = _filled(attention, size)
    turns = (np.arange(len(found)) + np.arange(len(found))[:, None]) % len(found)
    return RingWork(float(np.take_along_axis(found, turns.T, axis=1).any(axis=0).mean()), 1)


def _is_zigzag(attention: Attention, size: int) -> bool:
    """Whether each device takes an early and a late chunk, as a mask leaves late keys out for early queries."""
    lengths = [attention.sizes[attention.label(role)] for role in ("query", "key")]
    even = all(filled_up(length, size) % (2 * size) == 0 for length in lengths)
    return even and not _filled(attention, size).all()


def _filled(attention: Attention, blocks: int) -> np.ndarray:
    """Which blocks of the scores, [queries, keys], a mask leaves anything of."""
    # What is asked of each pair of blocks takes long for thousands of them, and larger blocks tell the same of a mask
    # that leaves out a part of the keys at all.
    few = math.gcd(blocks, MOST_BLOCKS) if blocks > MOST_BLOCKS else blocks
    return bounds(attention, few, few, []) >= -MARGIN


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
