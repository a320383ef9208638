"""Two steps timed beside each other, so that what else the machine does slows both."""

import statistics
import time
from collections.abc import Callable


def interleaved(mine: Callable[[], None], theirs: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median ms of each, after two rounds to warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 2):
        for run, kept in zip((mine, theirs), times, strict=True):
            start = time.perf_counter()
            run()
            if i >= 2:
                kept.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])
