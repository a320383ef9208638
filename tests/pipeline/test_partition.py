"""Layers by block: all of them, in order, once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.pipeline.partition import partition


@given(
    st.integers(2, 6), st.integers(1, 3), st.lists(st.integers(6, 40), min_size=1, max_size=2),
    st.floats(0, 20),
)  # fmt: skip
def test_each_layer_is_in_one_row_of_one_block(stages: int, chunks: int, lengths: list[int], head: float) -> None:
    route = tuple(range(stages)) * chunks * len(lengths)
    part = partition(lengths, route, head)
    for k, length in enumerate(lengths):
        mine = [block for block in range(len(route)) if part.stack[block] == k]
        layers = [part.first[b] + i for b in mine for i in range(part.count[b])]
        assert layers == list(range(length)), "blocks in order hold layers in order"
        assert max(part.count[b] for b in mine) <= part.rows[k] <= 2 * -(-length // len(mine))
        order = part.order(k)
        assert len(order) == len(mine) * part.rows[k] and sorted(n for n in order if n >= 0) == layers
        for block in mine:
            row = part.route[block] * part.rows[k] * (len(mine) // stages) + part.row(block)
            assert list(order[row : row + part.count[block]]) == layers[part.first[block] :][: part.count[block]]
        assert [part.starts(b) for b in mine] == [True] + [False] * (len(mine) - 1)
        assert [part.ends(b) for b in mine] == [False] * (len(mine) - 1) + [True]


@pytest.mark.parametrize(
    ("length", "head", "counts"),
    [
        (12, 0.0, (3, 3, 3, 3)),
        (12, 1.0, (3, 3, 3, 3)),  # a row more for each stage would gain less than it costs
        (12, 5.4, (4, 4, 4, 0)),
        (10, 0.0, (3, 3, 3, 1)),
        (5, 0.0, (2, 2, 1, 0)),
    ],
)
def test_a_dear_head_takes_the_place_of_layers(length: int, head: float, counts: tuple[int, ...]) -> None:
    assert partition([length], (0, 1, 2, 3), head).count == counts
