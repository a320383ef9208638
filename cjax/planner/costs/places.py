"""Room that a stage of a pipeline has: what a schedule's table and its wiring come to, without making them."""

from cjax.pipeline.partition import Partition
from cjax.pipeline.schedule import build
from cjax.pipeline.wiring import wire

Places = tuple[tuple[int, ...], tuple[int, ...], int]  # by stack: of blocks, of what ends a stack; of messages


def places(kind: str, stages: int, microbatches: int, chunks: int, cut: Partition) -> Places:
    """Places for activations of blocks, for what ends a stack, both by stack, and for messages.

    Of one stack of layers they follow from a few numbers: `tests/planner/costs/test_places.py` holds them against the
    tables. Of several, the table itself is made.

    Args:
      kind: of schedule, 1F1B of several stacks as the interleaved one that it is.
      stages, microbatches, chunks: of the schedule.
      cut: the layers of each block.
    """
    p, m, v = stages, microbatches, chunks
    if len(cut.rows) > 1:
        # Places are full after two micro-batches a stage; gpipe keeps all.
        wiring = wire(build(kind, p, m if kind == "gpipe" else min(m, 2 * p), v), cut)
        return wiring.slots, wiring.end_slots, wiring.num_messages
    if kind == "gpipe":
        return (m,), (m,), 1
    if v == 1:  # 1f1b, and zero_bubble whose W waits no longer than the stages behind
        return (min(m, 2 * p - 1),), (1,), 2 if p > 2 and m > 2 else 1
    if kind == "zero_bubble":
        return (min(2 * m, max(2 * p + 1, (5 * p - 1) // 2)),), (1,), 2 if m > 1 else 1
    return (min(v * m, v * p + p - 1),), (1,), 1 if p == m == 2 else 2


def route_of(kind: str, stages: int, chunks: int) -> tuple[int, ...]:
    """The stage of each block of layers: a V for the zero bubble of two chunks, round and round for all others.

    >>> route_of("zero_bubble", 3, 2), route_of("interleaved", 3, 2)
    ((0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2))
    """
    down = tuple(range(stages))
    return (*down, *reversed(down)) if kind == "zero_bubble" and chunks == 2 else down * chunks
