"""How long a schedule takes, and how much of that is idle, from the times of F, B, W and a transfer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cjax.pipeline.route import Kind, block_of, needs, sends
from cjax.pipeline.table import Op, Schedule


@dataclass(frozen=True)
class Times:
    """Times of one micro-batch through one whole stage, in any one unit; a chunk takes its share of the stage's.

    Args:
      forward: F; one number, or one for each stage, as the next two.
      backward: B, the gradient of the input alone.
      weight: W. A schedule that does not split the backward spends backward + weight on its B.
      transfer: from a stage to its neighbour.

    Raises:
      ValueError: a time that is no number, or is below 0.

    >>> times = Times(forward=(1.0, 2.0), backward=1.5)
    >>> times.of("F", stage=1), times.of("B", stage=1)
    (2.0, 1.5)
    """

    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "transfer"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(number, int | float) and 0 <= number < float("inf") for number in numbers):
                raise ValueError(f"Times({name}={value!r}): times are numbers, 0 or more")

    def of(self, kind: Kind, stage: int) -> float:
        """Of one whole stage, the backward in two."""
        value = {"F": self.forward, "B": self.backward, "W": self.weight}[kind]
        return value[stage] if isinstance(value, tuple) else value


class Span(NamedTuple):
    """When a stage ran an op."""

    stage: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found: when each op ran, and how much of the time was lost; in the unit of `Times`.

    Args:
      schedule: what ran.
      spans: when each op ran, in the table's order.
      makespan: from the first op's start to the last one's end.

    >>> from cjax.pipeline.schedule import gpipe
    >>> found = simulate(gpipe(2, 3))  # F takes 1 and B 2, the two halves of the backward
    >>> found.makespan, found.work, found.bubble
    (12.0, (9.0, 9.0), 0.25)
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    makespan: float

    @cached_property
    def work(self) -> tuple[float, ...]:
        """For each stage, the time it computes."""
        return tuple(sum(s.end - s.start for s in self.spans if s.stage == r) for r in range(self.schedule.num_stages))

    @property
    def bubble(self) -> float:
        """The share of all stages' time, from the first op to the last, in which they wait."""
        return 1 - sum(self.work) / (self.makespan * self.schedule.num_stages) if self.makespan else 0.0

    @property
    def stage_bubble(self) -> float:
        """As the zero-bubble papers count: the worst stage, each from its own first op to its own last.

        What a stage waits for its first micro-batch is not in it: there, the optimizer's step ends as staggered as the
        next step starts. Behind an update that waits for all stages, `bubble` is what is lost.
        """
        bubbles = []
        for stage, work in enumerate(self.work):
            mine = [span for span in self.spans if span.stage == stage]
            bubbles.append(1 - work / ((mine[-1].end - mine[0].start) or 1.0))
        return max(bubbles)

    @property
    def in_flight(self) -> tuple[float, ...]:
        """For each stage, the most activations it holds at once, in those of one micro-batch and a whole stage.

        The order of a stage's ops alone decides it, whatever the times.
        """
        return tuple(held / self.schedule.num_chunks for held in self.schedule.held())


def simulate(schedule: Schedule, times: Times = Times(), lockstep: bool = True) -> Simulation:
    """Runs a schedule on paper.

    Args:
      schedule: any table.
      times: of a whole stage.
      lockstep: as the executor does it: a tick ends for all stages when the slowest one is through and all that was
        sent has arrived. A transfer starts when its op ends, so that later ops of the tick hide it. False is the
        papers' semantics: a stage runs its ops in the table's order, each as soon as its inputs are there; transfers
        delay only those who wait for them.

    Raises:
      ValueError: times for another number of stages.

    >>> from cjax.pipeline.schedule import one_f_one_b
    >>> round(simulate(one_f_one_b(4, 9)).bubble, 6)  # 3 / (9 + 3)
    0.25
    """
    for name in ("forward", "backward", "weight"):
        value = getattr(times, name)
        if isinstance(value, tuple) and len(value) != schedule.num_stages:
            raise ValueError(
                f"Times({name}={value}): {len(value)} times for {schedule.num_stages} stages; give one for each, or "
                "one number for all"
            )
    spans = tuple(_lockstep(schedule, times) if lockstep else _by_stage(schedule, times))
    return Simulation(schedule, spans, max((span.end for span in spans), default=0.0))


def _duration(schedule: Schedule, times: Times, stage: int, op: Op) -> float:
    whole = times.of(op.kind, stage)
    if op.kind == "B" and not schedule.split:
        whole += times.of("W", stage)
    return whole / schedule.num_chunks


def _lockstep(schedule: Schedule, times: Times) -> Iterator[Span]:
    """Tick by tick: the next one starts when all stages are through, and all messages there."""
    start = 0.0
    for row in schedule.ticks:
        through = start
        for stage, ops in enumerate(row):
            now = start
            for op in ops:
                yield Span(stage, op, now, now := now + _duration(schedule, times, stage, op))
                moves = sends(schedule.route, op.kind, block_of(schedule.route, stage, op.chunk)) != 0
                # What is sent has to be there before anybody's next tick starts: that is where lockstep waits, and the
                # papers' stages do not.
                through = max(through, now + times.transfer * moves)
        start = through


def _by_stage(schedule: Schedule, times: Times) -> Iterator[Span]:
    """Ops in the table's order: whatever an op needs stands before it there."""
    route = schedule.route
    done: dict[tuple[Kind, int, int], float] = {}
    free = [0.0] * schedule.num_stages
    for _, stage, op in schedule.placed():
        block = block_of(route, stage, op.chunk)
        start = free[stage]
        for kind, source in needs(op.kind, block, len(route)):
            moved = times.transfer if route[source] != stage else 0.0
            start = max(start, done[kind, op.microbatch, source] + moved)
        free[stage] = done[op.kind, op.microbatch, block] = start + _duration(schedule, times, stage, op)
        yield Span(stage, op, start, free[stage])
