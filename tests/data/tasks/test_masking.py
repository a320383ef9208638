import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.data import Masking, masked_data, standard_library, train_tokenizer
from cjax.data.tasks.pairs import IGNORED

CLS, SEP, MASK = 101, 102, 103
SPECIAL = (0, CLS, SEP, MASK)


def mask(tokens: np.ndarray, seed: int = 0, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    make = Masking(**{"mask": MASK, "vocab_size": 200, "length": len(tokens), "special": SPECIAL} | options)
    found = make({"tokens": tokens}, np.random.default_rng(seed))
    return found["inputs"], found["present"], found["targets"]


def test_rates_are_berts():
    tokens = np.full(100_000, 50)
    inputs, _, targets = mask(tokens)
    asked = targets != IGNORED
    assert asked.sum() == 15_000 and (targets[asked] == 50).all()
    np.testing.assert_array_equal(inputs[~asked], tokens[~asked])
    shown = inputs[asked]
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.015)
    other = shown[(shown != MASK) & (shown != 50)]
    assert len(other) / len(shown) == pytest.approx(0.1, abs=0.01)
    assert set(other) == set(range(200)) - set(SPECIAL) - {50}


def test_short_texts_have_the_rate_on_average():
    counts = [(mask(np.full(16, 50), seed)[2] != IGNORED).sum() for seed in range(4000)]
    assert set(counts) == {2, 3} and np.mean(counts) == pytest.approx(2.4, abs=0.04)
    assert (mask(np.array([50]))[2] != IGNORED).sum() == 1


@given(
    st.lists(st.integers(0, 199), max_size=40), st.integers(0, 2**32), st.sampled_from([0.1, 0.15, 0.9]), st.booleans()
)
def test_special_tokens_and_padding_are_never_asked_for(tokens, seed, rate, whole_words):
    continues = np.arange(200) % 3 == 0 if whole_words else None
    array = np.array(tokens, np.int32)
    make = Masking(MASK, 200, 44, SPECIAL, rate, continues, pad=7)
    found = make({"tokens": array}, np.random.default_rng(seed))
    asked = found["targets"] != IGNORED
    num_words = int((~np.isin(array, SPECIAL)).sum())
    assert not np.isin(found["targets"][asked], SPECIAL).any()
    np.testing.assert_array_equal(found["targets"][asked], array[asked[: len(array)]])
    assert not asked[len(array) :].any() and (found["inputs"][len(array) :] == 7).all()
    assert found["present"].sum() == len(array) and found["present"][: len(array)].all()
    assert min(1, num_words) <= asked.sum()
    if not whole_words:
        assert abs(asked.sum() - rate * num_words) < 1
    assert (array == np.array(tokens, np.int32)).all()  # the source's own array is left as it was


def test_words_are_hidden_whole():
    # Words of 1, 2 and 3 tokens, told by their tens; 1 and 2 at the end go on with a word.
    tokens = np.array([CLS, 10, 20, 21, 30, 31, 32, SEP, 40, 50, 51, 60, 61, 62, SEP])
    continues = np.arange(200) % 10 > 0
    seen = set()
    for seed in range(300):
        _, _, targets = mask(tokens, seed, continues=continues, rate=0.3)
        asked = targets != IGNORED
        words = {int(token) // 10 for token in targets[asked]}
        np.testing.assert_array_equal(asked, np.isin(tokens // 10, list(words)) & (tokens < 100))
        assert 1 <= asked.sum() <= 4
        seen |= words
    assert seen == {1, 2, 3, 4, 5, 6}
    # A word longer than the number is hidden only where there is none that fits.
    _, _, targets = mask(np.array([CLS, 30, 31, 32, SEP]), continues=continues)
    assert (targets != IGNORED).tolist() == [False, True, True, True, False]


def test_a_special_token_ends_a_word():
    continues = np.arange(200) % 10 > 0
    for seed in range(50):
        _, _, targets = mask(np.array([10, SEP, 11]), seed, continues=continues, rate=0.4)
        assert (targets != IGNORED).sum() == 1


def test_each_epoch_hides_others_and_validation_the_same():
    text = b"\n".join(standard_library(60_000))
    tokenizer = train_tokenizer([text], 400, kind="wordpiece")
    data = masked_data([text], tokenizer, batch_size=4, sequence=32, held_out=0.1, seed=3, whole_words=True)
    num = len(data.train)
    stream = list(itertools.islice(data.batches(), 2 * num // 4 + 1))
    rows = {name: np.concatenate([batch[name] for batch in stream])[: 2 * num] for name in stream[0]}
    assert (rows["inputs"][:, 0] == tokenizer.begin).all() and (rows["inputs"][:, -1] == tokenizer.end).all()
    hidden: dict[bytes, list[bytes]] = {}
    for inputs, targets in zip(rows["inputs"], rows["targets"], strict=True):
        hidden.setdefault(np.where(targets == IGNORED, inputs, targets).tobytes(), []).append(targets.tobytes())
    twice = [found for found in hidden.values() if len(found) == 2]
    assert len(twice) > 0.9 * num and np.mean([one != two for one, two in twice]) > 0.99
    again = next(data.batches(start=4 * 7))
    np.testing.assert_array_equal(again["targets"], stream[7]["targets"])
    one, two = next(data.validation()), next(data.validation())
    np.testing.assert_array_equal(one["inputs"], two["inputs"])
    assert data.identity != masked_data([text], tokenizer, batch_size=4, sequence=32, held_out=0.1, seed=3).identity


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(ValueError, match="rate=1"):
        Masking(MASK, 200, 8, rate=1)
    with pytest.raises(ValueError, match="all of 3 tokens are special"):
        Masking(MASK, 3, 8, special=(0, 1, 2))
    with pytest.raises(ValueError, match="9 tokens, and rows hold 8"):
        Masking(MASK, 200, 8)({"tokens": np.zeros(9, int)}, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no token for 'begin'"):
        masked_data([b"abc" * 99], train_tokenizer(["abc"], 300), batch_size=1, sequence=8)
