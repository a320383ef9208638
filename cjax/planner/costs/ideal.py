"""What plans do in a step, in seconds at the datasheet's rates: all that is no constant of a calibration.

The split in two is for the fit as well as for the speed: what depends on plans alone is counted once, whatever the
constants are that it is multiplied with.
"""

import dataclasses
import functools
import math
import operator

import numpy as np

from cjax.mesh import EXPERT, SEQUENCE
from cjax.pipeline.partition import partition
from cjax.planner.costs.calibration import Calibration
from cjax.planner.costs.compute import Computing, Pass
from cjax.planner.costs.moved import (
    WITH_DATA,
    counts,
    handed,
    messages,
    moved,
    put_in_order,
    splits_examples,
    to_optimizer,
    whole_of,
)
from cjax.planner.costs.transfers import Members, Receipt, group_of
from cjax.planner.hardware import Hardware
from cjax.planner.profile import OUTER
from cjax.planner.table import PRECISIONS, REMATS, SCHEDULES, PlanTable
from cjax.planner.work import AxisMove, Part, Work, WorkSplit

# What each member receives is its own and comes from one other: a host's other adapters do not carry a part of it.
EXCHANGES = ("all-to-all", "collective-permute")
MASTER = 4.0  # bytes of a parameter, and of a gradient that was added up


@dataclasses.dataclass(frozen=True)
class Ways:
    """One micro-batch through one stretch of the model on one device.

    Args:
      forward, backward: what is computed; `again`, what remat=block computes of the forward pass a second time.
      tensor_forward, tensor_backward, sequence_forward, sequence_backward: what the words' collectives receive.
      gather: of one pass of ZeRO-3 over it, forward or backward.
      held: parameters that a device holds whole while it computes, on its share of the tensor axes.
      exchanges: whether the sequence's are exchanges, which the attention between them waits for; rings go on beside.
    """

    forward: Pass
    backward: Pass
    again: Pass
    tensor_forward: Receipt
    tensor_backward: Receipt
    sequence_forward: Receipt
    sequence_backward: Receipt
    gather: Receipt
    held: np.ndarray
    exchanges: np.ndarray


@dataclasses.dataclass(frozen=True)
class Ideal:
    """Plans' steps; arrays [plans].

    Args:
      first, layer, last: what comes before the layers, an average layer, what comes after.
      layers: in all; `full` of them are on the stage that has most, `short` on the one with the last part.
      stages, chunks, microbatches, schedule, remat: the plan's; `turns` in which its micro-batches are computed.
      reduce: gradients once a step, and parameters after them; `reduce_each` gradients with each micro-batch.
      gather: ZeRO-3's parameters, layers' once for each direction; the others are kept from one to the other. And what
        examples send to rows that all of them make together.
      send: a stage's output to the next; in lockstep all messages of a step, both ways.
      rows: layers on their way to the optimizer and back.
      optimizer: the optimizer's pass over memory; `accumulate` that of one micro-batch's gradients.
      hosts: that the devices are on.
      together: whether all stages run in a tick what any of them has to, and throw away what is not their own.
      moved: bytes a device receives in a step, by axis.
    """

    first: Ways
    layer: Ways
    last: Ways
    layers: np.ndarray
    full: np.ndarray
    short: np.ndarray
    stages: np.ndarray
    chunks: np.ndarray
    microbatches: np.ndarray
    turns: np.ndarray
    schedule: np.ndarray
    remat: np.ndarray
    reduce: Receipt
    reduce_each: Receipt
    gather: Receipt
    send: Receipt
    rows: Receipt
    optimizer: np.ndarray
    accumulate: np.ndarray
    hosts: np.ndarray
    together: np.ndarray
    moved: dict[str, np.ndarray]


def ideal(work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware, calibration: Calibration) -> Ideal:
    """Of plans that share their tensor and sequence words."""
    return _Plans(work, split, table, hardware, calibration).ideal()


class _Plans:
    """A table at work: what its columns make of each size."""

    def __init__(
        self, work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware, calibration: Calibration
    ) -> None:
        self._work, self._split, self._table, self._hardware = work, split, table, hardware
        self._software, self._shares = calibration.software, (calibration.links, calibration.adapters)
        self._meets, self._kinds = calibration.shares_cores, dict(calibration.kinds)
        self._inner = split.num_devices  # neighbours that share a copy's stage
        self._is_half = table.precision != PRECISIONS.index("float32")
        self._item = np.where(self._is_half, 2.0, 4.0)
        # What a device computes with one micro-batch depends on the batch's share and on the precision alone; and what
        # all examples make together on the number of devices that share it.
        keys = np.stack([table.data * table.microbatches, table.data, table.precision])
        (shares, data, precisions), self._place = np.unique(keys, axis=1, return_inverse=True)
        self._place = self._place.reshape(-1)
        self._computing = Computing(hardware, calibration, split, shares.astype(float), data.astype(float), precisions)
        self._share = (table.data * table.microbatches).astype(float)
        # Every stage of cjax's holds a part of each stack: of several, each is a chunk more, and 1F1B is interleaved.
        stacks = sum(part.repeats > 1 for part in work.parts) if self._software.is_lockstep else 1
        self._chunks = table.chunks * max(1, stacks)
        is_plain = (table.schedule == SCHEDULES.index("1f1b")) & (stacks > 1)
        self._schedule = np.where(is_plain, SCHEDULES.index("interleaved"), table.schedule)

    def ideal(self) -> Ideal:
        table, work, hardware = self._table, self._work, self._hardware
        stacks = [i for i, part in enumerate(work.parts) if part.repeats > 1]
        cut = stacks[0] if stacks else len(work.parts)
        first = self._ways([(i, 1.0) for i in range(cut)])
        last = self._ways([(i, 1.0) for i in range(cut, len(work.parts)) if i not in stacks])
        num = max(1, work.num_layers)
        layer = self._ways([(i, work.parts[i].repeats / num) for i in stacks])
        full, short = self._stages([work.parts[i] for i in stacks], first, layer, last)
        ends = first.held + last.held if self._software.is_lockstep else np.maximum(first.held, last.held)
        ends = np.where(table.pipeline > 1, ends, first.held + last.held)
        held = full * layer.held + ends
        scatter, between, weights, each = self._reduce(held)
        gradients = scatter + between
        gathers = (layer.gather * (2 * full) + first.gather + last.gather) * table.turns
        stage_stride = self._inner * table.data
        if self._software.is_lockstep:
            # Of stages on several hosts some hand on between them, and all wait for these.
            leaves = table.pipeline * stage_stride > hardware.devices_per_host
            stage_stride = np.where(leaves, np.maximum(stage_stride, hardware.devices_per_host), stage_stride)
        neighbours = group_of(hardware, 2, stage_stride)
        send = self._over(neighbours, "collective-permute", *self._sent(stacks))
        rows = self._over(neighbours, "collective-permute", to_optimizer(work, self._split, table), 1.0)
        adds = (table.turns > 1) & (not self._software.adds_in_matmuls)
        states = np.where(table.zero >= 1, table.zero_group, 1)
        # Of what is in no layer each of cjax's stages updates its part.
        updated = full * layer.held + ends / np.where(self._software.is_lockstep, table.pipeline, 1)
        memory = hardware.memory_bandwidth or np.inf
        return Ideal(
            first, layer, last, np.full(len(table), float(work.num_layers)), full, short,
            table.pipeline.astype(float), self._chunks.astype(float), table.microbatches.astype(float),
            table.turns.astype(float), self._schedule, table.remat,
            gradients * ~each + weights, gradients * (each * table.turns), gathers,
            send, rows * (rows.bytes > 0),
            # Parameters and state are read and written, gradients read, computed copies written.
            updated / states * (2 * MASTER * (1 + work.optimizer_bytes) + MASTER + self._item) / memory,
            held * (self._item + 2 * MASTER) / memory * adds,
            np.ceil(table.data * table.pipeline * self._inner / hardware.devices_per_host),
            (table.pipeline > 1) & self._split.in_lockstep & self._software.is_lockstep,
            moved(work, self._split, table).by_axis(),
        )  # fmt: skip

    def _sent(self, stacks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that stages hand on, and in how many messages."""
        table = self._table
        if self._software.is_lockstep:
            count = 1.0 * messages(self._work, table)
            return count * handed(self._work, self._split, table), count
        stream = self._work.parts[stacks[0]].stream if stacks else None
        bytes_ = self._item * self._split.local(stream.dims) / self._share if stream else np.zeros(len(table))
        if self._software.cuts_sends and stream:
            bytes_ = bytes_ * self._split.parts_of(stream.dims) / self._inner
        return bytes_, np.ones(len(table))

    # -- one pass -----------------------------------------------------------------------------------------------------
    def _ways(self, parts: list[tuple[int, float]]) -> Ways:
        count = len(self._table)
        there = back = again = Pass.none(count)
        moves = {(axis, way): Receipt.none(count) for axis in ("tensor", SEQUENCE) for way in (True, False)}
        gather, held = Receipt.none(count), np.zeros(count)
        for i, times in parts:
            rings = self._split.rings[i] if self._split.rings else ()
            f, b, a = (one[self._place] * times for one in self._computing.passes(self._work.parts[i], rings))
            if self._software.copies_weights and self._work.parts[i].repeats > 1:
                copied = times * 2 * self._split.held[i] * self._item / (self._hardware.memory_bandwidth or np.inf)
                f, b = (dataclasses.replace(one, touched=one.touched + copied) for one in (f, b))
            there, back, again = there + f, back + b, again + a
            for move in self._split.moves[i]:
                key = SEQUENCE if SEQUENCE in move.axes else "tensor", move.is_forward
                moves[key] = moves[key] + self._moved(move) * (times * counts(move, self._table))
            held = held + self._split.held[i] * times
            gather = gather + self._gathered(self._work.parts[i], self._split.held[i]) * times
            gather = gather + self._of_all(self._work.parts[i]) * times
        among = [move for i, _ in parts for move in self._split.moves[i] if SEQUENCE in move.axes]
        exchanges = any(move.kind == "all-to-all" for move in among)
        return Ways(
            there,
            back,
            again,
            tensor_forward=moves["tensor", True],
            tensor_backward=moves["tensor", False],
            sequence_forward=moves[SEQUENCE, True],
            sequence_backward=moves[SEQUENCE, False],
            gather=gather,
            held=held,
            exchanges=np.full(count, exchanges),
        )

    def _moved(self, move: AxisMove) -> Receipt:
        size = np.where(self._is_half & (not move.is_wide), 2.0, 4.0)
        bytes_ = move.elements * size / (1.0 if move.of_weights else self._share)
        if move.held:
            every = self._table.data * math.prod(self._split.sizes[axis] for axis in move.axes)
            group = group_of(self._hardware, every, 1, self._software.rings)
            return self._over(group, move.kind, 2 * (every - 1) / every * move.held * size, move.count)
        return self._over(self._axes(move.axes, move.kind in EXCHANGES), move.kind, bytes_, move.count, move.is_outer)

    def _axes(self, axes: tuple[str, ...], is_exchange: bool) -> Members:
        """Members along these axes of the tensor and sequence words, the last of which are neighbours."""
        names = list(self._split.sizes)
        inside = names[max(names.index(axis) for axis in axes) + 1 :]
        size = math.prod(self._split.sizes[axis] for axis in axes)
        stride = math.prod(self._split.sizes[axis] for axis in inside)
        return group_of(self._hardware, size, stride, 1 if is_exchange else self._software.rings)

    def _gathered(self, part: Part, held: float) -> Receipt:
        found = Receipt.none(len(self._table))
        for share, more in self._kinds_of_weights():
            group = self._zero_group(more)
            bytes_ = share * held * self._item * (group.size - 1) / group.size
            found = found + self._over(group, "all-gather", bytes_, share * bool(part.weights), is_outer=True)
        return found * (self._table.zero == 3)

    def _of_all(self, part: Part) -> Receipt:
        """Examples gathered for rows that all of them make together, and scattered behind these, and rows of the batch
        put in another order; those of a layer come once for each direction."""
        more = self._split.sizes.get(EXPERT, 1)
        group = group_of(self._hardware, self._table.data * more, self._inner // more, self._software.rings)
        found, ways = Receipt.none(len(self._table)), 1 if part.repeats > 1 else 2
        for sent in filter(None, (product.sent for product in part.products)):
            whole = whole_of(self._split, sent) / self._table.microbatches * self._item
            found = found + self._over(group, "all-gather", whole * (group.size - 1) / group.size * ways, 1.0 * ways)
        # Who is sent where goes with them. A gate's gradient comes back as well: half a way more in each direction.
        for value, has_gradient in part.told:
            size = self._item if value.is_computed else value.itemsize
            whole = whole_of(self._split, value.dims) / self._table.microbatches * size * value.times
            ways_of = ways * (1 + has_gradient / 2)
            found = found + self._over(group, "all-gather", whole * (group.size - 1) / group.size * ways_of, 0.0)
        for value, has_gradient, is_remade in put_in_order(part, self._split):
            again = (self._table.remat == REMATS.index("block")) & is_remade & (part.repeats > 1)
            times = ways * (1 + again + has_gradient) / 2
            size = self._item if value.is_computed else value.itemsize
            whole = whole_of(self._split, value.dims) / self._table.microbatches * size * value.times
            found = found + self._over(group, "all-gather", whole * (group.size - 1) / group.size * times, times)
        return found

    # -- between copies -----------------------------------------------------------------------------------------------
    def _kinds_of_weights(self) -> list[tuple[float, int]]:
        """Shares of all weights that a device holds, each with how many devices with different experts have the same:
        of experts that are shared out, none but itself."""
        size = self._split.sizes.get(EXPERT, 1)
        every = own = 0
        for part, some in zip(self._work.parts, self._split.weights, strict=False):
            every += part.repeats * sum(each.elements for each in some)
            own += part.repeats * sum(each.elements for each in some if EXPERT not in each.sums)
        mine = own / max(1, every) if size > 1 else 0.0
        return [(share, more) for share, more in ((1 - mine, size), (mine, 1)) if share]

    def _zero_group(self, more: int) -> Members:
        # Neighbours of a copy are inside, so a group's members are as far apart as a copy is large.
        return group_of(self._hardware, self._zero_size(more), self._inner // more, self._software.rings)

    def _zero_size(self, more: int) -> np.ndarray:
        return np.where(self._table.zero > 0, more * self._table.zero_group, 1).astype(float)

    def _others(self, more: int) -> Members:
        """Who adds up gradients beyond a ZeRO group: other copies, and devices that hold the same weights of one."""
        inside = [axis for axis in WITH_DATA if axis != EXPERT]
        alike = math.prod(self._split.sizes.get(axis, 1) for axis in inside)
        stride = np.where(alike > 1, self._inner / alike, self._inner // more * self._zero_size(more))
        size = more * self._table.data / self._zero_size(more) * alike
        return group_of(self._hardware, size, stride, self._software.rings)

    def _reduce(self, held: np.ndarray) -> tuple[Receipt, Receipt, Receipt, np.ndarray]:
        """Gradients within groups and between them, parameters of ZeRO 1 and 2; where gradients are reduced with
        each micro-batch."""
        every = [self._reduced(share * held, share, more) for share, more in self._kinds_of_weights()]
        scatter, between, gather = (functools.reduce(operator.add, some) for some in zip(*every, strict=True))
        return scatter, between, gather, self._reduces_each()

    def _reduces_each(self) -> np.ndarray:
        table = self._table
        return (table.zero == 3) | (self._meets_inside() & (table.microbatches > 1))

    def _reduced(self, held: np.ndarray, share: float, more: int) -> tuple[Receipt, Receipt, Receipt]:
        """The same of weights that are a share of all, alike on so many devices with different experts."""
        table, software, each = self._table, self._software, self._reduces_each()
        group, others = self._zero_group(more), self._others(more)
        # A device that adds up micro-batches of its own does so in float32; otherwise XLA reduces what a matmul made.
        size = software.gradient_bytes or np.where((table.microbatches > 1) & ~each, MASTER, self._item)
        part, apart = (group.size - 1) / group.size, (others.size - 1) / others.size
        layers = share * max(1, self._work.num_layers)
        kind, times = ("reduce-scatter", 1) if software.scatters else ("all-reduce", 2)
        scatter = self._over(group, kind, times * part * held * size, layers)
        between = self._over(others, "all-reduce", 2 * apart * held / group.size * size, layers)
        gathers = part * held * (software.weight_bytes or self._item), layers * software.gathers
        # Of ZeRO's dim XLA makes the outermost in memory, whichever it is.
        gather = self._over(group, "all-gather", *gathers, is_outer=True)
        return scatter, between, gather * (table.zero < 3)

    def _over(
        self, group: Members, kind: str, bytes_: np.ndarray, count: np.ndarray | float, is_outer: bool = False
    ) -> Receipt:
        found = Receipt.over(group, kind, bytes_, count, self._shares, self._meets)
        rate = self._kinds.get(kind, 1.0)
        return dataclasses.replace(
            found, fast=found.fast / self._kinds.get(OUTER + kind, rate) if is_outer else found.fast / rate
        )

    def _meets_inside(self) -> bool:
        return splits_examples(self._split) and self._software.is_lockstep

    # -- stages -------------------------------------------------------------------------------------------------------
    def _stages(self, stacks: list[Part], first: Ways, layer: Ways, last: Ways) -> tuple[np.ndarray, np.ndarray]:
        """Layers on a stage that has as many as any, and on the one with the last part."""
        table = self._table
        lengths = tuple(part.repeats for part in stacks)
        full = np.full(len(table), float(sum(lengths)))
        short = full.copy()
        if not lengths:
            return full, short
        head = last.forward.flops / np.maximum(layer.forward.flops, 1.0) * (not self._split.in_lockstep)
        columns = np.stack([table.pipeline, self._schedule, self._chunks])
        for stages, schedule, chunks in np.unique(columns, axis=1).T:
            rows = (columns.T == (stages, schedule, chunks)).all(axis=1)
            if stages > 1:
                full[rows], short[rows] = self._cut(lengths, int(stages), int(schedule), int(chunks), head[rows][0])
        return full, short

    def _cut(
        self, lengths: tuple[int, ...], stages: int, schedule: int, chunks: int, head: float
    ) -> tuple[float, float]:
        if self._software.is_lockstep:
            is_v = SCHEDULES[schedule] == "zero_bubble" and chunks == 2
            route = (*range(stages), *reversed(range(stages))) if is_v else tuple(range(stages)) * chunks
            cut = partition(lengths, route, head)
            ends = [block for block, stage in enumerate(route) if stage == route[-1]]
            return float(sum(cut.rows) * len(route) / stages / len(lengths)), float(sum(cut.count[b] for b in ends))
        # Where layers don't divide, the others count the embedding and the head as a layer each.
        num = sum(lengths)
        if num % stages == 0:
            return num / stages, num / stages
        full = -(-(num + 2) // stages)
        return float(full), float(full - 1)
