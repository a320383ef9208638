"""The batches of a run from a position on, whether the data can go there or has to be read past."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from cjax.tree import PyTree, kind_of


class Stream:
    """An endless walk through the data of a run that knows its position.

    Args:
        data: what has `batches(start)`, as `cjax.data.TextData`; or an iterable of batches. A list or a loader that
            can be read again is, when it ends; an iterator ends the run. To resume, an iterable is read past the
            samples that were trained on, so it should yield the same ones again.
        position: global samples already consumed.
        num_processes: each yields its part of the global batch.
    """

    def __init__(self, data: Any, position: int, num_processes: int):
        if not hasattr(data, "batches") and not hasattr(data, "__iter__"):
            raise TypeError(
                f"data is {kind_of(data)}; fit needs something with batches(start), as cjax.data.text_data "
                "gives, or an iterable of batches"
            )
        self.samples = position
        self._data, self._num_processes = data, num_processes
        if hasattr(data, "batches"):
            self._batches = data.batches(position)
            return
        if isinstance(data, str | Mapping):
            instead = "read the file" if isinstance(data, str) else "if that is one batch, write [data]"
            raise TypeError(f"data is {kind_of(data)}; fit needs an iterable of batches: {instead}")
        self._batches = self._read_past(data, position)

    def __iter__(self) -> Iterator[PyTree]:
        for batch in self._batches:
            self.samples += self._rows(batch)
            yield batch

    def refuse_nothing(self, steps: int) -> None:
        """Raises ValueError if the data ended before its first batch, which no run means to do."""
        if self.samples == 0:
            raise ValueError(
                f"data ({kind_of(self._data)}) gave no batch, and fit was to make {steps} steps. A list may be empty, "
                "an iterator read to its end before, or a loader may leave out what is less than one whole batch: give "
                "it a smaller batch or more rows, and look at next(iter(data))."
            )

    def at(self, position: int) -> "Stream":
        """The same walk from another position on; of what can be read once only, there is none."""
        return Stream(self._data, position, self._num_processes)

    def _read_past(self, data: Any, position: int) -> Iterator[PyTree]:
        skipped = 0
        for batch in _again_and_again(data):
            if skipped >= position:
                yield batch
            skipped += self._rows(batch)

    def _rows(self, batch: PyTree) -> int:
        rows = next((np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)), 1)
        return rows * self._num_processes


def _again_and_again(data: Any) -> Iterator[PyTree]:
    while True:
        is_empty = True
        for batch in data:
            is_empty = False
            yield batch
        if is_empty or iter(data) is data:
            return
