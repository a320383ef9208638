import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.data import train_tokenizer
from cjax.data.text.packing import Pieces, Sentences, pad, present, room, row_length, split_text


@given(st.integers(0, 60), st.integers(1, 9))
def test_pieces_hold_every_token_once(num_tokens: int, size: int):
    pieces = Pieces(np.arange(num_tokens), size + 3, before=(101, 7), after=(102,))
    rows = [pieces[index]["tokens"] for index in range(len(pieces))]
    assert all(row[:2].tolist() == [101, 7] and row[-1] == 102 and len(row) == size + 3 for row in rows)
    together = [token for row in rows for token in row[2:-1]]
    assert together == list(range(num_tokens // size * size))


def test_sentences_lose_what_has_no_room():
    texts = [np.array([5, 6]), np.arange(9), np.arange(3), np.arange(4)]  # three have room
    sentences = Sentences(texts, 5, before=(101,), after=(102,))
    assert [sentences[i]["tokens"].tolist() for i in range(2)] == [[101, 5, 6, 102], [101, 0, 1, 2, 102]]
    assert len(sentences) == 4 and sentences.num_cut == 2


def test_padding():
    assert pad(np.array([3], np.uint16), 3, -100).tolist() == [3, -100, -100]
    assert pad(np.array([3]), 3).dtype == np.int32
    assert present(np.array([3, 0]), 3).tolist() == [True, True, False]
    assert [row_length(n) for n in (1, 8, 9)] == [8, 8, 16] and row_length(9, 5) == 10
    assert room(3, 2) == 1
    with pytest.raises(ValueError, match="2 tokens has no room for text beside 2 special .* at least 3"):
        room(2, 2)


def test_documents_are_joined_and_the_end_is_held_out():
    documents = [b"to be or not", b"to be that is", b"the question"] * 10
    tokenizer = train_tokenizer(documents, 300)
    train, kept = split_text(documents, tokenizer, 5, 0.2, by_line=False)
    together = np.concatenate([part[i]["tokens"] for part in (train, kept) for i in range(len(part))])
    everything = tokenizer.encode(documents)
    assert (everything == tokenizer.end).sum() == 29
    split = round(0.8 * len(everything))
    wanted = np.concatenate(
        [everything[: split // 5 * 5], everything[split : split + (len(everything) - split) // 5 * 5]]
    )
    np.testing.assert_array_equal(together, wanted)


def test_lines_stay_whole():
    tokenizer = train_tokenizer(["abc"], 300)
    train, kept = split_text([b"ab\n\n  \nc", b"abc"], tokenizer, 8, 0.3, by_line=True)
    assert [tokenizer.decode(part[i]["tokens"]) for part in (train, kept) for i in range(len(part))] == [
        "ab",
        "c",
        "abc",
    ]
    assert len(kept) == 1


def test_too_little_text_is_refused():
    tokenizer = train_tokenizer(["abc"], 300)
    for by_line in (False, True):
        with pytest.raises(ValueError, match="no sample of 64 tokens"):
            split_text([b"abc" if not by_line else b" \n"], tokenizer, 64, 0.05, by_line=by_line)
    with pytest.raises(ValueError, match="held_out is 1"):
        split_text([b"abc"], tokenizer, 4, 1, by_line=False)
