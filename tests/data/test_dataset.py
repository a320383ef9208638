import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.data import Dataset, Rows, hold_out


def add(sample, rng):
    return {"x": sample["x"] + rng.random()}


@pytest.fixture
def data() -> Dataset:
    x = np.arange(20.0)
    return Dataset(Rows({"x": x}), Rows({"x": -x[:7]}), batch_size=4, seed=3, transform=add)


def test_processes_and_position(data: Dataset):
    whole = list(itertools.islice(data.batches(), 8))
    half = dataclasses.replace(data, shard=(1, 2))
    np.testing.assert_array_equal(next(half.batches(start=24))["x"], whole[6]["x"][2:])


def test_validation_is_all_that_is_held_out_and_the_same_each_time(data: Dataset):
    first, again = list(data.validation()), list(data.validation())
    assert [len(batch["x"]) for batch in first] == [4, 3]
    np.testing.assert_array_equal(np.floor(np.concatenate([batch["x"] for batch in first])), -np.arange(7))
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one["x"], two["x"])
    assert [len(batch["x"]) for batch in data.validation(max_batches=1)] == [4]
    assert list(dataclasses.replace(data, held_out=Rows({"x": np.zeros(0)})).validation()) == []


def test_processes_validate_on_as_many_rows(data: Dataset):
    parts = [list(dataclasses.replace(data, shard=(index, 2)).validation()) for index in range(2)]
    whole = np.concatenate([batch["x"] for batch in data.validation()])
    together = [np.concatenate([one["x"], two["x"]]) for one, two in zip(*parts, strict=True)]
    np.testing.assert_array_equal(np.concatenate(together), whole[:6])


def test_identity_tells_what_changes_the_stream(data: Dataset):
    assert data.identity == dataclasses.replace(data, shard=(1, 2), batch_size=2).identity
    others = [dict(seed=4), dict(train=Rows({"x": np.arange(20.0)[::-1]})), dict(transform=None)]
    assert all(dataclasses.replace(data, **other).identity != data.identity for other in others)


def test_batches_that_cannot_be_are_refused(data: Dataset):
    for size in (0, 21):
        with pytest.raises(ValueError, match=f"batch_size is {size}, and there are 20 samples"):
            dataclasses.replace(data, batch_size=size)
    with pytest.raises(ValueError, match="one length, not {'x': 3, 'y': 4}"):
        Rows({"x": np.zeros(3), "y": np.zeros(4)})


@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmnop"), st.integers(0, 1)), min_size=1), st.randoms())
def test_held_out_is_chosen_by_text_alone(examples, random):
    texts, labels = zip(*examples, strict=True)
    different = [len({text for text, label in examples if label == group}) for group in set(labels)]
    if min(different) < 2:
        with pytest.raises(ValueError, match="1 different example"):
            hold_out(texts, 0.3, labels)
        return
    kept = hold_out(texts, 0.3, labels)
    side = dict(zip(examples, kept, strict=True))
    assert all(side[example] == held for example, held in zip(examples, kept, strict=True))  # equal ones together
    for label in set(labels):
        assert {held for (_, group), held in side.items() if group == label} == {True, False}
    order = random.sample(range(len(examples)), len(examples))
    again = hold_out([texts[i] for i in order], 0.3, [labels[i] for i in order])
    np.testing.assert_array_equal(again, kept[order])


def test_every_class_has_its_part():
    labels = np.array([0] * 200 + [1] * 50)
    kept = hold_out([str(i) for i in range(250)], 0.1, labels)
    assert np.bincount(labels[kept]).tolist() == [20, 5]
    assert not hold_out(["a"], 0).any()
    with pytest.raises(ValueError, match="held_out is 1"):
        hold_out(["a", "b"], 1)
