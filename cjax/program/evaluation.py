"""Scoring a model: the loss in evaluation mode, or any function of the model, over one batch or many."""

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
from cjax.program.scores import (
    Pair,
    Subject,
    combined,
    joined,
    layout_of,
    may_be_added,
    num_results,
    pieces_of,
    put_together,
    scored_trace,
    value_of,
)
from cjax.program.state import Arrays, State
from cjax.program.walked_scores import walked_score
from cjax.sharding.place.ahead import make_ahead
from cjax.sharding.place.model import place_loss
from cjax.sharding.place.staged import stage_model
from cjax.trace.dims.tables import Limits
from cjax.trace.microbatches.combine import denominator
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.tree import PyTree, leaf_names

Function = Callable[[Any, PyTree], PyTree]
Score = Callable[..., list[jax.Array]]


KEPT = 32  # compiled evaluations of one program; the one that was not used for longest makes room


@dataclass(frozen=True)
class _Scoring:
    """How batches of one shape are scored: what runs it, what its tables can look up, and what is known of the stages
    of a pipeline."""

    subject: Subject
    run: Callable[[State, PyTree], list[Pair]]
    program: Any  # that runs it, jitted or compiled; None where there are several
    limits: dict[int, tuple[Limits, ...]]
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
            if tree is not None and not may_be_added(tree, scoring.subject.trace):
                raise ValueError(
                    f"evaluate got a batch of {scoring.subject.source.num_rows} rows, whose loss or aux is made "
                    "otherwise than those of the batches before: give batches of as many rows each, or return "
                    "cjax.Mean(total, weight)."
                )
            outs = scoring.run(state, placed)
            outs = [([total], None) if weight is None else (total, weight) for total, weight in outs]
            sums = outs if not sums else [joined(a, b) for a, b in zip(sums, outs, strict=True)]
            tree = scoring.subject.trace
        if tree is None:
            raise ValueError("evaluate got no batch; give at least one. (An iterator that was read before is empty.)")
        ratios = {i + bool(tree.num_loss): ratio for i, ratio in tree.aux_ratios}
        for i, ratio in (ratios | ({} if tree.ratio is None else {0: tree.ratio})).items():
            sums[i] = (sums[i][0], denominator(ratio, sums[i][1]))
        values = [value_of(total, weight) for total, weight in sums]
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
        program = self._compile(self._composed.batch_shape, None).program
        if isinstance(program, jax.stages.Compiled):
            return program
        return compile_lowered(self._lower(self._composed.batch_shape, program), list(self._composed.mesh.devices.flat))

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
        limits = table_limits(subject.trace)
        if self._composed.walker is not None:
            return _Scoring(subject, walked_score(self._composed, subject), None, limits, asked)
        if asked.asks:
            program = asked.compile(lambda lockstep: self._lower(shape, self._jitted(subject, lockstep)))
        else:
            program = self._jitted(subject, asked.needed)

        def run(state: State, batch: PyTree) -> list[Pair]:
            return program(state._params, state._frozen, state._model_state, batch, state._key)

        return _Scoring(subject, run, program, limits, asked)

    def _subject(self, shape: PyTree, function: Function | None) -> Subject:
        call = None if function is None else lambda model, batch, key, train: (None, function(model, batch))
        source = TraceSource(self._composed.capture, shape)
        return Subject(source, call, scored_trace(self._composed, source, call, 1))

    def _jitted(self, subject: Subject, lockstep: bool) -> Any:
        composed, trace, shape = self._composed, subject.trace, subject.source.batch_shape
        in_parts = composed.line is not None and bool(composed.line.stacks_of(trace))
        # Of a pipeline, whole micro-batches go through together.
        pieces = pieces_of(composed, subject, in_parts)
        scores = [self._scored(piece.trace, piece.num_parts, lockstep) for piece in pieces]

        def run(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> list[Pair]:
            outs = [
                score(params, frozen, model_state, piece.of(batch), key)
                for piece, score in zip(pieces, scores, strict=True)
            ]
            return combined(trace, pieces, outs)

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

    def _scored(self, trace: Trace, num_parts: int, lockstep: bool) -> Score:
        """The results of a whole batch, as the trace of one of its micro-batches gives them."""
        composed = self._composed
        layout, num = layout_of(composed, trace), num_results(trace)
        ahead = make_ahead(trace, composed.storage, composed.plan, composed.mesh, is_graded=False)
        stacks = composed.line.stacks_of(trace) if composed.line is not None else None
        if composed.line is None or stacks is None:
            loss = place_loss(trace, composed.storage, composed.plan, composed.mesh, layout, is_graded=False)

            def whole(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> list[Any]:
                return loss(ahead(params), frozen, model_state, jax.tree.leaves(batch), key, jnp.int32(0))[:num]

            return whole
        staged = stage_model(trace, stacks, composed.storage, composed.plan, composed.mesh, layout)
        schedule = forward_only(composed.line.schedule.route, num_parts)
        forward = Forward(staged.stages, schedule, composed.line.partition, PIPE)
        through = forwarded(staged, forward, num_parts, composed.mesh, lockstep)
        return lambda params, *inputs: put_together(trace, through(ahead(params), *inputs))


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
