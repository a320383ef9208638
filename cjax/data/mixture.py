"""Several sources as one, each with its share of the samples."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cjax.data.stream import Source


class Mixture:
    """Samples of several sources in fixed shares: which source has which place in the stream depends on its number
    alone, so that a resumed run, on however many processes, reads the same ones.

    Each source is shuffled in a way of its own, and begins anew when it ends, whatever the others do. What is read in
    order, for validation, is the sources one behind the other.

    Args:
        sources: samples of the same names, shapes and dtypes.
        weights: the share of each, of their sum; by their lengths if not given, so that each sample comes as often.

    Raises:
        ValueError: no source, an empty one, or weights that are none.

    >>> mixed = Mixture([[{"x": np.array(i)} for i in range(6)], [{"x": np.array(100)}]], weights=[3, 1])
    >>> from cjax.data import batches
    >>> (next(batches(mixed, 4, seed=0))["x"] == 100).tolist()
    [False, True, False, False]
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float] | None = None):
        lengths = [len(source) for source in sources]
        if not lengths or 0 in lengths:
            raise ValueError(f"a mixture is of sources with samples; the lengths of these are {lengths}")
        self.weights = tuple(float(weight) for weight in (lengths if weights is None else weights))
        if len(self.weights) != len(lengths) or not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(
                f"a mixture of {len(lengths)} sources has as many weights, each above 0, such as [0.7, 0.3]; not "
                f"{list(weights or ())}"
            )
        self.sources = tuple(sources)
        self._ends = list(itertools.accumulate(lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect.bisect_right(self._ends, index)
        return self.sources[which][index - (self._ends[which - 1] if which else 0)]

    def stream(self, grain: Any, seed: int) -> Any:
        """All of it, shuffled and without end, by place."""
        parts = [
            # A seed of its own, or sources of one length would come in one order.
            grain.MapDataset.source(source).shuffle(seed=(seed + number) % 2**32).repeat()
            for number, source in enumerate(self.sources)
        ]
        return grain.MapDataset.mix(parts, weights=self.weights)
