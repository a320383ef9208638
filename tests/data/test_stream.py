import itertools
from collections import Counter

import numpy as np
import pytest

from cjax.data import batches

source = [{"x": np.array(i), "y": np.full(3, -i)} for i in range(23)]


def rows(stream, count: int) -> list[int]:
    return [x for batch in itertools.islice(stream, count) for x in batch["x"].tolist()]


def test_an_epoch_holds_every_sample_once_and_the_next_in_another_order():
    epochs = np.array(rows(batches(source, 1, seed=5), 46)).reshape(2, 23)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(23))
    assert epochs[0].tolist() != epochs[1].tolist()
    assert epochs[0].tolist() != sorted(epochs[0])


def test_epochs_follow_without_a_gap():
    seen = Counter(rows(batches(source, 4, seed=5), 23))
    assert set(seen.values()) == {4}


def test_fields_stay_together():
    batch = next(batches(source, 5, seed=1))
    np.testing.assert_array_equal(batch["y"], -np.repeat(batch["x"][:, None], 3, axis=1))


def test_the_order_is_the_seeds():
    assert rows(batches(source, 4, seed=5), 5) == rows(batches(source, 4, seed=5), 5)
    assert rows(batches(source, 4, seed=5), 5) != rows(batches(source, 4, seed=6), 5)


@pytest.mark.full("0", "24", "44", "4")
@pytest.mark.parametrize("start", [0, 4, 20, 24, 44, 460])
def test_the_stream_is_found_again_from_the_samples_consumed(start: int):
    whole = rows(batches(source, 4, seed=5), 130)
    assert rows(batches(source, 4, seed=5, start=start), 3) == whole[start : start + 12]


def test_another_batch_size_continues_the_same_samples():
    whole = rows(batches(source, 4, seed=5), 10)
    assert rows(batches(source, 6, seed=5, start=8), 2) == whole[8:20]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_processes_together_read_the_global_batch_in_order(count: int):
    whole = batches(source, 6, seed=5, start=12)
    parts = [batches(source, 6, seed=5, start=12, shard=(index, count)) for index in range(count)]
    for _ in range(9):
        together = np.concatenate([next(part)["x"] for part in parts])
        np.testing.assert_array_equal(together, next(whole)["x"])


def add_noise(sample, rng):
    return {"x": sample["x"], "noise": rng.integers(1 << 40)}


def noise(stream, count: int) -> np.ndarray:
    return np.concatenate([batch["noise"] for batch in itertools.islice(stream, count)])


def test_what_is_drawn_follows_the_place_in_the_stream_alone():
    whole = noise(batches(source, 6, seed=5, transform=add_noise), 12)
    np.testing.assert_array_equal(noise(batches(source, 6, seed=5, start=30, transform=add_noise), 7), whole[30:])
    np.testing.assert_array_equal(noise(batches(source, 2, seed=5, start=30, transform=add_noise), 21), whole[30:])
    parts = [noise(batches(source, 6, seed=5, shard=(i, 3), transform=add_noise), 12).reshape(12, 2) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).ravel(), whole)


def test_every_sample_of_every_epoch_and_seed_is_drawn_for_anew():
    first, second = (noise(batches(source, 23, seed=seed, transform=add_noise), 3) for seed in (5, 6))
    assert len(np.unique(np.concatenate([first, second]))) == 2 * 3 * 23
    held_out = [noise(batches(source, 5, seed=None, transform=add_noise), 4) for _ in range(2)]
    np.testing.assert_array_equal(*held_out)  # so that evaluations of one run can be compared


def test_without_a_seed_it_is_read_once_in_order():
    assert rows(batches(source, 5, seed=None), 100) == list(range(20))
    assert rows(batches(source, 5, seed=None, start=10), 100) == list(range(10, 20))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(batch_size=24), "23 samples, fewer than one batch of 24"),
        (dict(batch_size=0), "batch_size >= 1"),
        (dict(batch_size=4, start=-1), "start >= 0"),
        (dict(batch_size=4, shard=(2, 2)), "index < count"),
        (dict(batch_size=7, shard=(0, 3)), "take 6 or 9"),
        (dict(batch_size=2, shard=(0, 3)), "take 3"),
        (dict(batch_size=4, seed=-1), "2\\*\\*32"),
    ],
)
def test_what_cannot_be_read_is_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        batches(source, **{"seed": 0, **arguments})
