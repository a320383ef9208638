"""Policies that ours is compared with: first come, first served; Tiresias; Optimus."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cjax.scheduler.policy.job import Allocation, Job, Nodes, Placement, size_of


def fifo(jobs: Sequence[Job], nodes: Nodes, current: Allocation, now: float) -> dict[str, Placement]:
    """Each job gets what it asked for, in the order of submission.

    Who comes behind one that waits may overtake it where there is room, and nobody is ever moved.

    Args:
        jobs: all that have not ended.
        nodes: devices of each node.
        current: who holds what.
        now: seconds, of which nothing is made.

    >>> from cjax.scheduler.policy.job import Speed, SpeedTable
    >>> table = SpeedTable([Speed(1, 10.0)])
    >>> jobs = [Job("first", table, asked=3), Job("next", table, asked=2), Job("last", table, asked=1)]
    >>> fifo(jobs, {"node": 4}, current={}, now=0.0)
    {'first': {'node': (0, 1, 2)}, 'last': {'node': (3,)}}
    """
    del now
    kept = {job.name: current[job.name] for job in jobs if job.name in current}
    free = free_devices(nodes, kept.values())
    for job in sorted(jobs, key=lambda job: job.submitted):
        if job.name not in kept and job.asked <= sum(map(len, free.values())):
            kept[job.name] = take(free, job.asked)
    return kept


class Tiresias:
    """Two queues by attained service, as in Gu et al., NSDI 2019.

    Jobs that have held `threshold` device-seconds wait behind all that have not. Within a queue who came first is
    first. Sizes are those that users asked for. It keeps the order in which jobs were sent to the second queue, and is
    called round by round, as `fifo` is.

    Args:
        threshold: device-seconds.

    >>> from cjax.scheduler.policy.job import Speed, SpeedTable
    >>> table, policy = SpeedTable([Speed(1, 10.0)]), Tiresias(threshold=3600.0)
    >>> jobs = [Job("old", table, asked=4, service=7200.0), Job("new", table, asked=2)]
    >>> policy(jobs, {"node": 4}, current={}, now=0.0)
    {'new': {'node': (0, 1)}}
    """

    def __init__(self, threshold: float = 16 * 3600.0) -> None:
        self.threshold = threshold
        self._behind: dict[str, None] = {}

    def __call__(self, jobs: Sequence[Job], nodes: Nodes, current: Allocation, now: float) -> dict[str, Placement]:
        del now
        by_name = {job.name: job for job in jobs}
        self._behind |= {job.name: None for job in jobs if job.service >= self.threshold}
        first = [job.name for job in jobs if job.name not in self._behind]
        left, runs = sum(nodes.values()), []
        for name in [*first, *(name for name in self._behind if name in by_name)]:
            if by_name[name].asked <= left:
                left -= by_name[name].asked
                runs.append(name)
        kept = {name: current[name] for name in runs if name in current}
        free = free_devices(nodes, kept.values())
        return kept | {name: take(free, by_name[name].asked) for name in runs if name not in kept}


def optimus(jobs: Sequence[Job], nodes: Nodes, current: Allocation, now: float) -> dict[str, Placement]:
    """Device by device to the job whose end it brings nearest, as in Peng et al., EuroSys 2018.

    Each has one device first. What is left of each job has to be known.

    Args:
        jobs: all that have not ended.
        nodes: devices of each node.
        current: who holds what.
        now: seconds, of which nothing is made.

    >>> from cjax.scheduler.policy.job import Speed, SpeedTable
    >>> table = SpeedTable([Speed(1, 10.0), Speed(2, 19.0), Speed(3, 27.0)])
    >>> jobs = [Job("long", table, work_left=10_000.0), Job("short", table, work_left=100.0)]
    >>> optimus(jobs, {"node": 4}, current={}, now=0.0)
    {'short': {'node': (0,)}, 'long': {'node': (1, 2, 3)}}
    """
    del now
    left = sum(nodes.values())
    sizes: dict[str, int] = {}
    gains: dict[str, float] = {}
    ends = {job.name: _seconds_left(job) for job in jobs}
    for job in jobs:
        sizes[job.name] = min(1, left)
        left -= sizes[job.name]
        gains[job.name] = _gain(ends[job.name], sizes[job.name]) if left and sizes[job.name] else 0.0
    while left and gains:
        name = max(gains, key=lambda name: gains[name])
        if gains[name] <= 0:
            break
        sizes[name] += 1
        left -= 1
        gains[name] = _gain(ends[name], sizes[name]) if left else 0.0
    kept = {name: current[name] for name, size in sizes.items() if size and size_of(current.get(name)) == size}
    free = free_devices(nodes, kept.values())
    waiting = sorted((name for name, size in sizes.items() if size and name not in kept), key=lambda name: sizes[name])
    return kept | {name: take(free, sizes[name]) for name in waiting}


def _seconds_left(job: Job) -> Mapping[int, float]:
    """By number of devices."""
    assert job.work_left is not None, "Optimus is told what is left of each job"
    most = job.most or job.speeds.sizes[-1]
    goodputs = job.speeds.goodputs(job.batch, job.noise)
    return {
        size: job.work_left / goodput
        for size, goodput in zip(job.speeds.sizes, goodputs, strict=True)
        if size <= most and np.isfinite(goodput)
    }


def _gain(seconds: Mapping[int, float], size: int) -> float:
    return seconds[size] - seconds[size + 1] if size + 1 in seconds else 0.0


# -- devices ----------------------------------------------------------------------------------------------------------
def free_devices(nodes: Nodes, held: Iterable[Placement]) -> dict[str, list[int]]:
    """The numbers of the devices of each node that nobody holds."""
    taken: dict[str, set[int]] = {}
    for placement in held:
        for node, devices in placement.items():
            taken.setdefault(node, set()).update(devices)
    return {node: [d for d in range(size) if d not in taken.get(node, ())] for node, size in nodes.items()}


def take(free: dict[str, list[int]], size: int) -> dict[str, tuple[int, ...]]:
    """So many devices from `free`, the emptiest nodes first."""
    taken: dict[str, tuple[int, ...]] = {}
    while size:
        node = max(free, key=lambda node: len(free[node]))
        number = min(len(free[node]), size)
        assert number, "there are as many as are asked for"
        taken[node] = tuple(free[node][:number])
        del free[node][:number]
        size -= number
    return taken
