"""Step times learned from what a job has run: a line for its arithmetic, constants for its waiting."""

import numpy as np
from numpy.typing import NDArray

from cjax.scheduler.replay.measured import Shape, Way

Floats = NDArray[np.float64]
# Of waiting for other devices, before any was seen: within a node, as a share of a pass; between nodes, times that
# within one.
WITHIN_NODE = 0.0
BETWEEN_NODES = 3.0


class LearnedTimes:
    """What is believed of a job's steps. What was never seen is taken to be as it mostly is.

    A pass takes a constant and a part that grows with its rows; of a single number of rows, half of each. Waiting for
    the other devices has a constant, and a part that grows with their number beyond two; within a node it is another
    than between nodes.
    """

    def __init__(self) -> None:
        self._passes: dict[float, float] = {}  # seconds by rows
        self._waits: dict[bool, dict[int, float]] = {False: {}, True: {}}  # between nodes or not, by devices
        self.most_devices = 0
        self.version = 0  # grows with what is known

    def see(self, shape: Shape, rows: float, step: float, sync: float) -> None:
        """A step that was measured."""
        devices, waits = sum(shape), self._waits[len(shape) > 1]
        is_new = self._passes.get(rows) != step - sync or (devices > 1 and waits.get(devices) != sync)
        self.version += is_new
        self._passes[rows] = step - sync
        self.most_devices = max(self.most_devices, devices)
        if devices > 1:
            waits[devices] = sync

    @property
    def knows(self) -> bool:
        return bool(self._passes)

    def seconds(self, shape: Shape, ways: tuple[Way, ...]) -> Floats:
        """Of a step of each way."""
        rows = np.array([way.rows for way in ways])
        extra = np.array([way.extra_passes for way in ways])
        return self._pass(rows) * (extra + 1) + self._wait(len(shape) > 1, sum(shape))

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

    def _wait(self, between: bool, devices: int) -> float:
        if devices == 1:
            return 0.0
        seen = self._waits[between]
        if not seen:
            shortest = min(self._passes.values())
            return BETWEEN_NODES * self._wait(False, devices) if between else WITHIN_NODE * shortest
        if len(seen) == 1:
            return next(iter(seen.values()))
        numbers = np.array(sorted(seen))
        seconds = np.array([seen[number] for number in numbers.tolist()])
        slope = max(0.0, float(np.polyfit(numbers, seconds, 1)[0]))
        if devices > numbers[-1]:
            return float(seconds[-1] + slope * (devices - numbers[-1]))
        return float(np.interp(devices, numbers, seconds))
