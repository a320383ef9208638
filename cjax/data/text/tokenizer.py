"""Tokenizers of Hugging Face's `tokenizers`: WordPiece from a `vocab.txt`, a `tokenizer.json`, or one's own."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

# What the best known models call each kind of special token: BERT's, T5's, GPT-2's, Llama's.
_NAMES = {
    "begin": ("[CLS]", "<s>", "<|begin_of_text|>"),
    "end": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unknown": ("[UNK]", "<unk>"),
}
_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_SENTINEL = "<extra_id_{}>"  # as T5 names the tokens that stand for a span, the first with the largest id


class Tokenizer:
    """Text to tokens and back, and what the special tokens are.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; its truncation and padding are switched off.

    Attributes:
        size: ids are below it.
        begin, end, pad, mask, unknown: ids of special tokens; None where the vocabulary has none.
        sentinels: ids of T5's `<extra_id_0>`, `<extra_id_1>` and on; may be empty.
        special: all ids that stand for no text.

    >>> tokenizer = train_tokenizer(["low lower lowest"] * 4, size=270)
    >>> (tokens,) = tokenizer.encode_each(["lower"])
    >>> tokenizer.decode(tokens), tokenizer.need("end") == (tokenizer.end,)
    ('lower', True)
    """

    def __init__(self, tokenizer: Any):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        ids = {kind: self._first(names) for kind, names in _NAMES.items()}
        self.begin, self.end, self.pad = ids["begin"], ids["end"], ids["pad"]
        self.mask, self.unknown = ids["mask"], ids["unknown"]
        found: list[int] = []
        while (sentinel := tokenizer.token_to_id(_SENTINEL.format(len(found)))) is not None:
            found.append(sentinel)
        self.sentinels = tuple(found)
        named = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self.size: int = max(tokenizer.get_vocab().values()) + 1
        self.special = tuple(sorted({*named, *found, *(token for token in ids.values() if token is not None)}))

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """All documents in one array, joined by the `end` token where there is one."""
        dtype = np.uint16 if self.size <= 1 << 16 else np.uint32
        parts: list[np.ndarray] = []
        for tokens in self.encode_each(document.decode("utf-8", errors="replace") for document in documents):
            if parts and self.end is not None:
                parts.append(np.array([self.end]))
            parts.append(tokens)
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    def encode_each(self, texts: Iterable[str]) -> list[np.ndarray]:
        """The tokens of each text, int32[length], without special ones."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(text.ids, np.int32) for text in encoded]

    def encode_prompt(self, text: str) -> np.ndarray:
        """The tokens of a text as its model is given one, int32[length]: with the special ones that go around it."""
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def decode(self, tokens: Any, *, skip_special: bool = False) -> str:
        """The text of token ids; special tokens are shown, unless `skip_special`."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=skip_special)

    def continues(self) -> np.ndarray:
        """bool[size]: which tokens go on with the word before them.

        Raises:
            ValueError: the tokens don't tell, as WordPiece's `##` and the marked spaces of BPE and SentencePiece do.
        """
        names: list[str] = [self._tokenizer.id_to_token(token) or " " for token in range(self.size)]
        if type(self._tokenizer.model).__name__ == "WordPiece":
            return np.array([name.startswith("##") for name in names])
        if any(name[0] == "\u0120" for name in names):
            # Byte-level: bytes above ASCII are parts of letters, and from U+0100 on come space and control characters.
            goes_on = [name[0].isalnum() if name[0].isascii() else not 0x100 <= ord(name[0]) <= 0x120 for name in names]
        elif any(name[0] == "\u2581" for name in names):
            goes_on = [name[0].isalnum() for name in names]
        else:
            raise ValueError("this vocabulary does not mark where words begin; mask tokens, not whole words")
        return np.array(goes_on)

    def need(self, *kinds: str) -> tuple[int, ...]:
        """The ids of special tokens.

        Raises:
            ValueError: the vocabulary lacks one, with the names that were looked for.
        """
        ids = [getattr(self, kind) for kind in kinds]
        for kind, token in zip(kinds, ids, strict=True):
            if token is None:
                raise ValueError(
                    f"this vocabulary has no token for {kind!r}, such as {' or '.join(_NAMES[kind])}; take one that has"
                )
        return tuple(ids)

    def save(self, folder: str | Path) -> Path:
        """Writes `tokenizer.json`, which `read_tokenizer` and transformers read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"

    def _first(self, names: Iterable[str]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)


def read_tokenizer(path: str | Path, *, lowercase: bool = True) -> Tokenizer:
    r"""The tokenizer of a folder or a file: `tokenizer.json`, or BERT's `vocab.txt`, one token a line.

    Args:
        path: a `.json` or `.txt` file, or a folder with either; `tokenizer.json` goes first.
        lowercase: for a `vocab.txt`: BERT's uncased text, in lower case and without accents. A `tokenizer.json` says
            itself what it does.

    Raises:
        FileNotFoundError: neither is there, with what the folder holds.
        ValueError: a file that is no tokenizer, with what is wrong.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld")
    ...     tokenizer = read_tokenizer(folder)
    >>> tokenizer.encode_prompt("Hello world").tolist(), tokenizer.mask
    ([5, 6], 4)
    """
    path = Path(path)
    file = path
    if path.is_dir():
        file = next((path / name for name in ("tokenizer.json", "vocab.txt") if (path / name).is_file()), path)
    if not file.is_file():
        held = ", ".join(sorted(other.name for other in path.iterdir())[:8]) or "nothing" if path.is_dir() else None
        raise FileNotFoundError(
            f"{path} should hold tokenizer.json or vocab.txt; it holds: {held}" if held else f"there is no file {path}"
        )
    return Tokenizer(_from_json(file) if file.suffix == ".json" else _word_piece(file, lowercase))


def train_tokenizer(
    documents: Iterable[str | bytes],
    size: int,
    *,
    kind: Literal["bpe", "wordpiece"] = "bpe",
    num_sentinels: int = 0,
) -> Tokenizer:
    """A tokenizer learned from text: byte-level BPE with T5's special tokens, or BERT's WordPiece.

    Args:
        documents: text; bytes are read as UTF-8.
        size: tokens, special ones included; fewer if the text has no more.
        kind: "bpe", any text and back (`<pad>` is 0, `</s>` 1, `<unk>` 2); or "wordpiece", in lower case.
        num_sentinels: tokens that stand for a span, counted down from the end of the vocabulary, as T5 has 100.

    Raises:
        ValueError: a size without room for words, or no text.

    >>> tokenizer = train_tokenizer(["to be or not to be"] * 9, 300, num_sentinels=4)
    >>> tokenizer.decode(tokenizer.encode_each(["not to be"])[0]), tokenizer.sentinels[0] == tokenizer.size - 1
    ('not to be', True)
    """
    library = _library()
    special = ["<pad>", "</s>", "<unk>"] if kind == "bpe" else _BERT
    smallest = len(special) + num_sentinels + (256 if kind == "bpe" else 1)
    if size < smallest:
        raise ValueError(
            f"a {kind} vocabulary of {size} tokens has no room for words; its special tokens"
            f"{' and all bytes' if kind == 'bpe' else ''} take {smallest}"
        )
    options: dict[str, Any] = {"vocab_size": size - num_sentinels, "special_tokens": special, "show_progress": False}
    if kind == "bpe":
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    else:
        tokenizer = _bert({"[UNK]": 0}, lowercase=True)
        trainer = library.trainers.WordPieceTrainer(continuing_subword_prefix="##", **options)
    texts = [text if isinstance(text, str) else text.decode("utf-8", errors="replace") for text in documents]
    if not any(text.strip() for text in texts):
        raise ValueError("there is no text to learn a vocabulary from")
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_SENTINEL.format(number) for number in reversed(range(num_sentinels))])
    return Tokenizer(tokenizer)


def _from_json(file: Path) -> Any:
    try:
        return _library().Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{file} is no tokenizer that the tokenizers package can read ({error})") from error


def _word_piece(file: Path, lowercase: bool) -> Any:
    try:
        names = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error}); copy or download it again") from error
    if missing := [name for name in _BERT if name not in names]:
        raise ValueError(f"{file} lacks {', '.join(missing)}; BERT's vocab.txt has one token on each line, these too")
    if len(set(names)) < len(names):
        twice = next(number for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"{file} has the token {names[twice]!r} twice, again in line {twice + 1}")
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = _bert(vocabulary, lowercase)
    tokenizer.add_special_tokens(_BERT)
    return tokenizer


def _bert(vocabulary: dict[str, int], lowercase: bool) -> Any:
    """Devlin et al., 2018: control characters and accents dropped, split at spaces and punctuation, longest match."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError('a tokenizer needs the tokenizers package: pip install "cjax[data]"') from error
    return tokenizers
