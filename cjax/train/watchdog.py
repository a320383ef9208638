"""A run that hangs ends itself: whoever started it can start it again, and reads where it hung."""

import faulthandler
import math
import os
import threading
import time
from typing import Literal

from cjax.jax_compat.backends import is_compiling
from cjax.job import AGAIN
from cjax.job.beat import TRAINING, Doing

LEAST = 10.0  # seconds without anything new, of a step
STEPS = 5  # that one may take the time of
SILENCE = 3600.0  # seconds that anything besides a step may take
_PERIOD = 0.5
_LAST_WORDS = 5.0  # seconds; where nobody reads them, or a disk hangs, the process ends without


class Watchdog:
    """While it is entered, a thread looks whether the steps of this process go on. Where they don't, it prints the
    stacks of all threads and ends the process with the status that says "again".

    Time in which the process was stopped or asleep as a whole does not count, and neither does compiling.

    Args:
        doing: what the process says of itself.
        patience: seconds that a step may take, or five of the usual ones if these are more; "auto" for ten; None does
            nothing.
    """

    def __init__(self, doing: Doing, patience: float | Literal["auto"] | None) -> None:
        self._doing, self._least = doing, LEAST if patience == "auto" else patience
        self._of = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._least,), daemon=True, name="watchdog")

    def __enter__(self) -> "Watchdog":
        if self._least is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._least is not None:
            self._thread.join()

    def _watch(self, least: float) -> None:
        still, moved, looked = 0.0, self._doing.moved, time.monotonic()
        while not self._over.wait(min(_PERIOD, least / 4)):
            now = time.monotonic()
            still += min(now - looked, 2 * _PERIOD)  # what is more was no time of ours
            looked = now
            if self._doing.moved != moved:
                still, moved = 0.0, self._doing.moved
            if still > self._limit(least):
                self._end(still)

    def _limit(self, least: float) -> float:
        longest = max(least, STEPS * self._doing.step_seconds)
        if self._doing.phase != TRAINING or is_compiling(self._of):
            return max(longest, SILENCE)
        return longest

    def _end(self, still: float) -> None:
        threading.Timer(_LAST_WORDS, os._exit, (AGAIN,)).start()
        text = (
            f"cjax: nothing new for {still:.0f} s ({self._doing}): this process hangs, and ends with status {AGAIN}, "
            '"again". resume="auto" goes on behind what was kept last. Where steps may take so long, give fit '
            "watchdog= more seconds. The stacks of its threads:\n"
        )
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2)
        os._exit(AGAIN)


def check_watchdog(patience: float | str | None) -> None:
    """Refuses what is no patience.

    Raises:
        ValueError: see there.
    """
    is_number = isinstance(patience, int | float) and not isinstance(patience, bool)
    if patience is None or patience == "auto" or (is_number and 0 < float(patience) < math.inf):
        return
    raise ValueError(f'fit got watchdog={patience!r}; it needs watchdog="auto", or seconds above 0, or None for none')
