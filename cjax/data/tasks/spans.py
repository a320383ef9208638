"""Spans of text taken out for a decoder to write: T5's objective."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cjax.data.dataset import Dataset
from cjax.data.stream import Batch
from cjax.data.tasks.pairs import encoder_decoder
from cjax.data.text.packing import Sentences, split_text
from cjax.data.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class SpanLengths:
    """What becomes of a text of `text` tokens.

    Attributes:
        text: tokens before anything is taken out.
        num_taken: tokens that are taken out.
        num_spans: in how many spans.
    """

    text: int
    num_taken: int
    num_spans: int

    @property
    def source(self) -> int:
        """Tokens of the encoder: what is left, a sentinel for each span, and the end."""
        return self.text - self.num_taken + self.num_spans + 1

    @property
    def target(self) -> int:
        """Tokens of the decoder: a sentinel before each span, the span, and the end."""
        return self.num_taken + self.num_spans + 1


def span_lengths(text: int, rate: float = 0.15, mean: float = 3.0) -> SpanLengths:
    """What becomes of `text` tokens when about `rate` of them are taken out, in spans of `mean` tokens on average.

    Args:
        text: tokens before anything is taken out, at least 2.
        rate: the share that is taken out.
        mean: tokens of a span, on average.

    >>> lengths = span_lengths(568)
    >>> lengths.source, lengths.target
    (512, 114)
    """
    num_taken = max(1, min(round(text * rate), text - 1))
    num_spans = max(1, min(round(num_taken / mean), num_taken, text - num_taken))
    return SpanLengths(text, num_taken, num_spans)


def text_for(source: int, rate: float = 0.15, mean: float = 3.0) -> SpanLengths:
    """The longest text whose source is at most `source` tokens.

    Raises:
        ValueError: there is none, or a rate or mean that makes no sense.

    >>> text_for(512).text
    568
    """
    if not 0 < rate < 1 or mean < 1:
        raise ValueError(f"rate={rate}, mean={mean}; a rate is above 0 and below 1, and a span has at least 1 token")
    if source < span_lengths(2, rate, mean).source:
        raise ValueError(
            f"a source of {source} tokens has no room for text beside a sentinel and the end; it needs at least 3"
        )
    text = 1
    while span_lengths(text + 1, rate, mean).source <= source:
        text += 1
    return span_lengths(text, rate, mean)


@dataclasses.dataclass(frozen=True)
class Spans:
    """Makes of `{"tokens"}` what `cjax.models.t5_loss` takes: `{"source", "present", "inputs", "targets"}`.

    Spans are drawn so that all ways to cut the text into as many are equally likely; it begins with what stays and
    ends with what is taken. Each span is a sentinel in the source, another for each; the target is each sentinel with
    its span, in order, and the end. Lengths are known before: see `span_lengths`.

    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019.

    Attributes:
        sentinels: ids, as many as there are spans in the longest text or more.
        end: id of the end token.
        longest: the most tokens of a sample.
        rate: the share that is taken out.
        mean: tokens of a span, on average.
        pad: id of padding.

    Raises:
        ValueError: fewer sentinels than spans; when called, an empty sample, or one longer than `longest`.

    >>> make = Spans(sentinels=(99, 98), end=1, longest=10)
    >>> found = make({"tokens": np.arange(10, 20)}, np.random.default_rng(0))
    >>> found["source"].tolist(), found["targets"].tolist()
    ([10, 11, 12, 13, 14, 15, 16, 17, 99, 1], [99, 18, 19, 1])
    """

    sentinels: tuple[int, ...]
    end: int
    longest: int
    rate: float = 0.15
    mean: float = 3.0
    pad: int = 0

    def __post_init__(self) -> None:
        if (needed := span_lengths(self.longest, self.rate, self.mean).num_spans) > len(self.sentinels):
            raise ValueError(
                f"a text of {self.longest} tokens has {needed} spans, and the vocabulary has {len(self.sentinels)} "
                "sentinels; take a shorter sequence, longer spans, or a vocabulary with more of them"
            )

    def __call__(self, sample: Mapping[str, np.ndarray], rng: np.random.Generator) -> Batch:
        tokens = sample["tokens"]
        if not 0 < len(tokens) <= self.longest:
            raise ValueError(
                f"Spans: a sample has {len(tokens)} tokens; it needs at least 1 and at most {self.longest}"
            )
        lengths = span_lengths(len(tokens), self.rate, self.mean)
        taken = _cut(lengths.num_taken, lengths.num_spans, rng)
        left = _cut(lengths.text - lengths.num_taken, lengths.num_spans, rng)
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        place = 0
        for sentinel, num_left, num_taken in zip(self.sentinels, left, taken, strict=False):
            source += [tokens[place : place + num_left], np.array([sentinel])]
            place += num_left
            target += [np.array([sentinel]), tokens[place : place + num_taken]]
            place += num_taken
        end = np.array([self.end])
        longest = span_lengths(self.longest, self.rate, self.mean)
        return encoder_decoder(
            np.concatenate([*source, end]), np.concatenate([*target, end]), longest.source, longest.target, self.pad
        )


def span_data(
    data: str | Path | Sequence[bytes] | None,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence: int,
    by_line: bool = False,
    rate: float = 0.15,
    mean: float = 3.0,
    held_out: float = 0.05,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Dataset:
    """Text with spans taken out as batches `{"source", "present", "inputs", "targets"}`, for `cjax.models.t5_loss`.

    Each epoch takes out others; validation always the same.

    Args:
        data: any file or folder, read as text; or documents in memory; None takes the source text of Python's standard
            library.
        tokenizer: with a token for the end, and sentinels.
        batch_size: rows of the global batch.
        sequence: tokens of the source; the text is as long as makes that many (`text_for`), and so is the target.
        by_line: each line is a sample, padded or cut; otherwise documents are joined and cut into full rows.
        rate: the share that is taken out.
        mean: tokens of a span, on average.
        held_out: the share at the end that is kept for validation.
        seed: order of the samples and what is taken out.
        shard: `(index, count)` of this process.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: too little text, a sequence without room, or a vocabulary without sentinels or end.

    >>> from cjax.data import train_tokenizer
    >>> text = b"to be or not to be " * 40
    >>> data = span_data([text], train_tokenizer([text], 280, num_sentinels=9), batch_size=4, sequence=32)
    >>> {name: array.shape for name, array in next(data.batches()).items()}
    {'source': (4, 32), 'present': (4, 32), 'inputs': (4, 8), 'targets': (4, 8)}
    """
    (end,) = tokenizer.need("end")
    lengths = text_for(sequence, rate, mean)
    make = Spans(tokenizer.sentinels, end, lengths.text, rate, mean, tokenizer.pad or 0)
    train, kept = split_text(data, tokenizer, lengths.text, held_out, by_line)
    num_cut = sum(part.num_cut for part in (train, kept) if isinstance(part, Sentences))
    total = lengths.source + lengths.target
    return Dataset(train, kept, batch_size, seed, shard, make, total, num_cut=num_cut)


def _cut(total: int, num_parts: int, rng: np.random.Generator) -> list[int]:
    """Sizes of `num_parts` parts of at least 1, all such cuts equally likely; of nothing, one part of 0."""
    if total == 0:
        return [0]
    cuts = 1 + rng.permutation(total - 1)[: num_parts - 1]
    return np.diff([0, *np.sort(cuts), total]).tolist()
