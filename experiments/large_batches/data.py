"""What `large_batch.py` trains on: MNIST or scikit-learn's digits, and text whose bytes are masked."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cjax.data import image_data, read_documents, standard_library

Batch = dict[str, np.ndarray]
VOCAB_SIZE = 257  # the bytes, and a token that hides one
HIDDEN = 256
MEAN, STD = 0.13, 0.31  # of MNIST's pixels


@dataclass(frozen=True)
class Images:
    """patch: of a token; epochs: to train for; train and test: `images` float32 [n, h, w], `labels` int32 [n]."""

    name: str
    patch: tuple[int, int]
    epochs: int
    train: Batch
    test: Batch

    def __len__(self) -> int:
        return len(self.train["labels"])

    def rows(self, indices: np.ndarray, seed: int, epoch: int) -> Batch:
        del seed, epoch
        return {name: array[indices] for name, array in self.train.items()}


@dataclass(frozen=True)
class Masked:
    """Pieces of text [n, length] of bytes; of each batch 15 % of the bytes are to be found, by BERT's rule."""

    name: str
    train: np.ndarray
    test: Batch

    def __len__(self) -> int:
        return len(self.train)

    def rows(self, indices: np.ndarray, seed: int, epoch: int) -> Batch:
        # By the samples' place in the run: each epoch hides other bytes.
        return hide(self.train[indices], np.random.default_rng([seed, epoch, int(indices[0])]))


def images(path: Path | None) -> Images:
    """MNIST of an `.npz` file; without one scikit-learn's digits, of which a fifth is held out."""
    data = image_data(path, batch_size=1, channels=1, mean=MEAN, std=STD, held_out=0.2)
    train, test = (
        {"images": data.normalised(found["images"])[..., 0], "labels": found["labels"]}
        for found in (data.train[:], data.held_out[:])
    )
    even = len(data.train) // 2 * 2  # as two devices share the whole set
    train = {name: array[:even] for name, array in train.items()}
    return Images(*(("digits", (4, 4), 100) if path is None else ("mnist", (14, 14), 120)), train, test)


def stripes(num: int = 128) -> Images:
    """Images that are known apart by where a bright row is: nothing to read, and learned at once."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 2 * num)
    found = rng.random((2 * num, 8, 8)) / 4 + np.eye(8)[labels][:, :, None]
    return Images("stripes", (4, 4), 4, _scaled(found[:num], labels[:num]), _scaled(found[num:], labels[num:]))


def _scaled(x: np.ndarray, y: np.ndarray) -> Batch:
    return {"images": ((x - MEAN) / STD).astype(np.float32), "labels": y.astype(np.int32)}


def text(path: Path | None, length: int, num_test: int) -> Masked:
    """A text file's bytes, or the source text of Python's standard library, cut into pieces.

    The last tenth is kept apart, and `num_test` pieces from all over it are scored.
    """
    documents = standard_library() if path is None else read_documents(path)
    data = np.frombuffer(b"\n".join(documents), np.uint8).astype(np.int32)
    split = len(data) * 9 // 10
    train, test = _pieces(data[:split], length), _pieces(data[split:], length)
    test = test[:: max(1, len(test) // num_test)][:num_test]
    name = "standard library" if path is None else path.stem
    return Masked(name, train, hide(test, np.random.default_rng(0)))


def _pieces(data: np.ndarray, length: int) -> np.ndarray:
    return data[: len(data) // length * length].reshape(-1, length)


def hide(targets: np.ndarray, rng: np.random.Generator) -> Batch:
    """BERT's rule: of 15 % of the positions the byte is asked for; of these 80 % show the mask, 10 % any byte.

    Each byte by itself. `cjax.data.Masking` hides nearly as many in every piece, which on 16 bytes is another task: it
    ends at 1.90 nats where this ends at 2.04, at batch 256.
    """
    asked, how = rng.random(targets.shape) < 0.15, rng.random(targets.shape)
    shown = np.where(how < 0.8, HIDDEN, np.where(how < 0.9, rng.integers(0, 256, targets.shape), targets))
    inputs = np.where(asked, shown, targets).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "hidden": asked.astype(np.float32)}


def stream(source: Any, batch: int, num_steps: int, seed: int) -> Iterator[Batch]:
    """The next `batch` samples of shuffled epochs put end to end, so that every batch size sees the same samples."""
    order, epoch = np.empty(0, np.int64), 0
    for _ in range(num_steps):
        while len(order) < batch:
            order = np.concatenate([order, np.random.default_rng([seed, epoch]).permutation(len(source))])
            epoch += 1
        yield source.rows(order[:batch], seed, epoch)
        order = order[batch:]
