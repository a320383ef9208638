"""The batches of a run from any position on."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cjax.train.stream import Stream

BATCHES = [{"x": np.full((4, 2), number), "scale": 1.0} for number in range(3)]


class Positioned:
    """Data that can go anywhere."""

    def batches(self, start: int) -> Iterator[Any]:
        return iter(BATCHES[start // 4 :])


def numbers(stream: Stream, most: int = 7) -> list[int]:
    return [int(batch["x"][0, 0]) for batch in itertools.islice(stream, most)]


@pytest.mark.parametrize(
    ("position", "wanted"), [(0, [0, 1, 2, 0, 1, 2, 0]), (4, [1, 2, 0, 1, 2, 0, 1]), (20, [2, 0, 1])]
)
def test_a_list_is_read_again_and_past_what_was_trained_on(position: int, wanted: list[int]) -> None:
    stream = Stream(BATCHES, position, 1)
    assert numbers(stream, len(wanted)) == wanted
    assert stream.samples == position + 4 * len(wanted)
    assert numbers(stream.at(8), 2) == [2, 0]


def test_what_can_be_read_once_ends_the_run() -> None:
    assert numbers(Stream(iter(BATCHES), 4, 1)) == [1, 2]
    assert numbers(Stream([], 0, 1)) == []
    assert numbers(Stream(Positioned(), 8, 1)) == [2]


def test_positions_count_the_rows_of_all_processes() -> None:
    stream = Stream(BATCHES, 16, 2)
    assert numbers(stream, 2) == [2, 0] and stream.samples == 16 + 2 * 8


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(TypeError, match="data is an int; fit needs something with batches"):
        Stream(3, 0, 1)
