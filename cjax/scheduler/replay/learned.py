"""Step times learned from what a job has run: a line for its arithmetic, constants for its waiting."""

import numpy as np
from numpy.typing import NDArray

from cjax.scheduler.replay.measured import Shape, Way

Floats = NDArray[np.float64]
# Devices exchange gradients while they still compute others. Of two that overlap, the norm of this power is taken, as
# Pollux does: 1 is one behind the other, infinity is the longer of both.
OVERLAP = 3.0


class LearnedTimes:
    """What is believed of a job's steps. What was never seen is taken to be as it mostly is.

    A pass takes a constant and a part that grows with its rows; of a single number of rows, half of each. The exchange
    with the other devices has a constant, and a part that grows with their number; within a node it is another than
    between nodes. What of it the last pass of a step does not cover, devices wait.
    """

    def __init__(self) -> None:
        self._passes: dict[float, float] = {}  # seconds by rows
        self._exchanges: dict[bool, dict[int, float]] = {False: {}, True: {}}  # between nodes or not, by devices
        self._seconds: dict[Shape, Floats] = {}  # of the ways on devices laid out so, as of now
        self.most_devices = 0
        self.version = 0  # grows with what is known

    def see(self, shape: Shape, rows: float, step: float, sync: float) -> None:
        """A step that was measured."""
        devices, exchanges, one_pass = sum(shape), self._exchanges[len(shape) > 1], step - sync
        exchange = (step**OVERLAP - one_pass**OVERLAP) ** (1 / OVERLAP)
        is_new = self._passes.get(rows) != one_pass or (devices > 1 and exchanges.get(devices) != exchange)
        if is_new:
            self.version += 1
            self._seconds.clear()
        self._passes[rows] = one_pass
        self.most_devices = max(self.most_devices, devices)
        if devices > 1:
            exchanges[devices] = exchange

    @property
    def knows(self) -> bool:
        return bool(self._passes)

    def seconds(self, shape: Shape, ways: tuple[Way, ...]) -> Floats:
        """Of a step of each of a model's ways to run on devices laid out like this."""
        if shape not in self._seconds:
            rows = np.array([way.rows for way in ways])
            extra = np.array([way.extra_passes for way in ways])
            passes, exchange = self._pass(rows), self._exchange(len(shape) > 1, sum(shape))
            self._seconds[shape] = passes * extra + (passes**OVERLAP + exchange**OVERLAP) ** (1 / OVERLAP)
        return self._seconds[shape]

    def _pass(self, rows: Floats) -> Floats:
        seen = np.array(sorted(self._passes))
        seconds = np.array([self._passes[each] for each in seen.tolist()])
        if len(seen) == 1:
            return seconds[0] * (1 + rows / seen[0]) / 2
        weight = 1 / seconds  # errors count as shares
        lines = np.stack([np.ones(len(seen)), seen], axis=1) * weight[:, None]
        constant, slope = np.linalg.lstsq(lines, np.ones(len(seen)), rcond=None)[0]
        if constant < 0:
            constant, slope = 0.0, float((seconds * weight).sum() / (seen * weight).sum())
        elif slope < 0:
            constant, slope = float(seconds.mean()), 0.0
        near = np.interp(rows, seen, seconds)  # between what was measured, what was measured counts
        line = constant + slope * rows
        return np.where((rows >= seen[0]) & (rows <= seen[-1]), near, line)

    def _exchange(self, between: bool, devices: int) -> float:
        if devices == 1:
            return 0.0
        # Before any was seen between nodes, it is taken to be as within one; and nothing, before any was seen at all:
        # who never tries never learns better.
        seen = self._exchanges[between] or self._exchanges[False]
        if len(seen) < 2:
            return sum(seen.values())
        numbers = np.array(sorted(seen))
        seconds = np.array([seen[number] for number in numbers.tolist()])
        slope = max(0.0, float(np.polyfit(numbers, seconds, 1)[0]))
        if devices > numbers[-1]:
            return float(seconds[-1] + slope * (devices - numbers[-1]))
        return float(np.interp(devices, numbers, seconds))
