"""What tensor and sequence words make of a work: dims, what a device holds, and what it receives."""

import math

import pytest
from planner.reading.test_work import EMBED, HEADS, MLP, ROWS, SEQ, VOCAB, gpt

from cjax.plan import Plan
from cjax.planner.reading.split import Splits, split_of
from cjax.planner.reading.work import work_of


def test_megatrons_four_reductions() -> None:
    trace = gpt()
    work = work_of(trace)
    split = split_of(work, trace, Plan.parse("tensor=4"))
    assert split.axes_of == {name: ("tensor",) for name in ("heads", "ffn", "vocab")}
    whole = 2 * 3 / 4 * ROWS * SEQ * EMBED
    before, layer, after = split.moves
    assert [(m.kind, m.axes, m.elements, m.is_forward, m.is_wide) for m in layer] == [
        ("all-reduce", ("tensor",), whole, True, False),
        ("all-reduce", ("tensor",), whole, True, False),
        ("all-reduce", ("tensor",), whole, False, True),  # of queries, keys and values: a sum, in float32
        ("all-reduce", ("tensor",), whole, False, False),
    ]
    assert [m.elements for m in before] == [whole]  # the vocabulary's table
    assert [m.elements for m in after if m.elements > 0.1 * whole] == [whole]  # the classifier's gradient
    norms = 2 * 2 * EMBED
    layers = (4 * EMBED**2 + 3 * EMBED + 2 * EMBED * MLP + MLP) // 4 + norms + 2 * EMBED
    assert split.held == (VOCAB // 4 * EMBED + SEQ * EMBED, layers, 2 * EMBED)
    assert split.num_devices == 4 and split.local((("heads", HEADS), ("batch", ROWS))) == HEADS * ROWS / 4


def test_a_split_is_made_once() -> None:
    trace = gpt()
    splits = Splits(work_of(trace), trace)
    assert splits(Plan.parse("tensor=2 data=4")) is splits(Plan.parse("tensor=2 data=1 zero=1"))
    for _ in range(2):
        with pytest.raises(ValueError, match="can't split heads: this model has 4"):
            splits(Plan.parse("tensor=3"))


def test_nothing_moves_without_words() -> None:
    trace = gpt()
    work = work_of(trace)
    split = split_of(work, trace, Plan())
    assert not any(split.moves) and split.num_devices == 1 and not split.axes_of
    weights = [sum(math.prod(size for _, size in weight.dims) for weight in part.weights) for part in work.parts]
    assert list(split.held) == weights
