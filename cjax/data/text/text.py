"""Text for a language model: windows of tokens, each with the tokens that follow."""

import dataclasses
import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cjax.data.stream import Batch, batches, whole_batches
from cjax.data.text.corpus import read_documents, read_token_file, standard_library
from cjax.data.text.vocabulary import Bytes, Numbers, Vocabulary, read_bpe

GPT2_VOCAB_SIZE = 50257


class Windows:
    """`tokens` as non-overlapping windows of `sequence` inputs; the targets are one token further."""

    def __init__(self, tokens: np.ndarray, sequence: int):
        self._tokens, self._sequence = tokens, sequence

    def __len__(self) -> int:
        return max(len(self._tokens) - 1, 0) // self._sequence

    def __getitem__(self, index: int) -> Batch:
        begin = index * self._sequence
        window = self._tokens[begin : begin + self._sequence + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


@dataclasses.dataclass(frozen=True, eq=False)
class TextData:
    """Tokens to train on and tokens held out, in batches `{"inputs", "targets"}` of int32[rows, sequence].

    Attributes:
        train: token ids, in memory or mapped.
        held_out: token ids for validation; may be empty.
        vocabulary: what the ids mean.
        batch_size: rows of the global batch.
        sequence: tokens per row.
        seed: order of the training samples.
        shard: `(index, count)`, which process this is: `program.data_shard`.

    Raises:
        ValueError: fewer tokens than one batch, or tokens outside the vocabulary.

    >>> from cjax.data import Bytes
    >>> data = TextData(np.arange(65, dtype=np.uint8), np.zeros(0, np.uint8), Bytes(), batch_size=2, sequence=8)
    >>> batch = next(data.batches())
    >>> batch["inputs"].shape, bool((batch["targets"] == batch["inputs"] + 1).all())
    ((2, 8), True)
    """

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: Vocabulary
    batch_size: int
    sequence: int
    seed: int = 0
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        counts = (self.sequence, self.batch_size)
        if not all(isinstance(number, int | np.integer) and number > 0 for number in counts):
            given = f"sequence is {self.sequence}, batch_size {self.batch_size}"
            raise ValueError(f"{given}; both must be at least 1, and whole numbers")
        needed = self.batch_size * self.sequence + 1
        if len(self.train) < needed:
            raise ValueError(
                f"the training text has {len(self.train)} tokens; one batch of {self.batch_size} rows of "
                f"{self.sequence} tokens needs {needed}. Take a smaller batch or sequence, or more text"
            )
        for tokens in (self.train, self.held_out):
            _check_tokens(tokens, self.vocabulary.size)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """This process's rows of the training batches, without end, after `start` global samples."""
        source = Windows(self.train, self.sequence)
        return batches(source, self.batch_size, seed=self.seed, start=start, shard=self.shard)

    def validation(self, max_batches: int | None = None) -> Iterator[Batch]:
        """This process's rows of the held-out text, once, in order, whole batches only; maybe none at all."""
        return whole_batches(Windows(self.held_out, self.sequence), self.batch_size, max_batches, shard=self.shard)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, those that the text doesn't have included."""
        return self.vocabulary.size

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Nats per token of the best guess that knows only how frequent each token is: the loss to beat."""
        counts = np.zeros(self.vocab_size, np.int64)
        for begin in range(0, len(self.train), 1 << 24):
            counts += np.bincount(self.train[begin : begin + (1 << 24)], minlength=self.vocab_size)
        frequency = counts[counts > 0] / len(self.train)
        return float(-(frequency * np.log(frequency)).sum())

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the stream what it is, so that a resumed run can tell whether it reads the same one."""
        ends = np.concatenate([self.train[: 1 << 16], self.train[-(1 << 16) :]]).astype("<u4")
        return {
            "seed": self.seed,
            "sequence": self.sequence,
            "num_tokens": len(self.train),
            "checksum": zlib.crc32(ends.tobytes()),
        }

    def decode(self, tokens: Any) -> str:
        """The text of int[length] tokens."""
        return self.vocabulary.decode(tokens)


def text_data(
    path: str | Path | None = None,
    *,
    batch_size: int,
    sequence: int,
    vocabulary: str | Path | Vocabulary | None = None,
    vocab_size: int | None = None,
    held_out: float = 0.05,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> TextData:
    """Text from where it lies.

    Args:
        path: any file or folder, read as text; a `.bin` token file, or a folder with `train.bin` and `val.bin`;
            None takes the source text of Python's standard library.
        batch_size: rows of the global batch.
        sequence: tokens per row.
        vocabulary: a folder with GPT-2's `vocab.json` and `merges.txt`; None reads bytes.
        vocab_size: of a token file that comes without its vocabulary; GPT-2's 50,257 unless said.
        held_out: the share at the end that is kept for validation, where there is no file for it.
        seed: order of the training samples.
        shard: `(index, count)` of this process.

    Raises:
        FileNotFoundError: the path or a vocabulary file is not there.
        ValueError: text that is empty or shorter than a batch, or tokens outside the vocabulary.

    >>> data = text_data(batch_size=4, sequence=32)
    >>> next(data.batches())["inputs"].shape
    (4, 32)
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is {held_out}; it is a share of the text, at least 0 and below 1")
    if isinstance(vocabulary, (str, Path)):
        vocabulary = read_bpe(vocabulary)
    if vocab_size is not None and (vocabulary or not _is_token_path(path)):
        raise ValueError("vocab_size is for a token file (.bin) without vocabulary files; other text has its own")
    train, kept = _read(None if path is None else Path(path), vocabulary)
    if kept is None:
        split = round(len(train) * (1 - held_out))
        train, kept = train[:split], train[split:]
    if vocabulary is None:
        vocabulary = Numbers(vocab_size or GPT2_VOCAB_SIZE) if _is_token_path(path) else Bytes()
    return TextData(train, kept, vocabulary, batch_size, sequence, seed, shard)


def _read(path: Path | None, vocabulary: Vocabulary | None) -> tuple[np.ndarray, np.ndarray | None]:
    if path is not None and _is_token_path(path):
        if path.suffix == ".bin":
            return read_token_file(path), None
        held_out = path / "val.bin"
        return read_token_file(path / "train.bin"), read_token_file(held_out) if held_out.exists() else None
    documents = standard_library() if path is None else read_documents(path)
    return (vocabulary or Bytes()).encode(documents), None


def _is_token_path(path: str | Path | None) -> bool:
    return path is not None and (Path(path).suffix == ".bin" or (Path(path) / "train.bin").is_file())


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    """Refuses tokens outside the vocabulary: an embedding would read another row in their place, and say nothing."""
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        first = int(np.argmax(tokens >= vocab_size))
        raise ValueError(
            f"the text holds token {int(tokens[first])} at position {first}, outside a vocabulary of {vocab_size}; "
            f"its largest id is {largest}: take a vocabulary of at least {largest + 1}"
        )
