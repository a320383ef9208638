import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from cjax.data import Bytes, Numbers, TextData, text_data
from cjax.data.text.text import Windows


@pytest.fixture
def data() -> TextData:
    tokens = np.arange(1000) % 251
    return TextData(tokens[:900].astype(np.uint8), tokens[900:].astype(np.uint8), Bytes(), batch_size=4, sequence=7)


def test_targets_are_the_inputs_one_token_later(data: TextData):
    for batch in itertools.islice(data.batches(), 50):
        assert batch["inputs"].shape == batch["targets"].shape == (4, 7)
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        np.testing.assert_array_equal((batch["inputs"] + 1) % 251, batch["targets"])


def test_an_epoch_trains_on_every_token_once(data: TextData):
    num_windows = 899 // 7
    whole = dataclasses.replace(data, batch_size=num_windows)
    batch = next(whole.batches())
    targets = np.sort(batch["targets"], axis=None)
    np.testing.assert_array_equal(targets, np.sort(data.train[1 : num_windows * 7 + 1]))


def test_processes_and_position(data: TextData):
    whole = list(itertools.islice(data.batches(), 6))
    half = dataclasses.replace(data, shard=(1, 2))
    np.testing.assert_array_equal(next(half.batches(start=8))["inputs"], whole[2]["inputs"][2:])


def test_validation_is_the_held_out_text_in_order(data: TextData):
    batches = list(data.validation())
    assert len(batches) == 3
    together = np.concatenate([batch["inputs"] for batch in batches])
    np.testing.assert_array_equal(together.ravel(), data.held_out[: 12 * 7])
    assert len(list(data.validation(max_batches=2))) == 2
    assert list(dataclasses.replace(data, held_out=data.held_out[:20]).validation()) == []


def test_unigram_entropy():
    tokens = np.array([0] * 8 + [1] * 4 + [2] * 2 + [3] * 2, np.uint16)
    data = TextData(tokens, tokens[:0], Numbers(9), batch_size=1, sequence=2)
    assert data.unigram_entropy == pytest.approx(1.75 * np.log(2))


def test_the_default_is_the_standard_library():
    data = text_data(batch_size=8, sequence=64)
    batch = next(data.batches())
    assert data.vocab_size == 256 and batch["inputs"].shape == (8, 64)
    assert 2.5 < data.unigram_entropy < 4
    assert len(data.held_out) / len(data.train) == pytest.approx(5 / 95, rel=1e-3)
    assert "def " in data.decode(data.train[:20_000])


def test_a_text_file(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"abcdefghij" * 10)
    data = text_data(tmp_path / "a.txt", batch_size=2, sequence=5, held_out=0.2)
    assert (len(data.train), len(data.held_out)) == (80, 20)
    assert data.decode(next(data.validation())["targets"][0]) == "bcdef"


def test_token_files(tmp_path: Path):
    np.arange(40, dtype="<u2").tofile(tmp_path / "train.bin")
    alone = text_data(tmp_path / "train.bin", batch_size=1, sequence=4, held_out=0.25)
    assert (len(alone.train), len(alone.held_out), alone.vocab_size) == (30, 10, 50257)
    np.arange(9, dtype="<u2").tofile(tmp_path / "val.bin")
    both = text_data(tmp_path, batch_size=1, sequence=4, vocab_size=50)
    assert (len(both.train), len(both.held_out), both.vocab_size) == (40, 9, 50)
    assert both.decode(both.held_out) == "0 1 2 3 4 5 6 7 8"


def test_identity_tells_other_text_and_another_seed(data: TextData):
    assert data.identity == dataclasses.replace(data, shard=(0, 2), batch_size=2).identity
    assert data.identity != dataclasses.replace(data, seed=1).identity
    assert data.identity != dataclasses.replace(data, train=data.train[::-1]).identity


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, data: TextData):
    np.array([1, 2, 300, 4] * 9, "<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match="token 300 at position 2, outside a vocabulary of 256.*at least 301"):
        text_data(tmp_path / "train.bin", batch_size=1, sequence=2, vocab_size=256)
    with pytest.raises(ValueError, match="900 tokens; one batch of 200 rows of 7 tokens needs 1401"):
        dataclasses.replace(data, batch_size=200)
    with pytest.raises(ValueError, match="must be at least 1"):
        dataclasses.replace(data, sequence=0)
    with pytest.raises(ValueError, match="held_out is 1"):
        text_data(batch_size=1, sequence=1, held_out=1)
    with pytest.raises(ValueError, match="vocab_size is for a token file"):
        text_data(batch_size=1, sequence=1, vocab_size=256)
    with pytest.raises(FileNotFoundError, match="vocabulary folder"):
        text_data(batch_size=1, sequence=1, vocabulary=tmp_path / "bpe")


def test_each_window_has_a_token_behind_it():
    for num_tokens, num_windows in ((12, 2), (13, 3), (4, 0), (0, 0)):
        windows = Windows(np.arange(num_tokens), 4)
        assert len(windows) == num_windows
        assert all(len(windows[i]["targets"]) == 4 for i in range(num_windows))


def test_a_vocabulary_ends_before_its_size():
    tokens = np.array([0, 1, 4, 2, 3])
    TextData(tokens, tokens, Numbers(5), batch_size=1, sequence=4)
    with pytest.raises(ValueError, match="token 4 at position 2, outside a vocabulary of 4.*at least 5"):
        TextData(tokens, tokens, Numbers(4), batch_size=1, sequence=4)
