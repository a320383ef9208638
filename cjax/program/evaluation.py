"""Scoring a model: the loss in evaluation mode, or any function of the model, over one batch or many."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cjax.gradients import forwarded
from cjax.mesh import PIPE, compile_lowered, compiler_options
from cjax.pipeline.forward import Forward
from cjax.pipeline.schedule import forward_only
from cjax.program.batches import (
    check_indices,
    check_on_devices,
    check_tree,
    global_shape,
    join_processes,
    table_limits,
)
from cjax.program.composed import Composed, batch_shardings
from cjax.program.lockstep import Lockstep
from cjax.program.same import function_key
from cjax.program.state import Arrays, State
from cjax.sharding.layout.layout import make_layout
from cjax.sharding.place.model import place_loss
from cjax.sharding.place.staged import stage_model
from cjax.trace.dims.tables import Limits
from cjax.trace.microbatches.combine import averages, denominator, lift, loss_total
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.tree import PyTree, leaf_names

Function = Callable[[Any, PyTree], PyTree]
Score = Callable[..., list[jax.Array]]


KEPT = 32  # compiled evaluations of one program; the one that was not used for longest makes room


@dataclass(frozen=True)
class _Subject:
    """What is scored: batches of one shape, what is called in the place of the loss, and the trace of a whole one."""

    source: TraceSource
    call: Any
    trace: Trace


@dataclass(frozen=True)
class _Scoring:
    """How batches of one shape are scored: what runs it, what its tables can look up, and what is known of the stages
    of a pipeline."""

    subject: _Subject
    run: Any
    limits: dict[int, Limits]
    lockstep: Lockstep


class Evaluator:
    """Compiled evaluations of one program, by the shapes of the batch and the function (`cjax.program.same`)."""

    def __init__(self, composed: Composed, lockstep: Lockstep) -> None:
        self._composed, self._lockstep = composed, lockstep
        self._compiled: dict[Any, _Scoring] = {}

    def __call__(self, state: State, batches: Iterable[PyTree], function: Function | None) -> PyTree:
        """The exact weighted mean over `batches`; arrays that `function` returns are joined along their rows."""
        sums: list[Any] = []
        tree: Any = None
        for batch in batches:
            if function is None:
                check_tree(batch, self._composed.batch_shape)
            shape = global_shape(batch)
            _check_rows(shape, function)
            scoring = self._compile(shape, function)
            check_indices(batch, scoring.limits)
            placed = join_processes(batch, batch_shardings(self._composed.mesh, shape))
            check_on_devices(batch, placed, scoring.limits, self._composed.mesh)
            outs = scoring.run(state._params, state._frozen, state._model_state, placed, state._key)
            outs = [([total], None) if weight is None else (total, weight) for total, weight in outs]
            sums = outs if not sums else [_join(a, b) for a, b in zip(sums, outs, strict=True)]
            tree = scoring.subject.trace
        if tree is None:
            raise ValueError("evaluate got no batch; give at least one. (An iterator that was read before is empty.)")
        if tree.ratio is not None:
            sums[0] = (sums[0][0], denominator(tree.ratio, sums[0][1]))
        values = [_value(total, weight) for total, weight in sums]
        aux = jax.tree.unflatten(tree.aux_tree, values[1:] if tree.num_loss else values)
        if function is not None:
            return aux
        return {"loss": values[0], "aux": aux} if tree.aux_is_mean else {"loss": values[0]}

    def lower(self) -> jax.stages.Lowered:
        """The loss in evaluation mode on the batch that the program was made for, lowered."""
        shape = self._composed.batch_shape
        scoring = self._compile(shape, None)
        return self._lower(shape, self._jitted(scoring.subject, scoring.lockstep.needed))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the same."""
        return self._compile(self._composed.batch_shape, None).lockstep.notes

    def compiled(self) -> jax.stages.Compiled:
        """The same, compiled."""
        run = self._compile(self._composed.batch_shape, None).run
        if isinstance(run, jax.stages.Compiled):
            return run
        return compile_lowered(self._lower(self._composed.batch_shape, run), list(self._composed.mesh.devices.flat))

    def _lower(self, batch_shape: PyTree, run: Any) -> jax.stages.Lowered:
        composed, shape = self._composed, self._composed.state_shape
        return run.lower(shape._params, shape._frozen, shape._model_state, composed.with_batch(batch_shape), shape._key)

    def _compile(self, shape: PyTree, function: Function | None) -> _Scoring:
        leaves, treedef = jax.tree.flatten(shape)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        key = (None if function is None else function_key(function), treedef, shapes)
        found = self._compiled.pop(key, None) or self._make(shape, function)
        self._compiled[key] = found  # the last used is last
        while len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return found

    def _make(self, shape: PyTree, function: Function | None) -> _Scoring:
        asked, subject = Lockstep(self._composed, self._lockstep), self._subject(shape, function)
        if asked.asks:
            run = asked.compile(lambda lockstep: self._lower(shape, self._jitted(subject, lockstep)))
        else:
            run = self._jitted(subject, asked.needed)
        return _Scoring(subject, run, table_limits(subject.trace), asked)

    def _subject(self, shape: PyTree, function: Function | None) -> _Subject:
        call = None if function is None else lambda model, batch, key, train: (None, function(model, batch))
        source = TraceSource(self._composed.capture, shape)
        return _Subject(source, call, _scored_trace(self._composed, source, call, 1))

    def _jitted(self, subject: _Subject, lockstep: bool) -> Any:
        composed, trace, shape = self._composed, subject.trace, subject.source.batch_shape
        rows = subject.source.num_rows
        pieces = [(slice(None), rows, self._scored(subject.source, trace, 1, lockstep))]
        num_parts = composed.plan.microbatches
        if composed.line is not None and composed.line.stacks_of(trace) and 1 < num_parts <= rows and averages(trace):
            # Whole micro-batches through the pipeline together, the rows that are left over behind them.
            whole = rows - rows % num_parts
            pieces = []
            for some in (slice(0, whole), slice(whole, rows)):
                num_rows = some.stop - some.start
                if num_rows:
                    piece, num = subject.source.on_rows(num_rows), num_parts if some.start == 0 else 1
                    of_piece = _scored_trace(composed, piece, subject.call, num)
                    pieces.append((some, num_rows, self._scored(piece, of_piece, num, lockstep)))

        def run(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> list[Any]:
            found: list[Any] = []
            for some, num_rows, score in pieces:
                mine = jax.tree.map(lambda x, some=some: x[some] if x.ndim else x, batch)
                outs = _weighed(trace, score(params, frozen, model_state, mine, key), num_rows)
                found = [_join(a, b) for a, b in zip(found, outs, strict=True)] if found else outs
            return [(jnp.concatenate(total) if weight is None else total, weight) for total, weight in found]

        shardings = composed.state_shardings
        return jax.jit(
            run,
            in_shardings=(
                shardings._params,
                shardings._frozen,
                shardings._model_state,
                batch_shardings(composed.mesh, shape),
                composed.whole,
            ),
            out_shardings=composed.whole,
            compiler_options=compiler_options(composed.mesh),
        )

    def _scored(self, source: TraceSource, trace: Trace, num_parts: int, lockstep: bool) -> Score:
        """The results of a whole batch, as the trace of one of its micro-batches gives them."""
        composed = self._composed
        sizes = dict(composed.mesh.shape)
        layout, rows = composed.storage.layout, composed.trace.batch_class
        shards = math.prod(sizes[axis] for axis in layout.axes_of.get(rows, ())) if rows is not None else 1
        # A ragged last batch: each device scores all of it, which is exact and costs one batch.
        ragged = any(trace.leaves[i].shape[:1] and trace.leaves[i].shape[0] % shards for i in trace.leaves_of("batch"))
        layout = make_layout(trace, sizes, composed.plan.rules, not ragged, composed.plan.sequence)
        num_results = len(trace.closed.jaxpr.outvars) - len(trace.leaves_of("model_state"))
        stacks = composed.line.stacks_of(trace) if composed.line is not None else None
        if composed.line is None or stacks is None:
            loss = place_loss(trace, composed.storage, composed.plan, composed.mesh, layout)

            def whole(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> list[Any]:
                return loss(params, frozen, model_state, jax.tree.leaves(batch), key, jnp.int32(0))[:num_results]

            return whole
        staged = stage_model(trace, stacks, composed.storage, composed.plan, composed.mesh, layout)
        schedule = forward_only(composed.line.schedule.route, num_parts)
        forward = Forward(staged.stages, schedule, composed.line.partition, PIPE)
        through = forwarded(staged, forward, num_parts, composed.mesh, lockstep)
        return lambda *inputs: _put_together(trace, through(*inputs))


def _scored_trace(composed: Composed, source: TraceSource, call: Any, num_parts: int) -> Trace:
    """The loss in evaluation mode, or what is called in its place, on one of `num_parts` parts of a batch, read as the
    program's own trace was."""
    like = composed.trace
    trace = source.read(num_parts, train=False, call=call, forms=like.forms, pairs=like.pairs, at_once=like.at_once)
    if trace.num_loss == 1:
        # A ratio (a masked mean, say) adds up exactly as total and weight; what adds up in no way counts by rows.
        with contextlib.suppress(ValueError):
            return lift(trace, lambda rows: source.flat(rows, trace, num_parts, train=False), 1)
    return trace


def _check_rows(shape: PyTree, function: Function | None) -> None:
    rows = dict.fromkeys(leaf.shape[0] for leaf in jax.tree.leaves(shape) if leaf.shape)
    if 0 in rows:
        raise ValueError("evaluate got a batch without rows, which has no mean; leave it out.")
    if function is None and len(rows) > 1:
        names = zip(leaf_names(shape), jax.tree.leaves(shape), strict=True)
        counts = ", ".join(f"{name} {leaf.shape[0]}" for name, leaf in names if leaf.shape)
        raise ValueError(
            f"the first dim of every leaf of a batch counts its rows, and these differ: {counts}. Repeat what all "
            "rows share for each of them, or let the loss close over it."
        )


def _put_together(trace: Trace, outs: list[jax.Array]) -> list[jax.Array]:
    """Results of a batch from those of its micro-batches, which are stacked: weighted totals and weights are added,
    numbers averaged, and rows, of which each has every m-th, put in order."""
    weighted = [trace.num_loss == 2] * trace.num_loss
    for is_mean in trace.aux_is_mean:
        weighted += [True, True] if is_mean else [False]
    if trace.num_loss == 2 and trace.ratio is not None and trace.ratio.total is None:
        # Such a total is the ratio itself: of the whole batch that of the sums.
        totals, weights = outs[0], outs[1]
        whole = denominator(trace.ratio, weights.sum(0))
        outs = [(totals * jax.vmap(functools.partial(denominator, trace.ratio))(weights) / whole), *outs[1:]]
    found = []
    for out, adds in zip(outs, weighted, strict=True):
        if out.ndim > 1 and not adds:
            rows = jnp.moveaxis(out, 0, 1)
            found.append(rows.reshape(-1, *rows.shape[2:]))
        else:
            found.append(out.sum(0) if adds else out.mean(0))
    return found


def _weighed(trace: Trace, outs: list[jax.Array], rows: int) -> list[tuple[Any, Any]]:
    """Pairs of total and weight: a plain scalar counts as many times as the batch has rows, an array not at all."""
    pairs: list[tuple[Any, Any]] = []
    results = iter(outs)
    if trace.num_loss == 2:
        total, weight = next(results), next(results)
        pairs.append((loss_total(trace.ratio, total, weight), weight))
    elif trace.num_loss == 1:
        pairs.append((next(results) * rows, rows))
    for is_mean in trace.aux_is_mean:
        value = next(results)
        if is_mean:
            pairs.append((value, next(results)))
        else:
            pairs.append((value * rows, rows) if value.ndim == 0 else ([value], None))
    return pairs


def _join(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    return (a[0] + b[0], None if a[1] is None else a[1] + b[1])


def _value(total: Any, weight: Any) -> Any:
    if weight is None:
        return total[0] if len(total) == 1 else jnp.concatenate(total)
    return total / weight
