"""What a schedule is: a table of ticks, and the laws that every table obeys, ours or a user's.

All stages go through the table in lockstep. In one tick a stage runs at most one F, then at most one B, then at most
one W: F is the forward of a micro-batch through a chunk of layers, B its backward, W the gradient of its weights. In a
table without W, B is the whole backward; in a table with W, it is the gradient of the input alone. What F and B hand to
another stage is transferred between two ticks, one message to the right and one to the left at most, so the earliest
tick that can use it is the next one. Within a tick the order counts: the last chunk may run F and B of one micro-batch
in one tick, and W may follow its own B.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from cjax.pipeline.route import KINDS, Kind, block_of, check_route, chunk_of, needs, sends

ORDERS = ("F", "B", "W", "FB", "FW", "BW", "FBW")


class Op(NamedTuple):
    """One micro-batch through one chunk of a stage's layers: forward, backward, or the gradient of the weights.

    Attributes:
      kind: "F", "B" or "W".
      microbatch: its number, from 0.
      chunk: which of the stage's chunks of layers, from 0.

    >>> str(Op("F", 3)), str(Op("B", 0, chunk=1))
    ('F3', 'B0 of chunk 1')
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


class Placed(NamedTuple):
    """Where an op stands in the table."""

    tick: int
    stage: int
    op: Op

    def __str__(self) -> str:
        return f"{self.op} on stage {self.stage} in tick {self.tick}"


Ticks = tuple[tuple[tuple[Op, ...], ...], ...]


@dataclass(frozen=True)
class Schedule:
    """A table that obeys the laws: making one checks it. A table of F alone is for evaluation.

    Args:
      name: for people.
      route: the stage of each block of layers, in the model's order: (0, 1, 0, 1) gives two stages two chunks each in a
        ring, (0, 1, 1, 0) in a V. A block's neighbours live on the same stage or the one beside it.
      num_microbatches: pieces of the batch.
      slots: chunk activations that every stage has room for. One is taken by F and given back by W, or by B where the
        table has no W.
      ticks: `ticks[tick][stage]` is what the stage runs in that tick, in order.

    Raises:
      ValueError: the table breaks a law; the text names the op and the law.

    >>> f, b = Op("F", 0), Op("B", 0)
    >>> Schedule("one", (0, 1), 1, 1, (((f,), ()), ((), (f, b)), ((b,), ()))).num_ticks
    3
    >>> Schedule("late", (0, 1), 1, 1, (((f,), (f, b)), ((b,), ())))
    Traceback (most recent call last):
    ValueError: schedule late: F0 on stage 1 in tick 0 reads what F0 on stage 0 in tick 0 sends, there from tick 1
    """

    name: str
    route: tuple[int, ...]
    num_microbatches: int
    slots: int
    ticks: Ticks

    def __post_init__(self) -> None:
        # A user's own table comes this way too. One that breaks a law would not fail when it runs: it would read places
        # that somebody else has written, and train on them.
        check(self)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline: p."""
        return max(self.route) + 1

    @property
    def num_chunks(self) -> int:
        """Chunks of layers that each stage holds."""
        return len(self.route) // self.num_stages

    @property
    def num_ticks(self) -> int:
        """Rows of the table: how many ticks one batch takes."""
        return len(self.ticks)

    @cached_property
    def split(self) -> bool:
        """Whether the backward is in two, B and W."""
        return any(placed.op.kind == "W" for placed in self.placed())

    @cached_property
    def forward_only(self) -> bool:
        """Whether the table has F alone, as for evaluation."""
        return all(placed.op.kind == "F" for placed in self.placed())

    def placed(self) -> Iterator[Placed]:
        """Every op of the table: tick by tick, stage by stage, in running order."""
        for tick, row in enumerate(self.ticks):
            for stage, ops in enumerate(row):
                for op in ops:
                    yield Placed(tick, stage, op)

    def order(self, stage: int) -> list[Op]:
        """What one stage runs, first to last."""
        return [op for row in self.ticks for op in row[stage]]

    def held(self) -> tuple[int, ...]:
        """For each stage, the most chunk activations it holds at once; divide by `num_chunks` for whole stages."""
        return held_in(self.ticks)

    def waiting(self) -> tuple[int, int]:
        """The most messages, (activations, gradients), that one stage has to put aside at once.

        (0, 0) where every message is used in the tick after it was sent; then nobody needs an inbox.
        """
        route = self.route
        where = {(*at.op[:2], block_of(route, at.stage, at.op.chunk)): at for at in self.placed()}
        aside: Counter[tuple[Kind, int, int]] = Counter()
        for (kind, microbatch, block), reader in where.items():
            for source, source_block in needs(kind, block, len(route)):
                if source_block != block:
                    sent = where[source, microbatch, source_block].tick
                    aside.update((kind, reader.stage, tick) for tick in range(sent + 1, reader.tick))
        activations, gradients = (max((n for key, n in aside.items() if key[0] == kind), default=0) for kind in "FB")
        return activations, gradients


def held_in(ticks: Ticks) -> tuple[int, ...]:
    """For each stage, the most chunk activations that these ticks make it hold at once."""
    orders = [[op for row in ticks for op in row[stage]] for stage in range(len(ticks[0]) if ticks else 0)]
    last = "W" if any(op.kind == "W" for order in orders for op in order) else "B"
    changes = [[(op.kind == "F") - (op.kind == last) for op in order] for order in orders]
    return tuple(max(accumulate(change), default=0) for change in changes)


def check(schedule: Schedule) -> None:
    """The laws of a table; making a `Schedule` checks them.

    1. Every stage has equally many chunks, and blocks that follow each other live on one stage or on neighbours.
    2. A stage runs at most one F, one B and one W in a tick, in that order.
    3. Every (micro-batch, chunk) on every stage has exactly one F and one B, and one W if any has. In a table of F
       alone, for evaluation, it has the F.
    4. F comes after the previous block's F, B after its own F and the next block's B, W after its own B: from another
       tick wherever it comes from another block.
    5. A stage sends at most one message to the right and one to the left in a tick.
    6. No stage holds more chunk activations than `slots`.

    Args:
      schedule: the table.

    Raises:
      ValueError: the first law that is broken, with the op that breaks it.

    >>> from cjax.pipeline import build
    >>> check(build("1f1b", 2, 4))  # says nothing: the table keeps them
    """
    where = f"schedule {schedule.name}:"
    check_route(where, schedule.route)
    _check_rows(where, schedule)
    tick_of = _check_complete(where, schedule)
    _check_order(where, schedule, tick_of)
    _check_links(where, schedule)
    _check_slots(where, schedule)


def _check_rows(where: str, schedule: Schedule) -> None:
    """Law 2, and that ops are of micro-batches and chunks that there are."""
    if schedule.num_microbatches < 1:
        raise ValueError(f"{where} it needs 1 micro-batch or more, not {schedule.num_microbatches}")
    for tick, row in enumerate(schedule.ticks):
        if len(row) != schedule.num_stages:
            raise ValueError(f"{where} tick {tick} has {len(row)} entries for {schedule.num_stages} stages")
    microbatches, chunks = range(schedule.num_microbatches), range(schedule.num_chunks)
    for tick, stage, op in schedule.placed():
        kinds = "".join(other.kind for other in schedule.ticks[tick][stage])
        if kinds not in ORDERS:
            at = f"{where} {Placed(tick, stage, op)} stands in {kinds}"
            raise ValueError(f"{at}: a tick takes at most one F, then one B, then one W a stage")
        if op.microbatch not in microbatches or op.chunk not in chunks:
            counts = f"{schedule.num_microbatches} micro-batches and {schedule.num_chunks} chunks a stage"
            raise ValueError(f"{where} {Placed(tick, stage, op)}: the table is for {counts}, counted from 0")


def _check_complete(where: str, schedule: Schedule) -> dict[tuple[Kind, int, int], int]:
    """The tick of each (kind, micro-batch, block)."""
    tick_of: dict[tuple[Kind, int, int], int] = {}
    for placed in schedule.placed():
        kind, microbatch, chunk = placed.op
        key = kind, microbatch, block_of(schedule.route, placed.stage, chunk)
        if key in tick_of:
            raise ValueError(f"{where} {placed} ran in tick {tick_of[key]} already: every op runs exactly once")
        tick_of[key] = placed.tick
    for kind in KINDS[:1] if schedule.forward_only else KINDS if schedule.split else KINDS[:2]:
        for microbatch in range(schedule.num_microbatches):
            for block, stage in enumerate(schedule.route):
                if (kind, microbatch, block) not in tick_of:
                    op = Op(kind, microbatch, chunk_of(schedule.route, block))
                    raise ValueError(f"{where} {op} on stage {stage} is missing: every op runs exactly once")
    return tick_of


def _check_order(where: str, schedule: Schedule, tick_of: dict[tuple[Kind, int, int], int]) -> None:
    """Law 4."""
    route = schedule.route
    for (kind, microbatch, block), tick in tick_of.items():
        for source, source_block in needs(kind, block, len(route)):
            sent = tick_of[source, microbatch, source_block]
            # From another block a result comes by message, at the end of its tick, even if both live on one stage:
            # there is one rule for all.
            if tick < sent + (source_block != block):
                op, stage = Op(kind, microbatch, chunk_of(route, block)), route[block]
                other = Op(source, microbatch, chunk_of(route, source_block))
                raise ValueError(
                    f"{where} {Placed(tick, stage, op)} reads what {Placed(sent, route[source_block], other)} sends, "
                    f"there from tick {sent + (source_block != block)}"
                )


def _check_links(where: str, schedule: Schedule) -> None:
    """Law 5."""
    for tick, row in enumerate(schedule.ticks):
        for stage, ops in enumerate(row):
            sent: dict[int, Op] = {}
            for op in ops:
                way = sends(schedule.route, op.kind, block_of(schedule.route, stage, op.chunk))
                if way and way in sent:
                    side = "right" if way > 0 else "left"
                    raise ValueError(
                        f"{where} {Placed(tick, stage, op)} and {sent[way]} both send to the {side}: "
                        "a tick takes one message each way"
                    )
                sent[way] = op


def _check_slots(where: str, schedule: Schedule) -> None:
    """Law 6."""
    # Op by op and not tick by tick: within a tick F takes its place before B gives one back.
    last, now, most = "W" if schedule.split else "B", Counter[int](), max(schedule.held())
    for placed in schedule.placed():
        now[placed.stage] += (placed.op.kind == "F") - (placed.op.kind == last)
        if now[placed.stage] > schedule.slots:
            raise ValueError(
                f"{where} {placed} is one activation more than slots={schedule.slots}: "
                f"give slots={most}, or run backwards earlier"
            )
