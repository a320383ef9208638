"""A model's behaviour as it was measured: step times by placement and batch, gradient noise by epoch and batch.

Reads the folders of the artifact of Qiao et al., "Pollux", OSDI 2021: `placements.csv`, `scalability.csv` and
`validation-BATCH.csv`.
"""

import csv
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Shape = tuple[int, ...]  # devices on each node
MOST_DEVICES = 64
NUM_BATCHES = 50  # that are tried between the least and the largest


class Way(NamedTuple):
    """One way to make a global batch: rows a device and pass, and passes a step besides the last."""

    rows: float
    extra_passes: int
    num_devices: int

    @property
    def batch(self) -> float:
        return self.rows * (self.extra_passes + 1) * self.num_devices


class StepTimes:
    """Seconds of a step and, within it, of waiting for the other devices, between those that were measured."""

    def __init__(self, folder: Path) -> None:
        self._by_shape: dict[Shape, list[tuple[float, float, float]]] = defaultdict(list)
        means: dict[tuple[int, int, float], list[tuple[float, float]]] = defaultdict(list)
        for row in rows_of(folder / "placements.csv", "placement,local_bsz,step_time,sync_time"):
            shape = tuple(int(digit) for digit in row["placement"])
            local, seconds = float(row["local_bsz"]), (float(row["step_time"]), float(row["sync_time"]))
            self._by_shape[shape].append((local, *seconds))
            means[len(shape), sum(shape), local].append(seconds)
        self.locals = sorted({local for rows in self._by_shape.values() for local, *_ in rows})
        points = [[*key, *np.mean(seconds, axis=0).tolist()] for key, seconds in sorted(means.items())]
        columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        for row in rows_of(folder / "scalability.csv", ",".join(columns)):
            points.append([float(row[name]) for name in columns])
        self._points = np.array(points)
        self.most_nodes = int(self._points[:, 0].max())
        self._known: dict[tuple[Shape, int], tuple[float, float]] = {}

    @functools.cached_property
    def _between(self) -> Callable[[Sequence[tuple[float, float, float]]], Floats]:
        from scipy.interpolate import LinearNDInterpolator  # every command would wait for it

        return LinearNDInterpolator(self._points[:, :3], self._points[:, 3:])

    def __call__(self, shape: Shape, rows: int) -> tuple[float, float]:
        """Of devices laid out like this, with so many rows on each.

        Raises:
            ValueError: it lies outside of what was measured.
        """
        if (shape, rows) not in self._known:
            self.learn(shape, [rows])
        return self._known[shape, rows]

    def learn(self, shape: Shape, rows: Sequence[int]) -> None:
        """Reads several at once, which costs little more than one."""
        turned = least_turn(shape)
        if measured := self._by_shape.get(turned):
            local, step, sync = zip(*sorted(measured), strict=True)
            found = np.array([np.interp(rows, local, of, np.nan, np.nan) for of in (step, sync)]).T
        else:
            nodes = min(len(shape), self.most_nodes)
            found = self._between([(nodes, sum(shape), each) for each in rows])
        for each, (step, sync) in zip(rows, found.tolist(), strict=True):
            if np.isnan(step):
                raise ValueError(
                    f"no step was measured around {sum(shape)} devices on {len(shape)} nodes with {each} rows each"
                )
            self._known[shape, each] = step, sync


def least_turn(shape: Shape) -> Shape:
    """Nodes stand in a ring: the turn of it by which a layout is known."""
    return min(shape[turn:] + shape[:turn] for turn in range(len(shape)))


@dataclasses.dataclass(frozen=True)
class Validation:
    """Runs with one batch after the other: what was measured at the end of each epoch."""

    batches: tuple[int, ...]
    progress: Floats  # epochs: base steps behind it, the least of all batches
    steps: Floats  # epochs x batches: of the run itself, behind it
    sqr: Floats  # epochs x batches: of the gradient
    var: Floats

    @classmethod
    def read(cls, folder: Path, epochs: int) -> "Validation":
        paths = {int(path.stem.split("-")[1]): path for path in folder.glob("validation-*.csv")}
        if not paths:
            raise FileNotFoundError(f"{folder} has no validation-BATCH.csv")
        names = ("progress", "iteration", "grad_sqr", "grad_var")
        runs = [
            [[float(row[name]) for name in names] for row in rows_of(paths[batch], ",".join(names))]
            for batch in sorted(paths)
        ]
        if (least := min(map(len, runs))) < epochs:
            raise ValueError(f"{folder} has {least} epochs, and {epochs} are to be trained")
        values = np.array([run[:epochs] for run in runs])
        return cls(tuple(sorted(paths)), values[:, :, 0].min(0), *(values[:, :, column].T for column in (1, 2, 3)))

    def gradient(self, batch: float, epoch: int) -> tuple[float, float]:
        """Square and variance of the gradient, in an epoch, with a batch; lines between those that were run."""
        return (
            float(np.interp(batch, self.batches, self.sqr[epoch])),
            float(np.interp(batch, self.batches, self.var[epoch])),
        )

    def steps_left(self, batch: float, epoch: int) -> float:
        """Steps of a run with this batch from the end of an epoch to its own; 1 in the last one."""
        behind = [float(np.interp(batch, self.batches, steps)) for steps in (self.steps[epoch], self.steps[-1])]
        return max(1.0, behind[1] - behind[0])


class MeasuredModel:
    """A model that jobs train, by its tables.

    Args:
        folder: of its tables.
        epochs: after which a job ends.
        most_rows: that a device holds, if not the most that was measured.
        fixed: the batch of every job, on one device alone; None where a job chooses.
    """

    def __init__(self, folder: Path, epochs: int, most_rows: int | None = None, fixed: int | None = None) -> None:
        self.name = folder.name
        self.times = StepTimes(folder)
        self.validation = Validation.read(folder, epochs)
        self.fixed = fixed
        self.base_batch, self.largest_batch = self.validation.batches[0], self.validation.batches[-1]
        self.least_rows, self.most_rows = int(self.times.locals[0]), int(most_rows or self.times.locals[-1])
        self._gradients: dict[tuple[float, int], tuple[float, float]] = {}

    @property
    def num_epochs(self) -> int:
        return len(self.validation.progress)

    def sizes(self, nodes: Mapping[int, int]) -> list[int]:
        """Numbers of devices that a job may have: parts of a node, or whole ones of the largest, up to 64 in all, for
        which alone steps were measured."""
        per_node = max(nodes)
        whole = range(per_node, per_node * nodes[per_node] + 1, per_node)
        return [size for size in [*range(1, per_node), *whole] if size <= min(self.most_devices, MOST_DEVICES)]

    @property
    def most_devices(self) -> int:
        return 1 if self.fixed else self.largest_batch // self.least_rows

    def progress_at(self, epoch: int) -> float:
        """Base steps behind the end of so many epochs."""
        return float(self.validation.progress[epoch - 1]) if epoch else 0.0

    def steps_left(self, batch: float, epoch: int) -> float:
        """Steps of this batch from the end of an epoch to that of the job."""
        return self.validation.steps_left(batch, epoch)

    def gradient(self, batch: float, epoch: int) -> tuple[float, float]:
        """Square and variance of the gradient."""
        key = (batch, epoch)
        if key not in self._gradients:
            self._gradients[key] = self.validation.gradient(batch, epoch)
        return self._gradients[key]

    def way(self, batch: float, num_devices: int) -> Way:
        """How so many devices make a batch. One device that accumulates has two passes at least: from a single one it
        could not tell how noisy its gradient is."""
        rows = batch / num_devices
        extra = math.ceil(rows / self.most_rows - 1e-8) - 1
        if num_devices == 1 and batch > self.base_batch + 1e-8:
            extra = max(1, extra)
        per_pass = math.ceil(rows / (extra + 1) - 1e-8)
        return Way(min(per_pass, self.largest_batch // (num_devices * (extra + 1))), extra, num_devices)

    @functools.cache  # noqa: B019  models live as long as the process
    def ways(self, num_devices: int) -> tuple[Way, ...]:
        """All ways that a job of so many devices chooses from."""
        if self.fixed:
            return (self.way(self.fixed, num_devices),)
        least = max(self.base_batch, self.least_rows * num_devices)
        found = {self.way(batch, num_devices) for batch in np.geomspace(least, self.largest_batch, NUM_BATCHES)}
        fits = (way for way in found if self.least_rows <= way.rows <= self.most_rows and way.batch >= self.base_batch)
        return tuple(sorted(fits, key=lambda way: way.batch))

    @functools.cache  # noqa: B019
    def batches_of_ways(self, num_devices: int) -> Floats:
        """Rows of the global batch of each way."""
        return np.array([way.batch for way in self.ways(num_devices)])

    def times_of(self, shape: Shape, way: Way) -> tuple[float, float]:
        """Seconds of a step without further passes, and of waiting within it."""
        return self.times(shape, int(way.rows))

    def seconds(self, shape: Shape, way: Way) -> float:
        """Of one step, as it was measured."""
        step, sync = self.times_of(shape, way)
        return step + (step - sync) * way.extra_passes

    @functools.cache  # noqa: B019
    def seconds_of_ways(self, shape: Shape) -> Floats:
        """Of a step of each way."""
        self.times.learn(shape, [int(way.rows) for way in self.ways(sum(shape))])
        return np.array([self.seconds(shape, way) for way in self.ways(sum(shape))])


def packed(num_devices: int, per_node: int) -> Shape:
    """So many devices on as few nodes as can be."""
    whole, rest = divmod(num_devices, per_node)
    return (per_node,) * whole + ((rest,) if rest else ())


def rows_of(path: Path, columns: str) -> list[dict[str, str]]:
    """The rows of a csv file by the names of its columns.

    Raises:
        ValueError: a column is missing.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns.split(",") if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it needs {columns}")
        return list(reader)
