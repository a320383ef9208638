"""Samples to train on and samples held out, and how they are told apart."""

import dataclasses
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cjax.data.sources import Mixture, Source
from cjax.data.stream import Batch, Transform, batches, whole_batches

_NUM_CHECKED = 1024


class Rows:
    """Samples that lie in arrays: sample i is row i of each.

    Args:
        arrays: by name, each [samples, ...].

    Raises:
        ValueError: arrays of different lengths, or none.

    >>> len(Rows({"x": np.zeros([5, 2]), "labels": np.arange(5)})), Rows({"labels": np.arange(5)})[3]
    (5, {'labels': np.int64(3)})
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the arrays of one set of samples have one length, not {lengths}")
        self.arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: array[index] for name, array in self.arrays.items()}

    def take(self, chosen: np.ndarray) -> "Rows":
        """The rows of a bool[length] or of int indices."""
        return Rows({name: array[chosen] for name, array in self.arrays.items()})


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """What `fit` trains on, from any two sources of samples.

    Attributes:
        train: samples, shuffled without end.
        held_out: samples for validation; may be none.
        batch_size: rows of the global batch.
        seed: order of the training samples, and what `transform` draws.
        shard: `(index, count)`, which process this is: `program.data_shard`.
        transform: what is done to each sample; see `batches`.
        sequence: tokens of a sample, by which `fit` counts tokens per second; None counts samples.
        classes: names of the labels 0, 1, ..., where samples have labels.
        num_cut: samples that were longer than what was asked for, and lost their end.

    Raises:
        ValueError: fewer samples than a batch.

    >>> data = Dataset(Rows({"x": np.arange(6)}), held_out=Rows({"x": np.arange(3)}), batch_size=2)
    >>> next(data.batches())["x"].shape, [batch["x"].tolist() for batch in data.validation()]
    ((2,), [[0, 1], [2]])
    """

    train: Source
    held_out: Source
    batch_size: int
    seed: int = 0
    shard: tuple[int, int] = (0, 1)
    transform: Transform | None = None
    sequence: int | None = None
    classes: tuple[str, ...] = ()
    num_cut: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= len(self.train):
            raise ValueError(
                f"batch_size is {self.batch_size}, and there are {len(self.train)} samples to train on; a batch is of "
                "at least one sample, and of no more than there are"
            )

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """This process's rows of the training batches, without end, after `start` global samples."""
        return batches(
            self.train, self.batch_size, seed=self.seed, start=start, shard=self.shard, transform=self.transform
        )

    def validation(self, max_batches: int | None = None) -> Iterator[Batch]:
        """This process's rows of what is held out, once, in order; the last batch may be smaller."""
        options: dict[str, Any] = {"shard": self.shard, "transform": self.transform}
        yield from whole_batches(self.held_out, self.batch_size, max_batches, **options)
        whole, rest = divmod(len(self.held_out), self.batch_size)
        rest -= rest % self.shard[1]  # every process has as many rows
        if rest and (max_batches is None or whole < max_batches):
            yield next(batches(self.held_out, rest, seed=None, start=whole * self.batch_size, **options))

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the stream what it is, so that a resumed run can tell whether it reads the same one."""
        checksum = 0
        for index in np.unique(np.linspace(0, len(self.train) - 1, _NUM_CHECKED).astype(int)):
            sample = self.train[int(index)]
            for name in sorted(sample):
                checksum = zlib.crc32(np.ascontiguousarray(sample[name]).tobytes(), checksum)
        known = dataclasses.is_dataclass(self.transform) or self.transform is None
        transform = repr(self.transform) if known else getattr(self.transform, "__qualname__", "unknown")
        mixed = {"weights": self.train.shares} if isinstance(self.train, Mixture) else {}
        return {
            "seed": self.seed,
            "num_samples": len(self.train),
            "checksum": checksum,
            "transform": transform,
            **mixed,
        }


def hold_out(texts: Sequence[str], part: float, groups: Sequence[Any] | None = None) -> np.ndarray:
    """bool[len(texts)]: which are held out, by a hash of the text: the same ones in whatever order they come.

    Equal texts of a group stay on one side.

    Args:
        texts: what is split.
        part: the share of each group, at least 0 and below 1; 0 holds out none, otherwise at least one is.
        groups: the label of each, so that all have the same share; one group if None.

    Raises:
        ValueError: a group with fewer than two different texts, which can't be on both sides.

    >>> int(hold_out([str(i) for i in range(50)], 0.2).sum())
    10
    """
    if not 0 <= part < 1:
        raise ValueError(f"held_out is {part}; it is a share of the data, at least 0 and below 1")
    labels = np.zeros(len(texts), int) if groups is None else np.asarray(groups)
    found = np.zeros(len(texts), bool)
    if part == 0:
        return found
    hashes = np.array([int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) for text in texts])
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        different, counts = np.unique(hashes[members], return_counts=True)
        if len(different) < 2:
            where = "the data has" if groups is None else f"the class {label!s} has"
            raise ValueError(
                f"{where} {len(different)} different example(s); at least 2 are needed, one to train on and one to "
                "hold out. Give more, or held_out=0"
            )
        # The first texts by their hash, as many as come nearest to the part without cutting equal ones apart.
        num = int(np.abs(np.cumsum(counts)[:-1] - part * len(members)).argmin()) + 1
        found[members] = np.isin(hashes[members], different[:num])
    return found
