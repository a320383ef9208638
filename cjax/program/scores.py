"""Numbers of batches: which trace gives them, and how those of parts and of several batches are put together."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cjax.program.composed import Composed
from cjax.sharding.layout.layout import Layout, make_layout
from cjax.trace.examples.verdict import Lifted
from cjax.trace.microbatches.combine import averages, denominator, lift, loss_total, place_of_aux, with_ratios
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.tree import PyTree, kind_of

Pair = tuple[Any, Any]  # total, weight; of an array a list of it, and None


@dataclass(frozen=True)
class Subject:
    """What is scored: batches of one shape, what is called in the place of the loss, and the trace of a whole one."""

    source: TraceSource
    call: Any
    trace: Trace


@dataclass(frozen=True)
class Piece:
    """Some rows of a batch, cut into parts that are scored together, and the trace of one of them."""

    rows: slice
    num_rows: int
    trace: Trace
    num_parts: int

    def of(self, batch: PyTree) -> PyTree:
        """These rows of a batch."""
        return jax.tree.map(lambda x: x[self.rows] if x.ndim else x, batch)


def pieces_of(composed: Composed, subject: Subject, in_parts: bool) -> list[Piece]:
    """A batch in pieces: all of it, or if it may go `in_parts`, whole micro-batches together, and behind them the rows
    that are left over."""
    rows, num_parts = subject.source.num_rows, composed.plan.microbatches
    if not (in_parts and 1 < num_parts <= rows and averages(subject.trace)):
        return [Piece(slice(None), rows, subject.trace, 1)]
    whole, pieces = rows - rows % num_parts, []
    for some in (slice(0, whole), slice(whole, rows)):
        num_rows = some.stop - some.start
        if num_rows:
            source, num = subject.source.on_rows(num_rows), num_parts if some.start == 0 else 1
            pieces.append(Piece(some, num_rows, scored_trace(composed, source, subject.call, num), num))
    if not all(may_be_added(piece.trace, subject.trace) for piece in pieces):
        return [Piece(slice(None), rows, subject.trace, 1)]
    return pieces


def layout_of(composed: Composed, trace: Trace) -> Layout:
    """How a trace of a batch, or of a part of one, is laid out."""
    sizes = dict(composed.mesh.shape)
    layout, rows = composed.storage.layout, composed.trace.batch_class
    shards = math.prod(sizes[axis] for axis in layout.axes_of.get(rows, ())) if rows is not None else 1
    # A ragged last batch: each device scores all of it, which is exact and costs one batch.
    ragged = any(trace.leaves[i].shape[:1] and trace.leaves[i].shape[0] % shards for i in trace.leaves_of("batch"))
    return make_layout(trace, sizes, composed.plan.rules, not ragged, composed.plan.sequence)


def num_results(trace: Trace) -> int:
    """How many results a trace has, the new model state aside."""
    return len(trace.closed.jaxpr.outvars) - len(trace.leaves_of("model_state"))


def scored_trace(composed: Composed, source: TraceSource, call: Any, num_parts: int) -> Trace:
    """The loss in evaluation mode, or what is called in its place, on one of `num_parts` parts of a batch, read as the
    program's own trace was."""
    like = composed.trace
    trace = source.read(num_parts, train=False, call=call, forms=like.forms, pairs=like.pairs, at_once=like.at_once)
    if trace.num_loss:
        # A ratio (a masked mean, say) adds up exactly as total and weight; what adds up in no way counts by rows.
        with contextlib.suppress(ValueError):
            found = with_ratios(lift(trace, lambda rows: source.flat(rows, trace, num_parts, train=False), 1))
            return found if trace.num_loss == 1 else dataclasses.replace(found, results=())
    return trace


def may_be_added(one: Trace, other: Trace) -> bool:
    """Whether pairs of totals and weights of two traces mean the same."""
    forms = [(t.num_loss, t.ratio is None, t.aux_is_mean, [i for i, _ in t.aux_ratios]) for t in (one, other)]
    return forms[0] == forms[1]


def _ratios(trace: Trace) -> Iterator[tuple[int, Lifted]]:
    """Places of totals among the results, of what was one number."""
    if trace.ratio is not None:
        yield 0, trace.ratio
    for i, ratio in trace.aux_ratios:
        yield place_of_aux(trace, i), ratio


def _total(ratio: Lifted | None, total: jax.Array, weight: jax.Array) -> jax.Array:
    """What is added up of rows whose weight this is. Without any weight they count nothing, whatever their author's
    guard makes of that."""
    made = loss_total(ratio, total, weight)
    return made if ratio is None or ratio.total is not None else jnp.where(weight == 0, 0, made)


def put_together(trace: Trace, outs: list[jax.Array]) -> list[jax.Array]:
    """Results of a batch from those of its micro-batches, which are stacked: weighted totals and weights are added,
    numbers averaged, and rows, of which each has every m-th, put in order."""
    weighted = [trace.num_loss == 2] * trace.num_loss
    for is_mean in trace.aux_is_mean:
        weighted += [True, True] if is_mean else [False]
    outs = list(outs)
    for at, ratio in _ratios(trace):
        if ratio.total is None:  # such a total is the ratio itself: of the whole batch that of the sums
            totals, weights = outs[at], outs[at + 1]
            totals = jax.vmap(functools.partial(_total, ratio))(totals, weights)
            outs[at] = totals / denominator(ratio, weights.sum(0))
    found = []
    for out, adds in zip(outs, weighted, strict=True):
        if out.ndim > 1 and not adds:
            rows = jnp.moveaxis(out, 0, 1)
            found.append(rows.reshape(-1, *rows.shape[2:]))
        else:
            found.append(out.sum(0) if adds else out.mean(0))
    return found


def combined(trace: Trace, pieces: Sequence[Piece], outs: Sequence[list[jax.Array]]) -> list[Pair]:
    """Pairs of total and weight of a whole batch, whose trace this is, from the results of its pieces."""
    found: list[Pair] = []
    for piece, some in zip(pieces, outs, strict=True):
        pairs = weighed(trace, some, piece.num_rows)
        found = [joined(a, b) for a, b in zip(found, pairs, strict=True)] if found else pairs
    return [(jnp.concatenate(total) if weight is None else total, weight) for total, weight in found]


def weighed(trace: Trace, outs: list[jax.Array], rows: int) -> list[Pair]:
    """Pairs of total and weight: a plain scalar counts as many times as the batch has rows, an array not at all."""
    pairs: list[Pair] = []
    results = iter(outs)
    if trace.num_loss == 2:
        total, weight = next(results), next(results)
        pairs.append((_total(trace.ratio, total, weight), weight))
    elif trace.num_loss == 1:
        pairs.append((next(results) * rows, rows))
    for i, is_mean in enumerate(trace.aux_is_mean):
        value = next(results)
        if is_mean:
            weight = next(results)
            pairs.append((_total(dict(trace.aux_ratios).get(i), value, weight), weight))
        else:
            pairs.append((value * rows, rows) if value.ndim == 0 else ([value], None))
    return pairs


def joined(a: Pair, b: Pair) -> Pair:
    """Of two batches, or of two pieces of one, those of both."""
    return (a[0] + b[0], None if a[1] is None else a[1] + b[1])


def value_of(total: Any, weight: Any) -> Any:
    """What a pair stands for: a mean, or an array."""
    if weight is None:
        return total[0] if len(total) == 1 else jnp.concatenate(total)
    return total / weight


def is_one(batch: Any, shape: PyTree) -> bool:
    """Whether this is a batch, rather than several; one for a function may be of another structure than `shape`."""
    if isinstance(batch, Iterator):
        return False
    if batch is None:
        raise TypeError("evaluate takes a batch or an iterable of batches, not None.")
    if isinstance(batch, Mapping) or hasattr(batch, "shape"):
        return True
    if not jax.tree_util.all_leaves([batch]):
        return jax.tree.structure(batch) == jax.tree.structure(shape)
    if not isinstance(batch, Iterable):
        raise TypeError(f"evaluate takes a batch or an iterable of batches, not {kind_of(batch)}.")
    return False
