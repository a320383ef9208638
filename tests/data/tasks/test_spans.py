import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.data import Spans, span_data, span_lengths, train_tokenizer
from cjax.data.tasks.pairs import IGNORED
from cjax.data.tasks.spans import _cut, text_for

SENTINELS = tuple(range(999, 899, -1))
END = 1


def test_lengths_are_t5s():
    # The numbers of the paper's own runs: 512 tokens of source come of 568 of text, and make 114 of target.
    assert (text_for(512).text, text_for(512).target) == (568, 114)
    assert span_lengths(568).num_spans == 28 and span_lengths(568).num_taken == 85


@given(st.integers(3, 200), st.sampled_from([0.05, 0.15, 0.5, 0.9]), st.sampled_from([1.0, 3.0, 10.0]))
def test_the_text_is_the_longest_that_fits(source: int, rate: float, mean: float):
    found = text_for(source, rate, mean)
    assert found.source <= source < span_lengths(found.text + 1, rate, mean).source


@given(
    st.integers(1, 120),
    st.sampled_from([0.05, 0.15, 0.5, 0.9]),
    st.sampled_from([1.0, 3.0, 10.0]),
    st.integers(0, 2**32),
)
def test_source_and_target_together_are_the_text(num_tokens: int, rate: float, mean: float, seed: int):
    tokens = np.arange(10, 10 + num_tokens)
    sentinels = tuple(range(9999, 9800, -1))
    found = Spans(sentinels, END, 120, rate, mean)({"tokens": tokens}, np.random.default_rng(seed))
    lengths = span_lengths(num_tokens, rate, mean)
    source, target = found["source"][found["present"]], found["targets"][found["targets"] != IGNORED]
    assert (len(source), len(target)) == (lengths.source, lengths.target)
    assert source[-1] == target[-1] == END
    used = list(sentinels[: lengths.num_spans])
    assert [token for token in source if token > 1000] == [token for token in target if token > 1000] == used
    spans = np.split(target[:-1], np.flatnonzero(target[:-1] > 1000)[1:])
    assert all(len(span) > 1 for span in spans)
    filled = [spans[used.index(token)][1:] if token > 1000 else [token] for token in source[:-1]]
    np.testing.assert_array_equal(np.concatenate(filled), tokens)
    assert found["inputs"][0] == 0
    np.testing.assert_array_equal(found["inputs"][1 : len(target)], target[:-1])
    longest = span_lengths(120, rate, mean)
    assert found["source"].shape == (longest.source,) and found["targets"].shape == (longest.target,)


def test_every_place_can_be_taken():
    make = Spans(SENTINELS, END, 40)
    found = [make({"tokens": np.arange(10, 50)}, np.random.default_rng(seed))["targets"] for seed in range(600)]
    taken, counts = np.unique([t for t in np.concatenate(found) if 10 <= t < 50], return_counts=True)
    assert taken.tolist() == list(range(11, 50))  # the first token of a text is never taken
    assert counts.sum() == 600 * span_lengths(40).num_taken and counts[10:-10].max() < 2.2 * counts[10:-10].min()


def test_text_with_spans_taken_out():
    text = b"to be or not to be, that is the question. " * 60
    tokenizer = train_tokenizer([text], 300, num_sentinels=16)
    data = span_data([text], tokenizer, batch_size=2, sequence=24, held_out=0.1)
    lengths = text_for(24)
    batch = next(data.batches())
    assert batch["source"].shape == (2, lengths.source) and batch["targets"].shape == (2, lengths.target)
    assert (
        batch["present"].all()
        and (batch["targets"] != IGNORED).all()
        and data.sequence == lengths.source + lengths.target
    )
    assert (batch["source"] == tokenizer.sentinels[0]).sum() == 2
    np.testing.assert_array_equal(next(data.batches(start=2))["source"], _second(data)["source"])
    lines = span_data(
        [b"to be\nor\n" * 9 + b"not to be, that is the question " * 5],
        tokenizer,
        batch_size=2,
        sequence=24,
        by_line=True,
    )
    batch = next(lines.batches())
    assert not batch["present"].all() and (batch["targets"] == IGNORED).any()
    assert span_data([text], tokenizer, batch_size=1, sequence=24, by_line=True, held_out=0).num_cut == 1


def _second(data):
    stream = data.batches()
    next(stream)
    return next(stream)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="568 tokens has 28 spans, and the vocabulary has 4 sentinels"):
        Spans(SENTINELS[:4], END, 568)
    with pytest.raises(ValueError, match="2 tokens has no room .* at least 3"):
        text_for(2)
    with pytest.raises(ValueError, match="rate=0, mean=3"):
        text_for(9, rate=0)
    with pytest.raises(ValueError, match="0 tokens; it needs at least 1 and at most 9"):
        Spans(SENTINELS, END, 9)({"tokens": np.zeros(0, int)}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="vocabulary has 0 sentinels"):
        span_data([b"abc" * 99], train_tokenizer(["abc"], 300), batch_size=1, sequence=8)


def test_a_cut_may_be_at_every_place():
    found = {tuple(_cut(4, 2, np.random.default_rng(seed))) for seed in range(40)}
    assert found == {(1, 3), (2, 2), (3, 1)}
    assert _cut(0, 1, np.random.default_rng(0)) == [0]
