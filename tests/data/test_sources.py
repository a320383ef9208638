import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cjax.data import Dataset, HuggingFace, Mixture, Rows, batches


def source(first: int, length: int) -> Rows:
    return Rows({"x": np.arange(first, first + length)})


@pytest.fixture
def mixed() -> Mixture:
    return Mixture([source(0, 12), source(100, 5), source(200, 40)], weights=[6, 1, 3])


def drawn(mixed: Mixture, count: int, **options: Any) -> np.ndarray:
    stream = batches(mixed, 4, seed=3, **options)
    return np.concatenate([batch["x"] for batch in itertools.islice(stream, count // 4)])


def test_each_source_has_its_share_in_every_stretch(mixed: Mixture):
    whose = drawn(mixed, 1000) // 100
    for begin in range(0, 1000, 100):
        counts = np.bincount(whose[begin : begin + 100], minlength=3)
        np.testing.assert_allclose(counts, [60, 10, 30], atol=2)


def test_each_source_is_read_whole_before_it_begins_anew_in_another_order(mixed: Mixture):
    found = drawn(mixed, 400)
    for first, length in ((0, 12), (100, 5), (200, 40)):
        own = found[found // 100 == first // 100]
        one, two = own[:length], own[length : 2 * length]
        assert sorted(one) == sorted(two) == list(range(first, first + length)) and one.tolist() != two.tolist()


@pytest.mark.full
def test_the_order_is_the_seeds_and_the_positions_whatever_the_processes(mixed: Mixture):
    whole = drawn(mixed, 400)
    np.testing.assert_array_equal(drawn(mixed, 200, start=200), whole[200:])
    parts = [next(batches(mixed, 4, seed=3, start=40, shard=(index, 2)))["x"] for index in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole[40:44])
    assert (next(batches(mixed, 40, seed=4))["x"] != whole[:40]).any()


def test_sources_of_one_length_have_orders_of_their_own():
    found = drawn(Mixture([source(0, 50), source(100, 50)]), 100)
    assert (found[found < 100] != found[found >= 100] - 100).any()


def test_shares_are_the_lengths_if_not_given():
    whose = drawn(Mixture([source(0, 30), source(100, 10)]), 400) // 100
    assert np.bincount(whose).tolist() == [300, 100]


def test_a_data_set_may_be_a_mixture(mixed: Mixture):
    data = Dataset(mixed, Mixture([source(0, 3), source(100, 2)]), batch_size=4, seed=3)
    np.testing.assert_array_equal(next(data.batches())["x"], drawn(mixed, 4))
    assert np.concatenate([batch["x"] for batch in data.validation()]).tolist() == [0, 1, 2, 100, 101]
    other = dataclasses.replace(data, train=Mixture(mixed.sources, [1, 1, 1]))
    assert data.identity != other.identity, "a resumed run notices other shares"


@pytest.mark.parametrize(
    "sources, weights", [([], None), ([source(0, 0)], None), ([source(0, 2)], [0]), ([source(0, 2)], [1, 2])]
)
def test_mixtures_that_are_none_are_refused(sources: list[Rows], weights: Any):
    with pytest.raises(ValueError, match="a mixture"):
        Mixture(sources, weights)


ROWS = [{"ids": [i, i + 1], "label": i % 2, "score": i / 2, "text": f"number {i}"} for i in range(8)]


def test_rows_as_hugging_face_gives_them_are_samples():
    found = HuggingFace(ROWS, {"ids": "inputs", "label": "label", "score": "score"})
    assert len(found) == 8
    batch = next(batches(found, 4, seed=None))
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "inputs": ((4, 2), "int32"),
        "label": ((4,), "int32"),
        "score": ((4,), "float32"),
    }
    assert batch["inputs"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_dicts_by_index_need_nothing_of_ours():
    data = Dataset([{"x": float(i)} for i in range(9)], [], batch_size=3)
    assert next(data.batches())["x"].shape == (3,) and data.identity["num_samples"] == 9


@pytest.mark.parametrize(
    "dataset, options, message",
    [
        (ROWS, {}, "column text holds 'number 0'.*dataset.map"),
        (ROWS, {"columns": ["idz"]}, "no column idz; there are ids, label, score, text"),
        ([{"x": 2**40}], {}, "int32 does not"),
        ([{"x": [[1], [2, 3]]}], {}, "no array of numbers"),
        (iter(ROWS), {}, "without streaming"),
        ({"train": ROWS}, {}, "several splits, train"),
        (ROWS, {"columns": "ids"}, r'write \["ids"\]'),
        (ROWS, {"split": "train"}, "loaded by name"),
    ],
)
def test_what_is_no_samples_is_refused(dataset: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        HuggingFace(dataset, **options)


def test_without_its_package_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "cjax\[datasets\]"'):
        HuggingFace("imdb")


def test_a_folder_of_its_package_is_loaded(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "kept")
    found = HuggingFace(tmp_path / "kept", ["ids", "label"], split="train")
    assert len(found) == 8 and found[3]["ids"].tolist() == [3, 4] and found[3]["label"].dtype == np.int32
    with pytest.raises(ValueError, match="several splits, train"):
        HuggingFace(tmp_path / "kept")


def test_a_mixture_in_a_mixture_keeps_its_shares():
    inner = Mixture([source(0, 40), source(100, 40)], weights=[9, 1])
    nested = Mixture([inner, source(200, 7)], weights=[1, 1])
    counts = np.bincount(drawn(nested, 600) // 100, minlength=3)
    np.testing.assert_allclose(counts, [270, 30, 300], atol=10)
    np.testing.assert_array_equal(drawn(nested, 200, start=200), drawn(nested, 400)[200:])
    data = Dataset(nested, [], batch_size=4)
    assert data.identity["weights"] == [[1.0, [9.0, 1.0]], 1.0]
