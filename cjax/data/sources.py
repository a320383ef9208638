"""Where samples come from: by index; several sources as one, each with its share; Hugging Face's data sets."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Source(Protocol):
    """Samples by index: each a dict of arrays, of the same names, shapes and dtypes, at least behind a transform."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...


class Mixture:
    """Samples of several sources in fixed shares.

    Which source has which place in the stream depends on the place's number alone, so that a resumed run, on however
    many processes, reads the same samples.

    Each source is shuffled in a way of its own, and begins anew when it ends, whatever the others do. A source that
    is a mixture keeps its own shares inside its part. What is read in order, for validation, is the sources one behind
    the other.

    Args:
        sources: samples of the same names, shapes and dtypes.
        weights: the share of each, of their sum, which grain keeps to within a hundredth of it; by their lengths if not
            given, so that each sample comes about as often.

    Raises:
        ValueError: no source, an empty one, or weights that are none.
        IndexError: of a number that no sample has.

    >>> mixed = Mixture([[{"x": np.array(i)} for i in range(6)], [{"x": np.array(100)}]], weights=[3, 1])
    >>> from cjax.data import batches
    >>> (next(batches(mixed, 4, seed=0))["x"] == 100).tolist()
    [False, False, False, True]
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

    @property
    def shares(self) -> list[Any]:
        """The weights; where a source is a mixture, with its own: `[0.5, [0.5, [1.0, 9.0]]]`."""
        pairs = zip(self.weights, self.sources, strict=True)
        return [[weight, source.shares] if isinstance(source, Mixture) else weight for weight, source in pairs]

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
            # A seed of its own, or sources of one length would come in one order. Not the next one: grain's epochs are
            # that, and one source's second epoch would have the order of another's first.
            source.stream(grain, int(own))
            if isinstance(source, Mixture)
            else grain.MapDataset.source(source).shuffle(seed=int(own)).repeat()
            for own, source in zip(
                np.random.SeedSequence(seed).generate_state(len(self.sources)), self.sources, strict=True
            )
        ]
        return grain.MapDataset.mix(parts, weights=self.weights)


class HuggingFace:
    """A data set of Hugging Face's `datasets`, or anything else with `len(...)` and dicts by index, as samples.

    Whole numbers become int32 and others float32, as JAX has them; lists become arrays. Text has to be made into
    numbers before: `dataset.map(...)`.

    Args:
        dataset: one of `datasets`; or the folder of one that `save_to_disk` wrote, or the name of one, which is loaded.
        columns: those that are used, or what they are called in the batch by their names in the data set; all if None.
        split: of a name, such as "train", or of a folder that holds several.

    Raises:
        ImportError: `datasets` is not installed, and there is something to load.
        ValueError: columns that are not there, or that hold no numbers.

    >>> source = HuggingFace([{"ids": [1, 2], "label": 0, "text": "a"}], {"ids": "inputs", "label": "label"})
    >>> source[0]
    {'inputs': array([1, 2], dtype=int32), 'label': array(0, dtype=int32)}
    """

    def __init__(
        self, dataset: Any, columns: Sequence[str] | Mapping[str, str] | None = None, split: str | None = None
    ):
        if isinstance(columns, str):
            raise ValueError(f'columns={columns!r} is one text, and several names are needed: write ["{columns}"]')
        if isinstance(dataset, str | Path):
            dataset = _load(dataset, split)
        elif split is not None:
            raise ValueError(f"split={split!r} is for a data set that is loaded by name; give dataset[{split!r}]")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                "samples are found by index, and this data set is read in order: load it without streaming"
            )
        if isinstance(dataset, Mapping):
            raise ValueError(f"there are several splits, {', '.join(map(str, dataset))}: give split=, or one of them")
        self._dataset = dataset
        first = dict(dataset[0]) if len(dataset) else {}
        names = columns if isinstance(columns, Mapping) else {name: name for name in columns or first}
        if missing := [name for name in names if name not in first]:
            raise ValueError(f"there is no column {', '.join(missing)}; there are {', '.join(first) or 'none'}")
        self._names = dict(names)
        if len(dataset):
            _ = self[0]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        sample = self._dataset[int(index)]
        return {new: _numbers(name, sample[name]) for name, new in self._names.items()}


def _load(place: str | Path, split: str | None) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('Hugging Face\'s data sets are read by its package: pip install "cjax[datasets]"') from error
    if Path(place).is_dir() and any((Path(place) / name).is_file() for name in ("state.json", "dataset_dict.json")):
        found = datasets.load_from_disk(str(place))
        return found if split is None or not isinstance(found, Mapping) else found[split]
    return datasets.load_dataset(str(place), split=split)


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    if array.dtype.kind in "iu" and array.dtype.itemsize >= 4:
        info = np.iinfo(np.int32)
        if array.size and not info.min <= int(array.min()) <= int(array.max()) <= info.max:
            raise ValueError(f"column {name} holds {array.min()} to {array.max()}, which int32 does not")
        return array.astype(np.int32)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        return array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"column {name} holds {str(value)[:60]!r}, which is no array of numbers: make it one by dataset.map(...), "
            "or leave it out by columns=[...]"
        )
    return array
