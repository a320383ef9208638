"""What a job is worth at each size: the terms that an allocation's sum is made of, and their concave hull."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cjax.scheduler.policy.job import Job

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The constants of the goodput policy.

    Attributes:
        power: of goodput / work left, in the sum that is made largest: the higher, the more those come first that
            soon end.
        horizon: seconds over which a restart has to pay for itself.
        least_factor: what a change leaves of a speed at least, however long the restart takes.
        prior: seconds on one device that a job of unknown length has left when it starts; later on it has as much left
            as it has behind it, as is true of lengths without a scale.
        patience: seconds without a device after which a job counts double, and from there on more and more.
    """

    power: float = 0.7
    horizon: float = 600.0
    least_factor: float = 0.3
    prior: float = 2000.0
    patience: float = 3600.0


RULES = Rules()


@dataclasses.dataclass(frozen=True)
class Worth:
    """A job's terms.

    Attributes:
        job: which.
        held: its size now.
        sizes: that it may have, upwards, 0 first.
        values: what it adds to the sum at each; 0 at 0.
        moved: what it adds at its size on other devices.
    """

    job: Job
    held: int
    sizes: tuple[int, ...]
    values: tuple[float, ...]
    moved: float

    @functools.cached_property
    def corners(self) -> list[int]:
        """Places of the sizes on the concave hull."""
        return hull(self.sizes, self.values)

    def at(self, size: int) -> float:
        return self.values[self.sizes.index(size)]


def worth_of(job: Job, held: int, room: Mapping[int, int], rules: Rules = RULES) -> Worth:
    """The terms of a job that holds `held` devices now, where there are so many nodes of each size.

    Its sizes are those of its table, within its range, that are a part of one node, or whole ones of the largest.
    """
    per_node = max(room)
    goodputs = job.speeds.goodputs(job.batch, job.noise)
    most = min(job.speeds.sizes[-1] if job.most is None else job.most, per_node * room[per_node])
    sizes, kept = [0], []
    for index, size in enumerate(job.speeds.sizes):
        if job.least <= size <= most and (size <= per_node or size % per_node == 0):
            sizes.append(size)
            kept.append(index)
    if not kept:
        return Worth(job, held, (0,), (0.0,), 0.0)
    goodput = goodputs[kept]
    left = work_left(job, float(goodputs[0]), rules)
    seconds = np.minimum(left / goodput, rules.horizon)
    factor = np.maximum(rules.least_factor, 1 - job.restart / np.maximum(seconds, 1e-9))
    impatience = 1 + (job.waited / rules.patience) ** 2
    changed = (impatience * factor * goodput / left) ** rules.power
    values = [0.0, *map(float, changed)]
    moved = 0.0
    if held in sizes[1:]:
        at = sizes.index(held)
        moved, values[at] = values[at], values[at] / float(factor[at - 1]) ** rules.power
    return Worth(job, held, tuple(sizes), tuple(values), moved)


def work_left(job: Job, slowest: float, rules: Rules) -> float:
    """Samples until the end, or what is to be expected of them."""
    if job.work_left is not None:
        return max(job.work_left, 1e-9)
    return job.work_done + rules.prior * slowest


def hull(sizes: Sequence[int], values: Sequence[float]) -> list[int]:
    """Indices of the upper concave hull, from the first up to the largest value."""
    last = max(range(len(values)), key=lambda index: (values[index], -index))
    kept: list[int] = []
    for index in range(last + 1):
        while len(kept) > 1 and _is_below(sizes, values, kept[-2], kept[-1], index):
            kept.pop()
        kept.append(index)
    return kept


def _is_below(sizes: Sequence[int], values: Sequence[float], left: int, middle: int, right: int) -> bool:
    """Whether the middle point lies on or under the line between the others."""
    rise = (values[middle] - values[left]) * (sizes[right] - sizes[left])
    return rise <= (values[right] - values[left]) * (sizes[middle] - sizes[left])
