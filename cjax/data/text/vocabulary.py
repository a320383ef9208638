"""From text to tokens and back: bytes, or GPT-2's byte-pair encoding from its vocabulary files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Between these two characters GPT-2's own splitting always cuts, so text may be encoded piece by piece there.
_safe_cut = re.compile(r"(?<=[^\s])\n(?=[^\s])")
_piece_size = 1 << 18


class Vocabulary(Protocol):
    """What a token id means."""

    @property
    def size(self) -> int:
        """Ids are below it."""
        ...

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """One array of token ids for all documents, one after the other."""
        ...

    def decode(self, tokens: Any) -> str:
        """The text of token ids, an array of integers."""
        ...


class Bytes:
    """Every byte is a token: 256 of them, no files needed.

    >>> tokens = Bytes().encode([b"two", b"texts"])
    >>> tokens.tolist(), Bytes().decode(tokens[:3])
    ([116, 119, 111, 10, 116, 101, 120, 116, 115], 'two')
    """

    size = 256

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The bytes of all documents, uint8[length], joined by newlines."""
        return np.frombuffer(b"\n".join(documents), np.uint8)

    def decode(self, tokens: Any) -> str:
        """Bytes that are not UTF-8, such as a character cut in two, come back as U+FFFD."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class BPE:
    r"""Byte-pair encoding in GPT-2's form. Documents are joined by `<|endoftext|>`, where the vocabulary has it.

    Args:
        vocab: path of `vocab.json`.
        merges: path of `merges.txt`.

    Raises:
        ImportError: the tokenizers package is not installed.
        FileNotFoundError: one of them is not there.
        ValueError: they are something else, or damaged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vocab, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
    ...     _ = vocab.write_text('{"a": 0, "b": 1, "ab": 2}'), merges.write_text("#version: 0.2\na b")
    ...     vocabulary = BPE(vocab, merges)
    ...     again = read_bpe(folder)
    >>> vocabulary.encode([b"aba"]).tolist(), vocabulary.decode([2, 0]), again.size
    ([2, 0], 'aba', 3)
    """

    def __init__(self, vocab: str | Path, merges: str | Path):
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError as error:
            raise ImportError('byte-pair encoding needs the tokenizers package: pip install "cjax[data]"') from error
        for path in (Path(vocab), Path(merges)):
            if not path.is_file():
                raise FileNotFoundError(
                    f"there is no vocabulary file {path}; GPT-2's two are published as vocab.json and merges.txt. "
                    "Without them, train on bytes."
                )
        try:
            self._tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{vocab} and {merges} are no byte-pair encoding that the tokenizers package can read ({error}); copy "
                "or download them again"
            ) from error
        if not self.size:
            raise ValueError(f'{vocab} holds no token; it should hold the number of each, as {{"the": 262, ...}}')
        self._end_of_text = self._tokenizer.token_to_id("<|endoftext|>")

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self._tokenizer.get_vocab_size()

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Token ids of all documents, uint16[length], or uint32 of a vocabulary of more than 65,536 tokens."""
        dtype = np.uint16 if self.size <= 1 << 16 else np.uint32
        parts: list[np.ndarray] = []
        for number, document in enumerate(documents):
            if number and self._end_of_text is not None:
                parts.append(np.array([self._end_of_text], dtype))
            pieces = list(_pieces(document.decode("utf-8", errors="replace")))
            parts.extend(np.array(piece.ids, dtype) for piece in self._tokenizer.encode_batch(pieces))
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def decode(self, tokens: Any) -> str:
        """The text of token ids; special tokens are shown."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)


class Numbers:
    """Tokens whose meaning is not known: a token file without its vocabulary. They print as numbers.

    Args:
        size: ids run from 0 to `size - 1`.

    Raises:
        ValueError: a size below 1.

    >>> Numbers(50257).decode([15496, 995])
    '15496 995'
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"a vocabulary of {size} tokens has none; its size is their number, such as 50257")
        self.size = size

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Nothing: what the tokens of a text would be is not known.

        Raises:
            ValueError: always.
        """
        raise ValueError("text needs a vocabulary; give vocabulary files, or read it as bytes")

    def decode(self, tokens: Any) -> str:
        """The ids, with a space between them."""
        return " ".join(str(token) for token in np.asarray(tokens).tolist())


def read_bpe(folder: str | Path) -> BPE:
    """The byte-pair encoding of a folder, which holds `vocab.json` and `merges.txt`, also as `*-vocab.json` ...

    Args:
        folder: with one file of each.

    Raises:
        FileNotFoundError: a file is missing, or there are several, with what the folder holds.
        ImportError, ValueError: as `BPE` does.

    `cjax.data.BPE` has an example.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no vocabulary folder {folder}; it should hold vocab.json and merges.txt")
    found = [sorted(folder.glob(pattern)) for pattern in ("*vocab.json", "*merges.txt")]
    for name, files in zip(("vocab.json", "merges.txt"), found, strict=True):
        if len(files) != 1:
            held = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise FileNotFoundError(f"{folder} should hold one {name}, but has {len(files)} of them; it holds: {held}")
    return BPE(found[0][0], found[1][0])


def _pieces(text: str) -> Iterator[str]:
    """`text` cut where it changes no token, so that the encoder can work on all cores and in little memory."""
    begin = 0
    while len(text) - begin > _piece_size:
        cut = _safe_cut.search(text, begin + _piece_size)
        if cut is None:
            break
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]
