"""Bytes that a device receives in a step, for a table of plans: by what they are for, and along which mesh axes.

What is predicted is what cjax does, as `cjax.audit` counts it in the compiled step, not what a formula would like:

- The tensor and sequence words' own collectives (`WorkSplit.moves`), once a micro-batch. Under remat=block those of the
  forward pass that a layer's derivative needs come again.
- Gradients, summed over data parallelism together with the axes that tensor and sequence words sum them over. In one
  pass XLA reduces each where it is made, in the precision of the matmul that made it; a tied table's for all of its
  uses together, but in a grid or a pipeline for each of them. With micro-batches each device adds up its own, in
  float32, and all reduce once; not under ZeRO-3 or with split positions, which reduce once a micro-batch. ZeRO scatters
  a gradient over its group and reduces the part over others.
- Parameters: ZeRO-1 and -2 gather them once a step; ZeRO-3 those of layers twice a micro-batch, others once. What
  matmuls read is gathered in the precision of the plan.
- Pipelines hand on a micro-batch's activation in each tick, forwards and backwards. What stands outside of the layers
  is on all stages: each is given its part of the gradients' sum over them too, and parameters are gathered once a step,
  as ZeRO-1 does over devices with other rows. Where the last stage has fewer layers for the sake of what comes after
  them, the optimizer's share of layers is not the stage's: gradients, parameters and state go to it, and back.

- Devices that share what all examples make together, rows for experts, gather the examples for it, and who is sent
  where, and scatter what comes back: each once a layer, and once for the gradient.

A model whose examples meet (BatchNorm, capacities of experts) reduces gradients once a micro-batch as well; a `Work`
does not say that, and neither does this.
"""

import collections
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from cjax.mesh import DATA, DEPTH, EXPERT, PIPE, SEQUENCE, ZERO
from cjax.pipeline.partition import partition
from cjax.planner.costs.pipelines import Ticks, ticks, turns
from cjax.planner.table import PRECISIONS, REMATS, SCHEDULES, PlanTable
from cjax.planner.work import BATCH, AxisMove, Dims, HeldWeight, Ordered, Part, Weight, Work, WorkSplit, elements
from cjax.sharding.layout.zero import SMALLEST

Bytes = dict[str, np.ndarray]  # by mesh axes, as `data+sequence`
# Axes of a split along which weights that they don't split are alike: gradients are added up, and ZeRO shares out.
WITH_DATA = (EXPERT, SEQUENCE, DEPTH)


@dataclass(frozen=True)
class Moved:
    """Bytes a device receives in a step: float64[plans] by axes, each for one purpose.

    Args:
      tensor: collectives of the tensor word, and of `sequence=gather`.
      sequence: those of attentions over a sequence axis, and what else goes along it.
      gradients: all-reduced and scattered.
      parameters: gathered by ZeRO.
      rows: of examples, gathered for what all of them make together, and scattered behind it.
      pipeline: activations handed from stage to stage.
      layers: of stages with unlike numbers of layers, what goes to the optimizer and comes back.
    """

    tensor: Bytes = field(default_factory=dict)
    sequence: Bytes = field(default_factory=dict)
    gradients: Bytes = field(default_factory=dict)
    parameters: Bytes = field(default_factory=dict)
    rows: Bytes = field(default_factory=dict)
    pipeline: Bytes = field(default_factory=dict)
    layers: Bytes = field(default_factory=dict)

    def by_axis(self) -> Bytes:
        """All of them together."""
        found: Bytes = {}
        for some in (
            self.tensor,
            self.sequence,
            self.gradients,
            self.parameters,
            self.rows,
            self.pipeline,
            self.layers,
        ):
            for axes, amount in some.items():
                found[axes] = found[axes] + amount if axes in found else amount
        return found


def moved(work: Work, split: WorkSplit, table: PlanTable) -> Moved:
    """What each plan of a table moves.

    Args:
      work: the model and its batch.
      split: what the tensor and sequence words that the plans share make of it.
      table: the plans.
    """
    found = Moved()
    half = np.where(table.precision == PRECISIONS.index("float32"), 4, 2)
    _of_words(found, work, split, table, half)
    _of_all(found, work, split, table, half)
    _add(found.pipeline, (PIPE,), messages(work, table) * handed(work, split, table))
    _add(found.layers, (PIPE,), to_optimizer(work, split, table))
    # Of weights, plans that differ in remat alone move the same, or in schedule, where that says who runs what.
    few, places = _unlike(table, ("schedule", "chunks") if split.in_lockstep else ())
    of_weights = _of_weights(work, split, few)
    for purpose in ("gradients", "parameters"):
        for axes, amount in getattr(of_weights, purpose).items():
            _add(getattr(found, purpose), axes.split("+"), amount[places])
    return found


def splits_examples(split: WorkSplit) -> bool:
    """Whether devices that share a batch meet inside the model, so that none adds up micro-batches of its own."""
    return any(split.sizes.get(axis, 1) > 1 for axis in (SEQUENCE, EXPERT))


@dataclass(frozen=True)
class _Plans:
    """Plans, and how many bytes a computed number has under each."""

    table: PlanTable
    half: np.ndarray


def _unlike(table: PlanTable, more: tuple[str, ...]) -> tuple[_Plans, np.ndarray]:
    """The plans of a table that differ in who sums what, or in `more`, and for each plan which of them it is like."""
    kept = ("data", "pipeline", "microbatches", "overlap", "zero", "zero_group", "precision", *more)
    first, places = _distinct(*(getattr(table, name) for name in kept))
    few = PlanTable(**{each.name: getattr(table, each.name)[first] for each in fields(PlanTable)})
    half = np.where(few.precision == PRECISIONS.index("float32"), 4, 2)
    return _Plans(few, half), places


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows, a place of each that is unlike the others, and for every row which of those it is like."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, places = np.unique(code, return_index=True, return_inverse=True)
    return first, places.reshape(-1)


def _of_weights(work: Work, split: WorkSplit, of: _Plans) -> Moved:
    found, times = Moved(), _turns(work, split, of.table)[2]
    for part, some in zip(work.parts, _weights(work, split), strict=True):
        alike = collections.Counter((replace(weight, name="", dims=()), held) for weight, held in some)
        for (weight, held), count in alike.items():
            is_layer = part.repeats > 1
            layers = count * part.repeats / np.where(is_layer, of.table.pipeline, 1)
            passes = of.table.turns * (times if is_layer else 1)
            for case in _cases(held, split, of.table, layers, passes, is_layer):
                if weight.is_trained:
                    _gradients(found, weight, held, case, of, is_layer)
                _gathers(found, part, weight, held, case, of)
    return found


def _of_words(found: Moved, work: Work, split: WorkSplit, table: PlanTable, half: np.ndarray) -> None:
    """The tensor and sequence words' collectives: of activations by the share of the batch, of weights once each."""
    turns_of = dict(zip((True, False), _turns(work, split, table), strict=False))
    for part, moves in zip(work.parts, split.moves, strict=True):
        is_layer = part.repeats > 1
        for move in moves:
            layers = part.repeats * (turns_of[move.is_forward] / table.pipeline if is_layer else 1)
            size = np.where(move.is_wide, 4, half)
            times = table.turns if move.of_weights else 1 / table.data
            again = is_layer & move.is_forward & move.is_remade
            times = times * np.where(again & (table.remat == REMATS.index("block")), 2, 1) * counts(move, table)
            to = found.sequence if SEQUENCE in move.axes else found.tensor
            _add(to, move.axes, move.elements * size * times * layers)
            # Along no data axis where there is one copy alone.
            copies, group = table.data > 1, table.data * math.prod(split.sizes[axis] for axis in move.axes)
            summed = 2 * _share(group) * move.held * size * table.turns * layers
            _add(to, move.axes, summed * ~copies)
            _add(to, (DATA, *move.axes), summed * copies)


def _of_all(found: Moved, work: Work, split: WorkSplit, table: PlanTable, half: np.ndarray) -> None:
    """What rows that all examples make together are made of, and what is made of them; rows in another order."""
    turns = _turns(work, split, table)[:2] / table.pipeline
    for part in work.parts:
        is_layer = part.repeats > 1
        forward, backward = turns if is_layer else np.ones_like(turns)
        again = is_layer & (table.remat == REMATS.index("block"))
        for product in part.products:
            sent = product.sent
            if sent is None:
                continue
            times = part.repeats * (forward * np.where(again & product.is_remade, 2, 1) + backward)
            _of_examples(found, split, table, whole_of(split, sent) * half * times)
        for value, has_gradient in part.told:
            # A layer that is made again for its backward pass keeps them until then.
            times = part.repeats * value.times * (forward + (1 + has_gradient) * backward)
            size = half if value.is_computed else value.itemsize
            _of_examples(found, split, table, whole_of(split, value.dims) * size * times)
        for value, has_gradient, is_remade in put_in_order(part, split):
            times = forward * np.where(again & is_remade, 2, 1) + has_gradient * backward
            size = half if value.is_computed else value.itemsize
            _of_examples(found, split, table, whole_of(split, value.dims) * size * part.repeats * value.times * times)


def put_in_order(part: Part, split: WorkSplit) -> tuple[Ordered, ...]:
    """Rows of the batch in another order. A grid's batch axes put them in order as well: what moves along those is
    known where the grid is."""
    return part.ordered if {*split.axes_of.get(BATCH, ())} <= {EXPERT} else ()


def _of_examples(found: Moved, split: WorkSplit, table: PlanTable, whole: np.ndarray) -> None:
    amount, grouped = _share(table.data * split.sizes.get(EXPERT, 1)) * whole, _is_grouped(table)
    others = (EXPERT,) if EXPERT in split.sizes else ()
    alone = (table.data == 1) & bool(others)
    _add(found.rows, (DATA, *others), amount * ~grouped * ~alone)
    _add(found.rows, others, amount * alone)
    _add(found.rows, (DATA, ZERO), amount * grouped)


def _is_grouped(table: PlanTable) -> np.ndarray:
    """Whether ZeRO works in groups of the devices that share the batch."""
    return (table.zero_group > 1) & (table.zero_group < table.data)


def whole_of(split: WorkSplit, dims: Dims) -> float:
    """Elements of a value that all devices with examples have gathered; a split cuts what examples have among those
    with different experts."""
    return split.local(dims) * (split.sizes.get(EXPERT, 1) if any(name == BATCH for name, _ in dims) else 1)


@dataclass(frozen=True)
class _Case:
    """Plans of a table that are alike in who sums a weight's gradient.

    Args:
      times: how many such weights a device has, by plan; 0 for those of other cases.
      passes: how many backward passes a step has.
      is_late: whether devices add up their own, and all reduce once a step.
      axes, every: over which axes it is summed, and how many devices these have.
      zero_axes, group: those of them that its sum is scattered over, and how many devices these have.
      divides: whether ZeRO divides it.
      scatters: whether each device is given its part of the sum, and not the whole.
      stages, deals: stages over which it is summed behind that, 1 for none; whether each is given its part.
      held_axes, holders: those over which its optimizer state is divided, if it is.
    """

    times: np.ndarray
    passes: np.ndarray
    is_late: bool
    axes: tuple[str, ...]
    every: np.ndarray
    zero_axes: tuple[str, ...]
    group: np.ndarray
    divides: np.ndarray
    scatters: np.ndarray
    stages: np.ndarray
    deals: np.ndarray
    held_axes: tuple[str, ...]
    holders: np.ndarray

    @property
    def adds_parts(self) -> np.ndarray:
        """Whether stages add up ZeRO's parts of a gradient, and not the whole."""
        return self.deals & self.divides & (not self.is_late)


def _cases(
    held: HeldWeight, split: WorkSplit, table: PlanTable, layers: np.ndarray, passes: np.ndarray, is_layer: bool
) -> Iterator[_Case]:
    """The cases of a table, for one weight."""
    inside = tuple(a for a in held.sums if a in WITH_DATA)
    others = tuple(a for a in held.sums if a not in inside)
    more = math.prod(split.sizes[a] for a in inside)
    every = table.data * more * math.prod(split.sizes[a] for a in others)
    waits = (table.microbatches > 1) & (table.zero < 3) & (table.data > 1) & (not splits_examples(split))
    grouped = _is_grouped(table)
    zero = np.where(table.zero > 0, np.where(grouped, table.zero_group, table.data * more), 1)
    staged = (table.pipeline > 1) & (not is_layer)
    # Stages share out what they all have if some dim of it divides among them, and among ZeRO's devices.
    on_stages = zero * np.where(staged, table.pipeline, 1)
    is_dealt = staged & np.logical_or(*_divides(held, on_stages))
    kinds = np.stack([grouped, staged, waits, table.data == 1, is_dealt, table.zero > 0])
    for kind in np.unique(kinds, axis=1).T:
        chosen = (kinds == kind[:, None]).all(0)
        is_grouped, is_staged, is_late, is_alone, deals, is_zero = map(bool, kind)
        # Who waits for the last micro-batch sums over stages in the same breath, all others behind it.
        together = is_staged and is_late
        data = () if is_alone else (DATA, ZERO) if is_grouped else (DATA,)
        zero_axes = (ZERO,) if is_grouped else (*data, *inside)
        mine = zero_axes if is_zero else ()
        pipe = (PIPE,) if deals else ()
        holders = on_stages if deals else zero
        evenly, padded = _divides(held, holders)
        divides = (holders > 1) & (evenly | padded)
        yield _Case(
            chosen * layers,
            passes,
            is_late,
            (*((PIPE,) if together else ()), *data, *inside, *others),
            every * table.pipeline if together else every,
            (*pipe, *mine) if together else zero_axes,
            holders if together else zero,
            divides & (zero > 1),
            divides & (evenly if is_late else zero > 1),
            table.pipeline if is_staged and not is_late else np.ones_like(table.pipeline),
            deals & evenly,
            (*pipe, *mine),
            np.where(divides, holders, 1),
        )


def _gradients(
    found: Moved, weight: Weight, held: HeldWeight, case: _Case, of: _Plans, is_layer: bool
) -> None:  # fmt: skip
    """The sums of a weight's gradient."""
    wide, elements = weight.itemsize, float(held.elements) / held.parts
    passes = case.times if case.is_late else case.times * case.passes
    size = passes * (wide if case.is_late or not weight.is_multiplied else of.half)
    uses = np.where((of.table.pipeline == 1) & held.joint, 1, 1 if case.is_late else held.uses)
    # One of its uses is scattered; what others add to is summed whole, but where stages add up parts of the sum.
    in_parts = np.where(case.adds_parts, uses, 1 * case.scatters)
    whole = uses - in_parts
    # Outside of layers, XLA takes a sum that is only added to others out of the loop over micro-batches; not out of a
    # branch that some stages take.
    once = (in_parts == 0) & (not is_layer) & (not case.is_late) & (of.table.pipeline == 1)
    whole = whole / np.where(once, of.table.turns, 1)
    _add(found.gradients, case.axes, whole * 2 * _share(case.every) * elements * size)
    _add(found.gradients, case.zero_axes, in_parts * _share(case.group) * elements * size)
    rest = tuple(a for a in case.axes if a not in case.zero_axes)
    part = elements / case.group
    _add(found.gradients, rest, in_parts * 2 * _share(case.every / case.group) * part * size)
    left = np.where(in_parts > 0, part, elements)
    _add(found.gradients, (PIPE,), np.where(case.deals, 1, 2) * _share(case.stages) * left * case.times * wide)


def _gathers(found: Moved, part: Part, weight: Weight, held: HeldWeight, case: _Case, of: _Plans) -> None:
    """What is gathered of a weight."""
    table, is_third, elements = of.table, of.table.zero == 3, float(held.elements)
    if weight.is_trained:
        # Ahead of the first micro-batch, weights are rounded where they are, and then gathered.
        size = np.where(weight.is_multiplied & (of.half < 4), np.minimum(of.half, weight.itemsize), weight.itemsize)
        _add(found.parameters, case.held_axes, ~is_third * _share(case.holders) * elements * size * case.times)
        # Under ZeRO-3 stages have a ZeRO group's part of a parameter, of which each updates its own.
        dealt = is_third & (PIPE in case.held_axes) & (case.holders > 1)
        wide = _share(table.pipeline) * elements / np.where(dealt, case.holders / table.pipeline, 1) * weight.itemsize
        _add(found.parameters, (PIPE,), dealt * wide * case.times)
    # Outside of layers all uses share a gather, but within groups, where a tied table has one for each; and in a
    # pipeline all micro-batches do, of what is not rounded: of the rest each use in each of them has one.
    is_layer, is_staged = part.repeats > 1, table.pipeline > 1
    is_rounded = weight.is_multiplied & (of.half < weight.itemsize)
    apart = np.where(is_staged, is_rounded, (ZERO in case.held_axes) & (not held.joint))
    passes = 2 if is_layer else np.where(apart, held.uses, 1)
    times = passes * np.where(is_layer | ~is_staged | is_rounded, case.passes, 1) * case.times
    size = np.where(weight.is_multiplied, np.minimum(of.half, weight.itemsize), weight.itemsize)
    third = tuple(a for a in case.held_axes if a != PIPE)
    group = np.where(case.divides, case.holders / np.where(PIPE in case.held_axes, table.pipeline, 1), 1)
    amount = is_third * _share(group) * elements * size * times
    _add(found.parameters, third, amount)


def counts(move: AxisMove, table: PlanTable) -> np.ndarray:
    """Whether plans have a move at all, by how their layers come by what it is of, and how many rows they look up."""
    found = np.ones(len(table))
    if move.is_kept is not None:
        found = found * ((table.remat == REMATS.index("block")) != move.is_kept)
    if move.looked_up is not None:
        share, of_few = move.looked_up
        found = found * ((share < table.data * table.turns) == of_few)
    return found


def handed(work: Work, split: WorkSplit, table: PlanTable) -> np.ndarray:
    """Bytes of a message from one stage to the next."""
    is_whole = table.precision == PRECISIONS.index("float32")
    streams = tuple(part.stream for part in work.parts if part.repeats > 1 and part.stream is not None)
    found = np.zeros(len(table))
    for some, chosen in ((work.handed, is_whole), (work.handed_low, ~is_whole)):
        for value in some or streams[:1]:
            # A stream that no stage was asked for is in the precision of the plan.
            size = value.itemsize if some or not value.is_computed else np.where(is_whole, value.itemsize, 2)
            rows = table.data * table.microbatches if any(name == BATCH for name, _ in value.dims) else 1
            found = found + chosen * split.local(value.dims) / rows * size
    return found


def messages(work: Work, table: PlanTable) -> np.ndarray:
    """How many of them a stage receives in a step: one forwards and one backwards in each tick."""
    stacks = sum(part.repeats > 1 for part in work.parts)
    columns = (table.schedule, table.pipeline, table.microbatches, table.chunks)
    first, places = _distinct(*columns)
    each = zip(*(column[first].tolist() for column in columns), strict=True)
    times = [sum(_kinds(SCHEDULES[schedule], stacks, *sizes).values()) for schedule, *sizes in each]
    return 2 * np.array(times)[places]


def _turns(work: Work, split: WorkSplit, table: PlanTable) -> np.ndarray:
    """For F, B and W, how often a stage runs its layers, to how often it has a micro-batch for them: [3, plans]. More
    where stages run in each tick what any of them has to."""
    found = np.ones((3, len(table)))
    stacks = sum(part.repeats > 1 for part in work.parts)
    if not split.in_lockstep or not stacks or not (table.pipeline > 1).any():
        return found
    first, places = _distinct(table.schedule, table.pipeline, table.microbatches, table.chunks)
    columns = (table.schedule, table.pipeline, table.microbatches, table.chunks)
    each = zip(*(column[first].tolist() for column in columns), strict=True)
    return np.array([_times(SCHEDULES[schedule], stacks, *sizes) for schedule, *sizes in each]).T[:, places]


@functools.cache
def _times(schedule: str, stacks: int, stages: int, microbatches: int, chunks: int) -> tuple[float, ...]:
    if stages == 1:
        return 1.0, 1.0, 1.0
    name = "interleaved" if schedule == "1f1b" and stacks > 1 else schedule
    try:
        return tuple(n / (microbatches * chunks * stacks) for n in turns(name, stages, microbatches, chunks, stacks))
    except ValueError:  # which whoever makes plans has to find out, and say
        return 1.0, 1.0, 1.0


def to_optimizer(work: Work, split: WorkSplit, table: PlanTable) -> np.ndarray:
    """Bytes of layers that a stage receives since the optimizer's share of them is another than its own.

    All stages keep room for as many layers as the fullest has, and the optimizer works on all of that room. Not so
    where one leaf holds all layers: its norms are of them together, and the optimizer works on the layers alone. These
    XLA splits evenly, so that each device's lie further on than a stage's do, by as much as the stages before it have
    room for nothing. Of stages with several chunks, whose layers are not in order, nothing is known.
    """
    found = np.zeros(len(table))
    stacks = [at for at, part in enumerate(work.parts) if part.repeats > 1]
    if not stacks or not (table.pipeline > 1).any():
        return found
    part = work.parts[stacks[-1]]
    head = 0.0 if split.in_lockstep else sum(map(_forward, work.parts[stacks[-1] + 1 :])) / max(1, _forward(part))
    each = sum(
        held.elements * weight.itemsize
        for weight, held in _weights(work, split)[stacks[-1]]
        if weight.is_trained and weight.is_scanned
    )
    if not each:
        return found
    # Gradients, parameters and state go there, and what it makes of the latter comes back.
    each *= 1 + 2 * (1 + work.optimizer_bytes)
    for stages in np.unique(table.pipeline[(table.pipeline > 1) & (table.chunks == 1)]).tolist():
        rows = partition([part.repeats], tuple(range(stages)), head).rows[0]
        even = -(-part.repeats // stages)
        further = (rows - even) * (-(-part.repeats // even) - 1)
        mine = (table.pipeline == stages) & (table.chunks == 1)
        found = np.where(mine, further * each / np.where(table.zero > 0, table.zero_group, 1), found)
    return found


def _forward(part: Part) -> float:
    """FLOPs of a forward pass through a part, or through one layer of it."""
    scores = sum(
        4 * each.times * math.prod(map(elements, (each.batch, each.heads, each.queries, each.keys))) * each.features
        for each in part.attentions
    )
    return float(sum(product.flops for product in part.products) + scores)


@functools.cache
def _kinds(schedule: str, stacks: int, stages: int, microbatches: int, chunks: int) -> Ticks:
    """The ticks of a schedule; none where there is no pipeline, or no such schedule. Of several stacks of layers each
    is a chunk on every stage."""
    if stages == 1 or stacks == 0:
        return {}
    try:
        return ticks(
            "interleaved" if schedule == "1f1b" and stacks > 1 else schedule, stages, microbatches, chunks * stacks
        )
    except ValueError:  # which whoever makes plans has to find out, and say
        return {}


def _weights(work: Work, split: WorkSplit) -> list[Sequence[tuple[Weight, HeldWeight]]]:
    """The weights of each part, and what is held of them: as the layout has it, or by their dims."""
    if split.weights:
        return [
            list(zip(part.weights, held, strict=True)) for part, held in zip(work.parts, split.weights, strict=True)
        ]
    sums = tuple(a for a in WITH_DATA if split.sizes.get(a, 1) > 1)
    return [
        [(weight, HeldWeight((math.ceil(split.local(weight.dims)),), (1,), sums)) for weight in part.weights]
        for part in work.parts
    ]


def _divides(held: HeldWeight, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether ZeRO finds a dim of a weight that its group divides, or one to pad: see `cjax.sharding.layout.zero`."""
    evenly = padded = np.zeros(len(group), bool)
    for n, s in zip(held.shape, held.shards, strict=True):
        evenly = evenly | (n % (group * s) == 0)
        padded = padded | (n >= 4 * group * s)
    return evenly, padded & (math.prod(held.shape) >= SMALLEST)


def _share(size: np.ndarray) -> np.ndarray:
    """Of what is gathered or scattered among so many, a device receives all but its own part."""
    return (size - 1) / size


def _add(to: Bytes, axes: Sequence[str], amount: np.ndarray) -> None:
    if np.any(amount):
        name = "+".join(axes)
        to[name] = to[name] + amount if name in to else amount
