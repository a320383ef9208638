"""A workload under a policy: rounds, restarts, and what came of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cjax.scheduler.policy.job import Allocation, Job, Nodes, Placement, Policy
from cjax.scheduler.replay.simulated import SimulatedJob, Submission


@dataclasses.dataclass(frozen=True)
class Holding:
    """Who held what, from when to when."""

    job: str
    placement: Placement
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What came of a workload.

    Attributes:
        seconds: of each job from its submission to its end.
        makespan: seconds from the first submission to the last end.
        utilisation: share of the device-seconds until then that were held.
        computing: the same, in which devices computed: the rest of what is held is starts, and waiting for each other.
        restarts: of each job, its first start not among them.
        holdings: who held what.
    """

    seconds: dict[str, float]
    makespan: float
    utilisation: float
    computing: float
    restarts: dict[str, int]
    holdings: tuple[Holding, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.seconds.values())))

    def quantile(self, share: float) -> float:
        return float(np.quantile(list(self.seconds.values()), share))


@dataclasses.dataclass(frozen=True)
class Setting:
    """How jobs are simulated under a policy.

    Attributes:
        policy: the policy.
        told: what it is told of a job.
        adapts: whether jobs choose their batch.
        learns: whether they know of their speeds only what they ran.
    """

    policy: Policy
    told: Callable[[SimulatedJob], Job]
    adapts: bool = False
    learns: bool = False


def simulate(
    submissions: Sequence[Submission],
    nodes: Nodes,
    setting: Setting,
    *,
    period: float = 60.0,
    restart: float = 30.0,
    deaths: Mapping[str, float] | None = None,
) -> Replayed:
    """What a policy does with the jobs, asked every `period` seconds, and at once when a node dies or a job's range is
    changed; each start and change costs one `restart`.

    Args:
        submissions: the jobs.
        nodes: devices of each.
        setting: the policy, and what it is told.
        period: seconds from one decision to the next, at whole multiples of it.
        restart: seconds that a start or a change costs.
        deaths: nodes that are gone from a time on, until which jobs on them go on.

    Raises:
        ValueError: jobs wait that no policy gives a device any more.
    """
    coming = sorted(submissions, key=lambda submission: submission.time)
    active: list[SimulatedJob] = []
    ended: list[SimulatedJob] = []
    current: Allocation = {}
    holdings = _Holdings()
    there = dict(nodes)
    round_ = math.floor(coming[0].time / period)
    others = {*(deaths or {}).values(), *(when for each in submissions for when, *_ in each.ranges)}
    sudden = sorted(when for when in others if when > round_ * period)
    while coming or active:
        now = (round_ + 1) * period
        if sudden and sudden[0] < now:
            now = sudden.pop(0)
        else:
            round_ += 1
        for node, when in [(node, when) for node, when in (deaths or {}).items() if when <= now and node in there]:
            del there[node]
            for job in active:
                job.advance(max(when, job.time))
                if node in job.placement:
                    holdings.change(job.submission.name, None, job.end or when)
                    job.place(None)
        for job in active:
            job.advance(now)
        while coming and coming[0].time <= now:
            next_ = coming.pop(0)
            cost = restart if next_.restart is None else next_.restart
            active.append(SimulatedJob(next_, setting.adapts, cost, setting.learns))
            active[-1].advance(now)
        for job in active:
            if job.end is not None:
                holdings.change(job.submission.name, None, job.end)
                ended.append(job)
        active = [job for job in active if job.end is None]
        current = {job.submission.name: job.placement for job in active if job.placement}
        if not active:
            continue
        for job in active:
            job.follow(now)
        given = setting.policy([setting.told(job) for job in active], there, current, now)
        if not given and not coming and not sudden:
            waiting = ", ".join(job.submission.name for job in active)
            raise ValueError(f"{waiting} would wait for ever: no size that they may have goes onto these nodes")
        moved = [job for job in active if given.get(job.submission.name, {}) != job.placement]
        for job in moved:
            holdings.change(job.submission.name, given.get(job.submission.name), now)
        left = _left_until(moved, now)
        for job in moved:
            placement = given.get(job.submission.name)
            free = [left.get(device, now) for device in _devices(placement)]
            job.place(placement, max([now + job.submission.leaves * bool(job.placement), *free]) - now)
    return _outcome(ended, nodes, holdings.done)


def _left_until(moved: Sequence[SimulatedJob], now: float) -> dict[tuple[str, int], float]:
    """When those who are moved have left their devices."""
    return {device: now + job.submission.leaves for job in moved for device in _devices(job.placement)}


def _devices(placement: Placement | None) -> list[tuple[str, int]]:
    return [(node, device) for node, devices in (placement or {}).items() for device in devices]


class _Holdings:
    """Kept as placements change."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Placement, float]] = {}
        self.done: list[Holding] = []

    def change(self, name: str, placement: Placement | None, now: float) -> None:
        if name in self._held:
            before, start = self._held.pop(name)
            self.done.append(Holding(name, before, start, now))
        if placement:
            self._held[name] = (placement, now)


def _outcome(jobs: Sequence[SimulatedJob], nodes: Nodes, holdings: Sequence[Holding]) -> Replayed:
    ends = {job.submission.name: job.end or math.inf for job in jobs}
    first = min(job.submission.time for job in jobs)
    makespan = max(ends.values()) - first
    there = makespan * sum(nodes.values())
    return Replayed(
        {job.submission.name: ends[job.submission.name] - job.submission.time for job in jobs},
        makespan,
        sum(job.service for job in jobs) / there,
        sum(job.computed for job in jobs) / there,
        {job.submission.name: job.num_restarts for job in jobs},
        tuple(holdings),
    )
