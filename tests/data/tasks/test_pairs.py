from pathlib import Path

import numpy as np
import pytest

from cjax.data import Tokenizer, pair_data, read_pairs, train_tokenizer
from cjax.data.tasks.pairs import IGNORED


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["abcdefg"], 259)  # letters by themselves


def test_the_decoder_reads_its_targets_one_later(tokenizer: Tokenizer):
    data = pair_data(
        [("ab", "c"), ("abc", "defg")], tokenizer, batch_size=2, source_length=4, target_length=4, held_out=0
    )
    first, second = data.train[0], data.train[1]
    a, b, c, d, e, f, _ = tokenizer.encode_each(["abcdefg"])[0]
    assert first["source"].tolist() == [a, b, 1, 0] and first["present"].tolist() == [True, True, True, False]
    assert first["inputs"].tolist() == [0, c, 0, 0] and first["targets"].tolist() == [c, 1, IGNORED, IGNORED]
    assert second["source"].tolist() == [a, b, c, 1] and second["targets"].tolist() == [d, e, f, 1]
    assert second["inputs"].tolist() == [0, d, e, f]
    assert data.num_cut == 1 and data.sequence == 8
    batch = next(data.batches())
    assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
        "source": (np.int32, (2, 4)), "present": (bool, (2, 4)),
        "inputs": (np.int32, (2, 4)), "targets": (np.int32, (2, 4)),
    }  # fmt: skip


def test_lengths_are_the_longest_unless_given(tokenizer: Tokenizer):
    data = pair_data([("a" * 9, "b"), ("c", "d" * 7)], tokenizer, batch_size=1)
    assert data.train[0]["source"].shape == (16,) and data.train[0]["targets"].shape == (8,) and data.num_cut == 0
    assert len(data.train) == len(data.held_out) == 1


def test_pairs_from_tables_and_parallel_files(tmp_path: Path, tokenizer: Tokenizer):
    (tmp_path / "a.tsv").write_text("id\tsource\ttarget\n1\tab\tc\n2\td\te f\n")
    (tmp_path / "a.de").write_text("ab\nd\n")
    (tmp_path / "a.en").write_text("c\ne f\n\n")
    wanted = [("ab", "c"), ("d", "e f")]
    paths = (tmp_path / "a.de", tmp_path / "a.en")
    assert read_pairs(tmp_path / "a.tsv") == read_pairs(paths) == wanted
    samples = [
        pair_data(data, tokenizer, batch_size=2, held_out=0).identity
        for data in (wanted, paths, str(tmp_path / "a.tsv"))
    ]
    assert samples[0] == samples[1] == samples[2]
    (tmp_path / "a.en").write_text("c\n")
    with pytest.raises(
        ValueError, match="a.de has 2 lines and .*a.en has 1; .* line 2 of .*a.de and on belong to none"
    ):
        read_pairs(paths)


def test_what_cannot_be_is_refused(tmp_path: Path, tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"1 pair\(s\) have an empty text, the first is number 1"):
        pair_data([("a", "b"), (" ", "c")], tokenizer, batch_size=1)
    with pytest.raises(ValueError, match="1 tokens has no room"):
        pair_data([("a", "b"), ("c", "d")], tokenizer, batch_size=1, target_length=1)
    with pytest.raises(ValueError, match="the data has 1 different example"):
        pair_data([("a", "b")], tokenizer, batch_size=1)
    with pytest.raises(ValueError, match="name two, a source and a target"):
        read_pairs(tmp_path, columns=("source",))
    with pytest.raises(ValueError, match="there are no pairs"):
        pair_data([], tokenizer, batch_size=1)
    with pytest.raises(ValueError, match="no token for 'end'"):
        pair_data([("a", "b"), ("c", "d")], without_end(tmp_path), batch_size=1, held_out=0)


def without_end(folder: Path) -> Tokenizer:
    import tokenizers

    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")))
