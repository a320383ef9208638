"""Words hidden for a model to find: BERT's objective."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cjax.data.dataset import Dataset
from cjax.data.stream import Batch
from cjax.data.tasks.pairs import IGNORED
from cjax.data.text.packing import Sentences, pad, present, split_text
from cjax.data.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Masking:
    """Makes of `{"tokens"}` what `cjax.models.masked_loss` takes: `{"inputs", "present", "targets"}`.

    Of the tokens that are no special ones, `rate` are asked for, and `targets` is -100 at all others. The model sees
    the mask in place of 80 % of them, any other token in place of 10 %, and the token itself at 10 %. Their number is
    `rate` times the tokens, rounded up or down at random so that it is right on average, and at least one.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2018.

    Attributes:
        mask: id of the token that hides another.
        vocab_size: tokens put in place of others are below it.
        length: of a row; shorter samples are padded.
        special: ids that are never hidden nor put in another's place.
        rate: the share that is asked for.
        continues: bool[vocab_size], which tokens go on with the word before (`Tokenizer.continues`): whole words are
            hidden together, until no other fits into the number. None hides tokens each by itself.
        pad: id of padding.

    Raises:
        ValueError: a rate that is no share above 0 and below 1, no token that may be hidden; when called, a sample
            longer than a row.

    >>> make = Masking(mask=256, vocab_size=256, length=10)
    >>> found = make({"tokens": np.full(10, 65)}, np.random.default_rng(0))
    >>> int((found["targets"] == 65).sum()) in (1, 2), found["inputs"].shape
    (True, (10,))
    """

    mask: int
    vocab_size: int
    length: int
    special: tuple[int, ...] = ()
    rate: float = 0.15
    continues: np.ndarray | None = None
    pad: int = 0
    _words: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"Masking: rate={self.rate}; it is a share of the tokens, above 0 and below 1")
        words = np.setdiff1d(np.arange(self.vocab_size), self.special)
        if not len(words):
            raise ValueError(f"Masking: all of {self.vocab_size} tokens are special; none is left to be hidden")
        object.__setattr__(self, "_words", words)

    def __call__(self, sample: Mapping[str, np.ndarray], rng: np.random.Generator) -> Batch:
        tokens = sample["tokens"]
        if len(tokens) > self.length:
            raise ValueError(f"Masking: a sample has {len(tokens)} tokens, and rows hold {self.length}")
        asked = self._choose(tokens, rng)
        how = rng.random(len(asked))
        other = rng.choice(self._words, len(asked))
        inputs = tokens.astype(np.int32)
        inputs[asked] = np.where(how < 0.8, self.mask, np.where(how < 0.9, other, tokens[asked]))
        targets = np.full(len(tokens), IGNORED, np.int32)
        targets[asked] = tokens[asked]
        return {
            "inputs": pad(inputs, self.length, self.pad),
            "present": present(tokens, self.length),
            "targets": pad(targets, self.length, IGNORED),
        }

    def _choose(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The places that are asked for."""
        places = np.flatnonzero(~np.isin(tokens, self.special))
        num = min(max(1, int(self.rate * len(places) + rng.random())), len(places))
        if self.continues is None or not num:
            return rng.permutation(places)[:num]
        # A word ends where a token does not go on with it, and at special tokens, which lie between places.
        starts = ~self.continues[tokens[places]]
        starts[1:] |= np.diff(places) > 1
        words = np.split(places, np.flatnonzero(starts[1:]) + 1)
        chosen: list[np.ndarray] = []
        for word in (words[index] for index in rng.permutation(len(words))):
            if len(word) <= num:
                chosen.append(word)
                num -= len(word)
        return np.concatenate(chosen) if chosen else min(words, key=len)


def masked_data(
    data: str | Path | Sequence[bytes] | None,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence: int,
    by_line: bool = False,
    whole_words: bool = False,
    rate: float = 0.15,
    held_out: float = 0.05,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Dataset:
    """Text with hidden words as batches `{"inputs", "present", "targets"}`, for `cjax.models.masked_loss`.

    Each row is `[CLS] text [SEP]`; each epoch hides others. Validation always hides the same.

    Args:
        data: any file or folder, read as text; or documents in memory; None takes the source text of Python's standard
            library.
        tokenizer: with tokens for begin, end and mask.
        batch_size: rows of the global batch.
        sequence: tokens of a row.
        by_line: each line is a sample, padded or cut; otherwise documents are joined and cut into full rows.
        whole_words: hide all tokens of a word together.
        rate: the share that is asked for.
        held_out: the share at the end that is kept for validation.
        seed: order of the samples and what is hidden.
        shard: `(index, count)` of this process.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: too little text, a sequence without room, or a vocabulary without a token that is needed.

    >>> from cjax.data import train_tokenizer
    >>> text = b"to be or not to be " * 40
    >>> tokenizer = train_tokenizer([text], 40, kind="wordpiece")
    >>> next(masked_data([text], tokenizer, batch_size=4, sequence=32).batches())["targets"].shape
    (4, 32)
    """
    begin, end, mask = tokenizer.need("begin", "end", "mask")
    make = Masking(
        mask,
        tokenizer.size,
        sequence,
        tokenizer.special,
        rate,
        tokenizer.continues() if whole_words else None,
        tokenizer.pad or 0,
    )
    train, kept = split_text(data, tokenizer, sequence, held_out, by_line, before=(begin,), after=(end,))
    num_cut = sum(part.num_cut for part in (train, kept) if isinstance(part, Sentences))
    return Dataset(train, kept, batch_size, seed, shard, make, sequence, num_cut=num_cut)
