"""What a policy knows: jobs as tables of speeds, nodes as numbers of devices, and who holds what."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Nodes = Mapping[str, int]  # devices of each node
Placement = Mapping[str, tuple[int, ...]]  # of each node that a job is on, the numbers of the devices that it holds
Allocation = Mapping[str, Placement]  # by the names of jobs; who waits is not in it
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a job runs on so many devices, in one of its ways to do so.

    Attributes:
        devices: how many; up to the devices of a node they are on one node, and more are whole nodes.
        samples_per_second: of the global batch.
        batch: rows of the global batch.
        plan: how the job is spread over the devices.

    Raises:
        ValueError: no device, or a speed or a batch that is not above 0.

    `cjax.scheduler.policy.job.SpeedTable` has an example.
    """

    devices: int
    samples_per_second: float
    batch: float = 1.0
    plan: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.samples_per_second > 0 or not self.batch > 0:
            raise ValueError(f"{self}: a speed is of one device or more, above 0 samples/s and of a batch above 0")


class SpeedTable:
    """All ways to run a job: the best of each size depends on what a larger batch is worth at the time.

    Args:
        speeds: one for each way; several may be of one size.

    Raises:
        ValueError: no speed at all.

    >>> table = SpeedTable([Speed(1, 100.0, batch=32), Speed(2, 150.0, batch=32), Speed(2, 190.0, batch=64)])
    >>> table.sizes
    (1, 2)
    >>> table.best(2, batch=32, noise=0.0).batch, table.best(2, batch=32, noise=1000.0).batch
    (32, 64)
    """

    def __init__(self, speeds: Sequence[Speed]) -> None:
        if not speeds:
            raise ValueError("a table of speeds needs one at least: Speed(devices=1, samples_per_second=...)")
        self.speeds = tuple(sorted(speeds, key=lambda speed: speed.devices))
        self.rates = np.array([speed.samples_per_second for speed in self.speeds])
        self.batches = np.array([speed.batch for speed in self.speeds])
        sizes, starts = np.unique([speed.devices for speed in self.speeds], return_index=True)
        self.sizes: tuple[int, ...] = tuple(int(size) for size in sizes)
        self._starts = starts

    @functools.cached_property
    def _has_one_each(self) -> bool:
        return len(self.sizes) == len(self.speeds)

    def of_each_way(self, batch: float, noise: float) -> Floats:
        """Goodput of each speed: its samples/s, times what one of them is worth beside one of the base batch."""
        return self.rates * ((batch + noise) / (self.batches + noise))

    def goodputs(self, batch: float, noise: float) -> Floats:
        """The best goodput of each size, in samples of the base batch a second."""
        ways = self.of_each_way(batch, noise)
        return ways if self._has_one_each else np.maximum.reduceat(ways, self._starts)

    def best(self, devices: int, batch: float, noise: float) -> Speed:
        """The way to run on so many devices.

        Raises:
            ValueError: no speed is of so many.
        """
        if devices not in self.sizes:
            raise ValueError(f"no speed is known on {devices} devices; there are {', '.join(map(str, self.sizes))}")
        ways = self.of_each_way(batch, noise)
        return max(
            (pair for pair in zip(self.speeds, ways, strict=True) if pair[0].devices == devices), key=lambda p: p[1]
        )[0]


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as a policy sees it at one time.

    Attributes:
        name: its own among those of the cluster.
        speeds: what it does at each size, as far as is known.
        batch: rows of its base batch; work is counted in samples of it.
        noise: the noise scale in samples: a batch of so many rows is worth half as much a sample as a tiny one. 0 where
            it was never measured: more rows are then worth no more steps.
        work_left: samples of the base batch until it ends; None where nobody knows.
        work_done: the same, behind it.
        service: device-seconds that it has held.
        waited: seconds that it held no device since it was submitted.
        submitted: when that was.
        least: devices that it has to have.
        most: devices that it may have; what its table knows if None.
        restart: seconds without work at each start and change.
        asked: devices that its user asked for, for policies that resize nothing.

    >>> table = SpeedTable([Speed(1, 100.0), Speed(2, 190.0)])
    >>> job = Job("train", table, work_left=19_000.0)
    >>> job.work_left / job.speeds.goodputs(job.batch, job.noise)  # seconds that it has left, on 1 device and on 2
    array([190., 100.])
    """

    name: str
    speeds: SpeedTable
    batch: float = 1.0
    noise: float = 0.0
    work_left: float | None = None
    work_done: float = 0.0
    service: float = 0.0
    waited: float = 0.0
    submitted: float = 0.0
    least: int = 1
    most: int | None = None
    restart: float = 30.0
    asked: int = 1


Policy = Callable[[Sequence[Job], Nodes, Allocation, float], dict[str, Placement]]


def size_of(placement: Placement | None) -> int:
    """Devices in all."""
    return sum(map(len, placement.values())) if placement else 0
