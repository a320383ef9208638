"""From texts of unequal length to rows of one length: padded, or joined and cut.

Joined rows are full: documents one after the other, an end token between them, cut every so many tokens. Attention
sees across the joint, as in GPT-2 and T5. Rows that hold several whole sentences apart from one another would need
segment ids in the model; cjax's models have none, so labelled sentences are padded.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cjax.data.stream import Batch
from cjax.data.text.corpus import read_documents, standard_library
from cjax.data.text.tokenizer import Tokenizer


class Pieces:
    """Samples `{"tokens": int32[length]}`: `tokens` cut without overlap, each piece between special tokens.

    Args:
        tokens: int[many], in memory or mapped; what is left at the end is dropped.
        length: of a sample, special tokens included.
        before, after: ids put around each piece.

    >>> Pieces(np.arange(10), 5, before=(101,), after=(102,))[2]["tokens"].tolist()
    [101, 6, 7, 8, 102]
    """

    def __init__(self, tokens: np.ndarray, length: int, *, before: tuple[int, ...] = (), after: tuple[int, ...] = ()):
        self._tokens, self._before, self._after = tokens, before, after
        self._size = room(length, len(before) + len(after))

    def __len__(self) -> int:
        return len(self._tokens) // self._size

    def __getitem__(self, index: int) -> Batch:
        piece = self._tokens[index * self._size : (index + 1) * self._size]
        return {"tokens": np.concatenate([self._before, piece, self._after]).astype(np.int32)}


class Sentences:
    """Samples `{"tokens": int32[at most length]}`: each text by itself, between special tokens, its end cut off.

    Args:
        texts: int[any] for each text.
        length: the most of a sample, special tokens included.
        before, after: ids put around each text.

    Attributes:
        num_cut: texts that were longer.
    """

    def __init__(
        self,
        texts: Sequence[np.ndarray],
        length: int,
        *,
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
    ):
        self._texts, self._before, self._after = texts, before, after
        self._size = room(length, len(before) + len(after))
        self.num_cut = sum(len(text) > self._size for text in texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Batch:
        text = self._texts[index][: self._size]
        return {"tokens": np.concatenate([self._before, text, self._after]).astype(np.int32)}


def split_text(
    data: str | Path | Sequence[bytes] | None,
    tokenizer: Tokenizer,
    length: int,
    held_out: float,
    by_line: bool,
    *,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
) -> tuple[Pieces | Sentences, Pieces | Sentences]:
    """Samples `{"tokens"}` to train on, and those of the end of the text, held out.

    Args:
        data: any file or folder, read as text; or documents in memory; None takes the source text of Python's standard
            library.
        tokenizer: what makes tokens of it.
        length: of a sample, special tokens included.
        held_out: the share that is held out, at least 0 and below 1.
        by_line: each line that isn't empty is a sample; otherwise full pieces of all documents are.
        before, after: ids put around each sample.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: there is no whole sample to train on.
    """
    if data is None:
        documents = standard_library()
    else:
        documents = read_documents(data) if isinstance(data, str | Path) else data
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is {held_out}; it is a share of the text, at least 0 and below 1")
    if by_line:
        lines = [line for document in documents for line in document.decode("utf-8", errors="replace").split("\n")]
        texts = [tokens for tokens in tokenizer.encode_each(line for line in lines if line.strip()) if len(tokens)]
        split = round(len(texts) * (1 - held_out))
        parts = [Sentences(part, length, before=before, after=after) for part in (texts[:split], texts[split:])]
    else:
        tokens = tokenizer.encode(documents)
        split = round(len(tokens) * (1 - held_out))
        parts = [Pieces(part, length, before=before, after=after) for part in (tokens[:split], tokens[split:])]
    if not len(parts[0]):
        raise ValueError(
            f"the text makes no sample of {length} tokens to train on, {held_out:.0%} of it held out; "
            "give more text, or take a shorter sequence"
        )
    return parts[0], parts[1]


def room(length: int, num_special: int) -> int:
    """Tokens of text in a row of `length`.

    Raises:
        ValueError: there is none.
    """
    if length <= num_special:
        raise ValueError(
            f"a sequence of {length} tokens has no room for text beside {num_special} special token(s); "
            f"it needs at least {num_special + 1}"
        )
    return length - num_special


def row_length(longest: int, multiple: int = 8) -> int:
    """The smallest multiple of `multiple` that holds `longest` tokens.

    >>> row_length(61), row_length(64)
    (64, 64)
    """
    return -(-max(longest, 1) // multiple) * multiple


def pad(tokens: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    """int32[length]: int[at most length] tokens, and `value` behind them.

    >>> pad(np.array([5, 6]), 4).tolist()
    [5, 6, 0, 0]
    """
    row = np.full(length, value, np.int32)
    row[: len(tokens)] = tokens
    return row


def present(tokens: np.ndarray, length: int) -> np.ndarray:
    """bool[length]: where a row padded to `length` holds tokens."""
    return np.arange(length) < len(tokens)
