"""Bytes that a device receives in a step, for a table of plans: by what they are for, and along which mesh axes.

What is predicted is what cjax does, as `cjax.audit` counts it in the compiled step, not what a formula would like:

- The tensor and sequence words' own collectives (`Split.moves`), once a micro-batch. Under remat=block those of the
  forward pass that a layer's derivative needs come again.
- Gradients, summed over data parallelism together with the axes that tensor and sequence words sum them over. In one
  pass XLA reduces each where it is made, a tied table's for each of its uses, in the precision of the matmul that made
  it. With micro-batches each device adds up its own, in float32, and all reduce once; not under ZeRO-3 or with split
  positions, which reduce once a micro-batch. ZeRO scatters a gradient over its group and reduces the part over others.
- Parameters: ZeRO-1 and -2 gather them once a step, in float32; ZeRO-3 those of layers twice a micro-batch, others
  once, what matmuls read in the precision of the plan.
- Pipelines hand on a micro-batch's activation in each tick, forwards and backwards; gradients of what stands outside of
  the layers are summed over the stages too.

A model whose examples meet (BatchNorm, capacities of experts) reduces once a micro-batch as well; a `Work` does not say
that, and neither does this.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cjax.mesh import DATA, DEPTH, PIPE, SEQUENCE, ZERO
from cjax.pipeline import build
from cjax.planner.table import PRECISIONS, REMATS, SCHEDULES, Table
from cjax.planner.work import HeldWeight, Part, Split, Weight, Work
from cjax.sharding.layout.zero import SMALLEST

Bytes = dict[str, np.ndarray]  # by mesh axes, as `data+sequence`


@dataclass(frozen=True)
class Moved:
    """Bytes a device receives in a step: float64[plans] by axes, each for one purpose.

    Args:
      tensor: collectives of the tensor word, and of `sequence=gather`.
      sequence: those of attentions over a sequence axis, and what else goes along it.
      gradients: all-reduced and scattered.
      parameters: gathered by ZeRO.
      pipeline: activations handed from stage to stage.
    """

    tensor: Bytes = field(default_factory=dict)
    sequence: Bytes = field(default_factory=dict)
    gradients: Bytes = field(default_factory=dict)
    parameters: Bytes = field(default_factory=dict)
    pipeline: Bytes = field(default_factory=dict)

    def by_axis(self) -> Bytes:
        """All of them together."""
        found: Bytes = {}
        for some in (self.tensor, self.sequence, self.gradients, self.parameters, self.pipeline):
            for axes, amount in some.items():
                found[axes] = found[axes] + amount if axes in found else amount
        return found


def moved(work: Work, split: Split, table: Table) -> Moved:
    """What each plan of a table moves.

    Args:
      work: the model and its batch.
      split: what the tensor and sequence words that the plans share make of it.
      table: the plans.
    """
    found = Moved()
    half = np.where(table.precision == PRECISIONS.index("float32"), 4, 2)
    _of_words(found, work, split, table, half)
    for part, some in zip(work.parts, _weights(work, split), strict=True):
        for weight, held in some:
            if weight.is_trained or held.elements:
                _of_weight(found, part, weight, held, split, table, half)
    _of_stages(found, work, split, table, half)
    return found


def _of_words(found: Moved, work: Work, split: Split, table: Table, half: np.ndarray) -> None:
    """The tensor and sequence words' collectives: of activations by the share of the batch, of weights once each."""
    for part, moves in zip(work.parts, split.moves, strict=True):
        layers = part.repeats / np.where(part.repeats > 1, table.pipeline, 1)
        for move in moves:
            size = np.where(move.is_wide, 4, half)
            times = table.microbatches if move.of_weights else 1 / table.data
            again = (part.repeats > 1) & move.is_forward & move.is_remade
            times = times * np.where(again & (table.remat == REMATS.index("block")), 2, 1)
            to = found.sequence if SEQUENCE in move.axes else found.tensor
            _add(to, move.axes, move.elements * size * times * layers)


def _of_weight(
    found: Moved, part: Part, weight: Weight, held: HeldWeight, split: Split, table: Table, half: np.ndarray
) -> None:
    """The gradient and the gathers of one weight, and of those that other layers have of it."""
    is_layer = part.repeats > 1
    layers = part.repeats / np.where(is_layer, table.pipeline, 1)
    wide, micro = weight.itemsize, table.microbatches
    with_positions = split.sizes.get(SEQUENCE, 1) > 1
    # Each device adds up its own, and all reduce once: in a pipeline, or where there are micro-batches.
    waits = (table.zero < 3) & ((micro > 1) | (table.pipeline > 1)) & (table.data > 1) & (not with_positions)
    times = np.where(waits, 1, np.where(table.pipeline > 1, 1, micro)) * layers
    size = np.where(waits | (not weight.is_multiplied), wide, half)
    grouped = table.zero_group < table.data
    inside = tuple(a for a in held.sums if a in (SEQUENCE, DEPTH))
    others = tuple(a for a in held.sums if a not in inside)
    more = math.prod(split.sizes[a] for a in inside)
    outside = math.prod(split.sizes[a] for a in others)
    group = np.where(grouped, table.zero_group, table.data * more)
    every = table.data * more * outside
    stages = np.where(is_layer, 1, table.pipeline)
    divides = (table.zero > 0) & (group > 1) & _divides(held, group)
    elements = float(held.elements)
    for is_grouped in (False, True):
        for is_staged in (False, True):
            chosen = (grouped == is_grouped) & ((stages > 1) == is_staged)
            if not chosen.any():
                continue
            pipe = (PIPE,) if is_staged else ()
            data = (DATA, ZERO) if is_grouped else (DATA,)
            all_axes = (*pipe, *data, *inside, *others)
            zero_axes = (ZERO,) if is_grouped else (DATA, *inside)
            rest_axes = tuple(a for a in all_axes if a not in zero_axes)
            whole = chosen * 2 * _share(every * stages) * elements
            if weight.is_trained:
                uses = np.where(divides, held.uses - 1, held.uses)
                if held.gathered:
                    cut = math.prod(split.sizes[a] for a in held.gathered)
                    whole_sum = chosen * (~waits) * 2 * _share(every * stages * cut) * elements * cut
                    _add(found.gradients, (*all_axes, *held.gathered), whole_sum * size * times)
                    uses = uses - 1
                uses = np.where(waits, np.where(divides, 0, 1), uses)
                _add(found.gradients, all_axes, whole * size * times * uses)
                _add(found.gradients, zero_axes, chosen * divides * _share(group) * elements * size * times)
                parts = 2 * _share(every * stages / group) * elements / group
                _add(found.gradients, rest_axes, chosen * divides * parts * size * times)
            # Outside of layers all uses share a gather, but within groups, where a tied table has one for each.
            passes = 2 if is_layer else held.uses if is_grouped else 1
            gathers = np.where(table.zero == 3, passes * micro, 1) * layers
            used = np.where((table.zero == 3) & weight.is_multiplied, half, wide)
            needed = divides & ((table.zero == 3) | weight.is_trained)
            _add(found.parameters, zero_axes, chosen * needed * _share(group) * elements * used * gathers)


def _of_stages(found: Moved, work: Work, split: Split, table: Table, half: np.ndarray) -> None:
    """What stages hand each other: in each tick one activation forwards and one gradient backwards."""
    streams = {part.stream for part in work.parts if part.repeats > 1 and part.stream is not None}
    ticks = np.array([_ticks(*plan) for plan in _schedules(table)])
    for stream in sorted(streams, key=str):
        size = np.where(stream.is_computed, half, stream.itemsize)
        message = split.local(stream.dims) / (table.data * table.microbatches) * size
        _add(found.pipeline, (PIPE,), 2 * ticks * message)


def _schedules(table: Table) -> Iterator[tuple[str, int, int, int]]:
    columns = (table.schedule, table.pipeline, table.microbatches, table.chunks)
    for schedule, stages, microbatches, chunks in zip(*(column.tolist() for column in columns), strict=True):
        yield SCHEDULES[schedule], stages, microbatches, chunks


@functools.cache
def _ticks(schedule: str, stages: int, microbatches: int, chunks: int) -> int:
    """How many ticks a schedule has; none where there is no pipeline."""
    if stages == 1:
        return 0
    if schedule == "1f1b":
        return microbatches + 2 * (stages - 1)
    if schedule == "gpipe":
        return 2 * (microbatches + stages - 1) - 1
    return build(schedule, stages, microbatches, chunks).num_ticks


def _weights(work: Work, split: Split) -> Iterator[Sequence[tuple[Weight, HeldWeight]]]:
    """The weights of each part, and what is held of them: as the layout has it, or by their dims."""
    for at, part in enumerate(work.parts):
        if split.weights:
            yield list(zip(part.weights, split.weights[at], strict=True))
            continue
        sums = tuple(a for a in (SEQUENCE, DEPTH) if split.sizes.get(a, 1) > 1)
        yield [
            (weight, HeldWeight((math.ceil(split.local(weight.dims)),), (1,), sums)) for weight in part.weights
        ]  # fmt: skip


def _divides(held: HeldWeight, group: np.ndarray) -> np.ndarray:
    """Whether ZeRO finds a dim of a weight to divide: see `cjax.sharding.layout.zero`."""
    pairs = list(zip(held.shape, held.shards, strict=True))
    evenly = np.any([n % (group * s) == 0 for n, s in pairs], axis=0) if pairs else np.zeros(len(group), bool)
    padded = np.any([n >= 4 * group * s for n, s in pairs], axis=0) if pairs else evenly
    return evenly | (padded & (math.prod(held.shape) >= SMALLEST))


def _share(size: np.ndarray) -> np.ndarray:
    """Of what is gathered or scattered among so many, a device receives all but its own part."""
    return (size - 1) / size


def _add(to: Bytes, axes: Sequence[str], amount: np.ndarray) -> None:
    if np.any(amount):
        name = "+".join(axes)
        to[name] = to[name] + amount if name in to else amount
