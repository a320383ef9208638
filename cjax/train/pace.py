"""How often a run writes checkpoints: every so many steps, or as often as loses least."""

import math

import jax
import numpy as np
from jax.experimental import multihost_utils

MEASURED_BEHIND = 10  # steps: by then it is known what one takes
# What is assumed unless said. Llama 3's 16,384 GPUs stopped 419 times in 54 days (Grattafiori et al., 2024), which is
# once in 50,000 hours of one; and no run is taken to be left alone for more than a day.
DEVICE_HOURS = 50_000
MOST_HOURS = 24


def assumed_between_failures(num_devices: int) -> float:
    """Seconds between failures of a run on so many devices.

    >>> assumed_between_failures(8) / 3600, round(assumed_between_failures(16384) / 3600, 1)
    (24.0, 3.1)
    """
    return 3600 * min(MOST_HOURS, DEVICE_HOURS / num_devices)


def best_interval(cost: float, between_failures: float) -> float:
    """Seconds of training between checkpoints that lose least: to writing them, and to steps repeated after a failure.

    By Young, A first order approximation to the optimum checkpoint interval, 1974; and where a checkpoint costs more
    than half of the time between failures, that time, after Daly, A higher order estimate, 2006.

    Args:
        cost: seconds that a checkpoint holds the training up.
        between_failures: seconds from one failure to the next, on average.

    >>> best_interval(2.0, 86400.0) > best_interval(1.0, 86400.0), round(best_interval(2.0, 90000.0))
    (True, 600)
    """
    return math.sqrt(2 * cost * between_failures) if 2 * cost < between_failures else between_failures


class Pace:
    """When the next checkpoint is due.

    Args:
        every: steps; None for never, "auto" for `best_interval` of what they cost here.
        between_failures: seconds, for "auto".
        first: the step the run starts after.
    """

    def __init__(self, every: int | str | None, between_failures: float, first: int):
        self._every, self._between_failures = every, between_failures
        self._next = first + MEASURED_BEHIND if every == "auto" else 0
        self.interval: int | None = None  # what "auto" came to
        self._is_first = True

    def is_due(self, step: int) -> bool:
        if self._every == "auto":
            return step >= self._next
        return self._every is not None and step % int(self._every) == 0

    def saved(self, step: int, cost: float, step_seconds: float) -> bool:
        """A checkpoint has held the training up for `cost` seconds. Whether it is known what they cost since then."""
        if self._every != "auto":
            return False
        if self._is_first:  # for which the copying was compiled
            self._is_first, self._next = False, step + MEASURED_BEHIND
            return False
        # The first process's clock is everybody's: they have to save at the same steps.
        cost, step_seconds = _of_first(cost, step_seconds)
        before = self.interval
        self.interval = max(1, round(best_interval(cost, self._between_failures) / step_seconds))
        self._next = step + self.interval
        return before is None

    def put_off(self, step: int) -> None:
        """There was no room for it: not at every step from now on is that tried."""
        self._next = step + (self.interval or MEASURED_BEHIND)


def _of_first(*numbers: float) -> tuple[float, ...]:
    if jax.process_count() == 1:
        return numbers
    return tuple(float(number) for number in multihost_utils.broadcast_one_to_all(np.array(numbers, np.float32)))
