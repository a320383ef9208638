"""Which plans are measured: none that somebody liked, but a row of them through all that the search sees."""

from collections.abc import Iterator, Sequence

import numpy as np

USED = 0.98  # of all plans, the fastest; the rest take up to ten times as long as the median


def spaced(seconds: Sequence[float], count: int) -> Iterator[list[int]]:
    """For each of `count` times, evenly spaced in their logarithm from the least of `seconds` on, the plans by how near
    they come to it; of equally near ones those first that come first.

    >>> [places[0] for places in spaced([1.0, 1.1, 3.9, 2.0, 2.1, 4.0], 3)]
    [0, 3, 2]
    """
    times = np.asarray(seconds)
    last = np.sort(times)[int(USED * (len(times) - 1))]
    for target in np.geomspace(times.min(), last, count):
        yield np.argsort(np.abs(np.log(times / target)), kind="stable").tolist()
