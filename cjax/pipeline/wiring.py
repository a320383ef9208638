"""A schedule as the numbers that stages look up in each tick: which op, of what, from where and to where.

All stages run one program; what a stage does in a tick it reads from a row of integers. Messages and activations are
given places in buffers here, once, so that nothing is searched for while the pipeline runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cjax.pipeline.partition import Partition
from cjax.pipeline.route import Kind, block_of, needs, sends
from cjax.pipeline.table import Placed, Schedule

# Of each op: what it does (0: nothing, else 1 + its stack), its micro-batch, where its activations are kept, its first
# row and layer and how many there are, whether its block starts or ends a stack, and the message that it reads.
COLUMNS = ("does", "microbatch", "slot", "row", "layer", "count", "starts", "ends", "end_slot", "reads", "way")
WAYS = {1: "left", -1: "right"}  # what is sent to the right comes from the left


@dataclass(frozen=True)
class Wiring:
    """Tables of a schedule, each of shape [ticks, stages].

    Args:
      ops: for F, B and W, a table of each of `COLUMNS`.
      arrivals: for each source ("left", "right", and "F", "B" for what a stage hands itself) the place in the inbox to
        which its message goes; `num_messages` where there is none. Sources without any message are left out.
      num_messages: places in the inbox.
      slots: for each stack, places for the activations of a block.
      end_slots: for each stack, places for what its last layer hands on.
    """

    ops: Mapping[Kind, Mapping[str, np.ndarray]]
    arrivals: Mapping[str, np.ndarray]
    num_messages: int
    slots: tuple[int, ...]
    end_slots: tuple[int, ...]

    def ways(self, kind: Kind) -> set[int]:
        """The directions in which results of F or B leave."""
        return set(np.unique(self.ops[kind]["way"])) - {0}

    def turns(self, kind: Kind, name: str, stack: int, lockstep: bool) -> int:
        """In how many ticks a block of this stack does an op, or `starts` or `ends` the stack with it: on the stage
        where that is most often, or on any stage where all take part."""
        table = self.ops[kind]
        flags = (table["does"] == stack + 1) & (table[name] > 0)
        return int(flags.any(1).sum() if lockstep else flags.sum(0).max())


class _Pool:
    """Places that are taken and given back."""

    def __init__(self) -> None:
        self.size = 0
        self._free_from: list[int] = []

    def take(self, since: int, until: int) -> int:
        """A place that is free in tick `since`, taken up to and including tick `until`."""
        # Places are given to ops when the table is made, from the times at which they are taken and given back: so the
        # memory is what the schedule holds at most, and the program never has to look for room.
        for place, free in enumerate(self._free_from):
            if free <= since:
                self._free_from[place] = until + 1
                return place
        self._free_from.append(until + 1)
        self.size += 1
        return self.size - 1


def wire(schedule: Schedule, partition: Partition) -> Wiring:
    """The tables of `schedule` for layers cut as `partition` says."""
    shape = schedule.num_ticks, schedule.num_stages
    ops: dict[Kind, dict[str, np.ndarray]] = {
        kind: {name: np.zeros(shape, np.int32) for name in COLUMNS} for kind in ("F", "B", "W")
    }
    where = {(*at.op[:2], block_of(schedule.route, at.stage, at.op.chunk)): at for at in schedule.placed()}
    num_stacks, last = len(partition.rows), "W" if schedule.split else "B"
    slots = [[_Pool() for _ in range(num_stacks)] for _ in range(schedule.num_stages)]
    ends = [[_Pool() for _ in range(num_stacks)] for _ in range(schedule.num_stages)]
    taken: dict[tuple[int, int], tuple[int, int]] = {}
    for (kind, microbatch, block), at in sorted(where.items(), key=lambda item: (item[1].tick, item[0][0] != "F")):
        stack, key = partition.stack[block], (microbatch, block)
        if kind == "F" and schedule.forward_only:
            taken[key] = 0, 0
        elif kind == "F":
            # What F saves is read by B and, where there is one, by W; the last of them frees it.
            until = where[last, microbatch, block].tick
            backward = where["B", microbatch, block].tick
            # A place is written before it is read in one tick, so what a later op frees can't be taken before it.
            taken[key] = (
                slots[at.stage][stack].take(at.tick, until),
                ends[at.stage][stack].take(at.tick, backward) if partition.ends(block) else 0,
            )
        values = (
            1 + stack, microbatch, taken[key][0], partition.row(block), partition.first[block], partition.count[block],
            partition.starts(block), partition.ends(block), taken[key][1], 0,
            sends(schedule.route, kind, block),
        )  # fmt: skip
        for name, value in zip(COLUMNS, values, strict=True):
            ops[kind][name][at.tick, at.stage] = value
    arrivals, num_messages = _messages(schedule, where, ops)
    return Wiring(ops, arrivals, num_messages, _sizes(slots), _sizes(ends))


def _sizes(pools: list[list[_Pool]]) -> tuple[int, ...]:
    return tuple(max(pool.size for pool in of_stack) for of_stack in zip(*pools, strict=True))


def _messages(
    schedule: Schedule,
    where: Mapping[tuple[Kind, int, int], Placed],
    ops: Mapping[Kind, Mapping[str, np.ndarray]],
) -> tuple[dict[str, np.ndarray], int]:
    """Where each message waits; `reads` of the ops is filled in."""
    inboxes = [_Pool() for _ in range(schedule.num_stages)]
    found: dict[str, list[tuple[int, int, int]]] = {}
    route = schedule.route
    readers = sorted(where.items(), key=lambda item: _sent(item, where, len(route)))
    for (kind, microbatch, block), reader in readers:
        for source, source_block in needs(kind, block, len(route)):
            if source_block == block:
                continue
            sent = where[source, microbatch, source_block]
            # A message arrives at the end of its tick, so the place is taken from then on, and is free again in the
            # tick that reads it, whose own arrivals are written behind its ops.
            place = inboxes[reader.stage].take(sent.tick, reader.tick - 1)
            way = sends(route, source, source_block)
            found.setdefault(WAYS.get(way, source), []).append((sent.tick, reader.stage, place))
            ops[kind]["reads"][reader.tick, reader.stage] = place
    num = max(pool.size for pool in inboxes)
    arrivals = {}
    for source, places in found.items():
        # What arrives and is nobody's goes to a place behind all others: writing always is cheaper than asking whether
        # to.
        table = np.full((schedule.num_ticks, schedule.num_stages), num, np.int32)
        for tick, stage, place in places:
            table[tick, stage] = place
        arrivals[source] = table
    return arrivals, max(num, 1)


def _sent(item: tuple[tuple[Kind, int, int], Placed], where: Mapping[tuple[Kind, int, int], Placed], n: int) -> int:
    (kind, microbatch, block), at = item
    ticks = [where[source, microbatch, b].tick for source, b in needs(kind, block, n) if b != block]
    return ticks[0] if ticks else at.tick
