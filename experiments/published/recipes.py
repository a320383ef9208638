"""Experts' recipes beside the plans of their kind that the planner holds fastest."""

import itertools
from collections.abc import Iterator

import numpy as np

from cjax.planner.costs.calibration import Calibration
from cjax.planner.costs.duration import durations
from cjax.planner.costs.transformer import Decoder, Sharing, split_of_decoder, work_of_decoder
from cjax.planner.table import SCHEDULES, PlanTable
from published.fit import Fit, Problem
from published.rows import Run

ROOM = 76 * 2**30  # bytes of a card with 80 GB that a program gets
MOST_MICRO = 8


def behind(problem: Problem, found: Fit, run: Run, is_same: bool = True) -> tuple[float, str]:
    """How much longer the recipe of a run takes, by prediction, than the fastest of its kind that fits; and that one.

    Of its kind are all sizes of its words: tensor, pipeline and context parallelism where it has them (of them all
    unless `is_same`), chunks and micro-batches, with its software, ZeRO stage, batch and devices, nothing recomputed.
    """
    calibration = problem.run_calibration(found.values, run)
    mine, room = _times(run, calibration, run.spread, run.table)[0], max(ROOM, _memory(run, run.spread, run.table)[0])
    best, name = mine, "the recipe"
    for spread, table in _others(run):
        if is_same and (spread.tensor > 1, spread.context > 1) != (run.spread.tensor > 1, run.spread.context > 1):
            continue
        fits = _memory(run, spread, table) <= room
        if is_same:
            fits &= (table.pipeline > 1) == (run.plan.pipeline.size > 1)
        times = np.where(fits, _times(run, calibration, spread, table), np.inf)
        at = int(np.argmin(times))
        if times[at] < best:
            best, name = times[at], _name(spread, table, at)
    return float(mine / best - 1), name


def _times(run: Run, calibration: Calibration, spread: Sharing, table: PlanTable) -> np.ndarray:
    work = work_of_decoder(run.decoder, run.batch, run.positions, spread)
    split = split_of_decoder(run.decoder, work, spread)
    return durations(work, split, table, run.hardware, calibration).total


def _others(run: Run) -> Iterator[tuple[Sharing, PlanTable]]:
    decoder = run.decoder
    own = PlanTable.of([run.plan])
    for tensor, context in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        if run.gpus % (tensor * context) or (decoder.kv_heads or decoder.heads) % tensor:
            continue
        rows = list(_rows(run, decoder, run.gpus // (tensor * context), own))
        if rows:
            yield Sharing(tensor, tensor > 1, context), PlanTable(*np.array(rows, np.int64).T)


def _rows(run: Run, decoder: Decoder, devices: int, own: PlanTable) -> Iterator[tuple[int, ...]]:
    for stages in (1, 2, 4, 8, 16):
        layers = decoder.layers + (2 if decoder.layers % 2 == 0 and decoder.layers % stages else 0)
        if devices % stages or layers % stages:
            continue
        data = devices // stages
        for micro, chunks in itertools.product((1, 2, 4, MOST_MICRO), range(1, layers // stages + 1)):
            if run.batch % (data * micro) or layers // stages % chunks or (stages == 1 and chunks > 1):
                continue
            microbatches = run.batch // (data * micro)
            if chunks > 1 and microbatches % stages:
                continue
            schedule = SCHEDULES.index("interleaved" if chunks > 1 else "1f1b")
            zero = int(own.zero[0]) if data > 1 else 0
            yield data, stages, schedule, chunks, microbatches, zero, data, 0, int(own.precision[0]), 1


def _memory(run: Run, spread: Sharing, table: PlanTable) -> np.ndarray:
    """Bytes of Megatron: weights in 2, gradients in 4, state in 12 that the optimizer's devices share; activations."""
    decoder = run.decoder
    layers = np.ceil(decoder.layers / table.pipeline)
    tables = np.where((table.pipeline > 1) | decoder.is_tied, 1, 2)
    held = (layers * decoder.layer_parameters + tables * decoder.vocab * decoder.hidden) / spread.tensor
    share = table.data * spread.context
    state = np.where(table.zero == 3, 18 * held / share, held * np.where(table.zero > 0, 6 + 12 / share, 18))
    tokens = run.batch * run.positions / (table.data * table.microbatches) / spread.context
    width = 10 * decoder.hidden + (6 if decoder.is_gated else 4) * decoder.inner
    flying = np.where(table.chunks > 1, table.pipeline + (table.pipeline - 1) / table.chunks, table.pipeline)
    flying = np.minimum(flying, table.microbatches)
    logits = tokens * decoder.vocab / spread.tensor * 6
    return state + tokens * width / spread.tensor * layers * flying + logits + 2 * 2**30


def _name(spread: Sharing, table: PlanTable, at: int) -> str:
    micro = f"microbatches={table.microbatches[at]}"
    return (
        f"data={table.data[at]} tensor={spread.tensor} context={spread.context} "
        f"pipeline={SCHEDULES[table.schedule[at]]}:{table.pipeline[at]}/{table.chunks[at]} {micro}"
    )
