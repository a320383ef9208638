"""A size for each job: up the hulls of what sizes are worth, steepest step first; by a table where that is cheap."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cjax.scheduler.policy.packing import fits
from cjax.scheduler.policy.worth import Worth

# Sizes of all jobs together, up to which a table is filled: some microseconds each. Where there are more, a single step
# is nothing beside the sum, and steps along the hulls come as near to the largest.
MOST_CHOICES = 4000


def choose(
    worths: Sequence[Worth],
    nodes: Mapping[int, int],
    kept: Mapping[str, int] | None = None,
    steps: Sequence["Rise"] | None = None,
) -> dict[str, int]:
    """A size for each job, 0 for who waits.

    Args:
        worths: of the jobs.
        nodes: how many there are of each size.
        kept: sizes that no job goes below, if the others are to come out of what is free beside them.
        steps: `steps_of(worths)`, if they are known: of a thousand jobs, they are most of the time.
    """
    picked = PickedSizes(worths, nodes, kept or {})
    for step in steps_of(worths) if steps is None else steps:
        if not picked.free:
            break
        picked.raise_to(step.job, step.at)
    picked.fill()
    if kept is None and sum(len(worth.sizes) for worth in worths) <= MOST_CHOICES:
        picked = max(picked, _by_table(worths, nodes), key=lambda each: each.total)
    return {worth.job.name: picked.size(index) for index, worth in enumerate(worths)}


def _by_table(worths: Sequence[Worth], nodes: Mapping[int, int]) -> "PickedSizes":
    """The largest sum for so many devices, as far as its sizes go onto the nodes: most worth a device first."""
    picked = PickedSizes(worths, nodes, {})
    best = knapsack(worths, picked.free)
    density = [worth.values[at] / max(1, worth.sizes[at]) for worth, at in zip(worths, best, strict=True)]
    for index in sorted(range(len(worths)), key=lambda index: -density[index]):
        picked.raise_to(index, best[index])
    picked.fill()
    return picked


def knapsack(worths: Sequence[Worth], room: int) -> list[int]:
    """Places among the jobs' sizes that make the largest sum, however the devices are spread over nodes."""
    best = np.zeros(room + 1)  # of the jobs so far, by devices
    picks = []
    for worth in worths:
        before, best, pick = best, best.copy(), np.zeros(room + 1, int)
        for at, size in enumerate(worth.sizes[1:], 1):
            if size > room:
                break
            value = before[:-size] + worth.values[at]
            better = value > best[size:]
            best[size:][better] = value[better]
            pick[size:][better] = at
        picks.append(pick)
    found, left = [], room
    for worth, pick in zip(reversed(worths), reversed(picks), strict=True):
        found.append(int(pick[left]))
        left -= worth.sizes[found[-1]]
    return found[::-1]


class Rise(NamedTuple):
    """From one corner of a job's hull to the next."""

    loss: float  # what each further device adds, below 0, so that the steepest step is the least
    job: int
    at: int


def steps_of(worths: Sequence[Worth]) -> list[Rise]:
    """Of all jobs, the steepest first."""
    found = []
    for index, worth in enumerate(worths):
        for before, after in zip(worth.corners, worth.corners[1:], strict=False):
            gain = worth.values[after] - worth.values[before]
            found.append(Rise(-gain / (worth.sizes[after] - worth.sizes[before]), index, after))
    return sorted(found)


class PickedSizes:
    """Sizes as they are picked, and whether they go onto the nodes."""

    def __init__(self, worths: Sequence[Worth], nodes: Mapping[int, int], kept: Mapping[str, int]) -> None:
        self.worths, self.nodes = worths, nodes
        self.at = [worth.sizes.index(kept.get(worth.job.name, 0)) for worth in worths]
        self.count = Counter(size for index in range(len(worths)) if (size := self.size(index)))
        self.free = sum(size * number for size, number in nodes.items())
        self.free -= sum(size * number for size, number in self.count.items())

    @property
    def total(self) -> float:
        return sum(worth.values[at] for worth, at in zip(self.worths, self.at, strict=True))

    def size(self, index: int) -> int:
        return self.worths[index].sizes[self.at[index]]

    def raise_to(self, index: int, at: int) -> bool:
        """Gives a job this size, by its place, or of those below the one that is worth most, where there is room and
        it is worth more than what the job has; False if there is none.

        Not the next below: a job that is slower in the middle of its range would be cut back to where it is slow, at
        more devices than a size that is worth more.
        """
        values, now = self.worths[index].values, self.at[index]
        better = [lower for lower in range(now + 1, at + 1) if values[lower] > values[now]]
        return any(self._raise(index, lower) for lower in sorted(better, key=lambda lower: (-values[lower], lower)))

    def _raise(self, index: int, at: int) -> bool:
        before, after = self.size(index), self.worths[index].sizes[at]
        if after - before > self.free:
            return False
        count = self.count.copy()
        count[after] += 1
        if before:
            count[before] -= 1
        if not fits(count, self.nodes):
            return False
        self.count, self.free, self.at[index] = count, self.free - (after - before), at
        return True

    def fill(self) -> None:
        """Gives away what no step had room for: the single change that adds most, until none adds any."""
        while self.free:
            ups = sorted(self._ups(), reverse=True)
            if not any(self._raise(index, at) for _, index, at in ups):
                return

    def _ups(self) -> Iterator[tuple[float, int, int]]:
        """What each job would gain by more of the free devices: gain, job, place among its sizes."""
        for index, worth in enumerate(self.worths):
            before, value = self.size(index), worth.values[self.at[index]]
            for at in range(self.at[index] + 1, len(worth.sizes)):
                if worth.sizes[at] - before > self.free:
                    break
                if (gain := worth.values[at] - value) > 0:
                    yield gain, index, at
