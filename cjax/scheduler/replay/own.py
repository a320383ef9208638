"""A job of a user's own log: its work, and its speed by number of devices."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from cjax.scheduler.policy.job import Speed
from cjax.scheduler.replay.measured import Floats, Shape, Way


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """What a job trains, by a table of speeds. On how many nodes its devices lie makes no difference to it.

    Attributes:
        name: of the application.
        speeds: by devices and batch.
        work: samples of the base batch.
        noise: the noise scale in samples.
    """

    name: str
    speeds: tuple[Speed, ...]
    work: float
    noise: float = 0.0
    num_epochs = 1
    fixed = None

    @property
    def base_batch(self) -> float:
        return min(speed.batch for speed in self.speeds)

    def sizes(self, nodes: Mapping[int, int]) -> list[int]:
        del nodes
        return sorted({speed.devices for speed in self.speeds})

    def progress_at(self, epoch: int) -> float:
        return epoch * self.work / self.base_batch

    def steps_left(self, batch: float, epoch: int) -> float:
        """Steps of this batch, from the beginning: there is one epoch alone."""
        del epoch
        return self.work / self.base_batch * (self.base_batch + self.noise) / (batch + self.noise)

    def gradient(self, batch: float, epoch: int) -> tuple[float, float]:
        """Square and variance of the gradient."""
        del batch, epoch
        return 1.0, self.noise / self.base_batch

    def ways(self, num_devices: int) -> tuple[Way, ...]:
        return tuple(Way(speed.batch / num_devices, 0, num_devices) for speed in self._at(num_devices))

    def way(self, batch: float, num_devices: int) -> Way:
        """The way whose batch is the nearest to what was asked for."""
        return min(self.ways(num_devices), key=lambda way: abs(way.batch - batch))

    def batches_of_ways(self, num_devices: int) -> Floats:
        return np.array([speed.batch for speed in self._at(num_devices)])

    def seconds_of_ways(self, shape: Shape) -> Floats:
        return np.array([speed.batch / speed.samples_per_second for speed in self._at(sum(shape))])

    def seconds(self, shape: Shape, way: Way) -> float:
        return float(self.seconds_of_ways(shape)[self.ways(sum(shape)).index(way)])

    def times_of(self, shape: Shape, way: Way) -> tuple[float, float]:
        """Seconds of a step; how much of them is waiting, no table says."""
        return self.seconds(shape, way), 0.0

    def _at(self, num_devices: int) -> Sequence[Speed]:
        return [speed for speed in self.speeds if speed.devices == num_devices]
