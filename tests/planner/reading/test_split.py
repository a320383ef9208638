"""What tensor and sequence words make of a work: dims, what a device holds, and what it receives."""

import math

import pytest
from reading_cases import MODELS, captured
from small_gpt import EMBED, HEADS, MLP, ROWS, SEQ, VOCAB, gpt

from cjax.plan import Plan
from cjax.planner.reading.split import Splits, split_of
from cjax.planner.reading.work import work_of
from cjax.planner.work import AxisMove, RingWork
from cjax.trace.source import TraceSource


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
        ("all-reduce", ("tensor",), whole, False, False),  # of queries, keys and values: one sum, in their dtype
        ("all-reduce", ("tensor",), whole, False, False),
    ]
    assert [m.elements for m in before] == [whole]  # the vocabulary's table
    assert [m.elements for m in after if m.elements > 0.1 * whole] == [whole]  # the classifier's gradient
    norms = 2 * 2 * EMBED
    layers = (4 * EMBED**2 + 3 * EMBED + 2 * EMBED * MLP + MLP) // 4 + norms + 2 * EMBED
    assert split.held == (VOCAB // 4 * EMBED + SEQ * EMBED, layers, 2 * EMBED)
    assert split.num_devices == 4 and split.local((("heads", HEADS), ("batch", ROWS))) == HEADS * ROWS / 4


def moves_of(text: str) -> list[list[AxisMove]]:
    trace = gpt()
    return [list(moves) for moves in split_of(work_of(trace), trace, Plan.parse(text)).moves]


def test_a_layer_made_again_repeats_what_its_derivative_needs() -> None:
    """The attention's result is behind a norm that the backward pass differentiates; the block's own is not."""
    _, layer, _ = moves_of("tensor=4")
    assert [move.is_remade for move in layer if move.is_forward] == [True, False]


def test_positions_are_gathered_before_products_and_scattered_behind() -> None:
    stream = 3 / 4 * ROWS * SEQ * EMBED
    _, layer, _ = moves_of("tensor=4 sequence=gather")
    assert {(move.kind, move.is_forward) for move in layer if move.elements == stream} == {
        (kind, forward) for kind in ("all-gather", "reduce-scatter") for forward in (True, False)
    }
    # Each half of a layer: gathered for its products and once more for their gradients, a gradient scattered; its
    # result scattered, a gradient gathered.
    assert sum(move.elements for move in layer) == 2 * 5 * stream


def test_keys_and_values_go_round_a_ring() -> None:
    before, layer, _ = moves_of("sequence=ring:4")
    held = ROWS * SEQ * EMBED / 4  # of queries, keys and values each, and of the result
    round_ = [move.elements for move in layer if move.kind == "collective-permute"]
    # Keys and values three times in each pass, their gradients four times.
    assert sum(round_) == held * (3 * 2 + 3 * 2 + 4 * 2)
    assert {move.axes for move in layer} == {("sequence",)}
    # The mask is causal: tokens and targets go to where early and late chunks meet, and nothing else ever does.
    turned = [move for move in before if move.kind == "collective-permute"]
    assert turned and all(move.elements == ROWS * SEQ / 4 and move.is_wide for move in turned)


@pytest.mark.parametrize(
    ("model", "text", "ring"),
    [
        (
            "gpt",
            "sequence=ring:4",
            RingWork(9 / 16, 2),
        ),  # chunks that meet none, some or all of the positions before: 2 n + 1 of 4 n
        ("gpt", "sequence=ring:2", RingWork(5 / 8, 2)),
        ("bert", "sequence=ring:4", RingWork(1.0, 1)),  # no mask
    ],
)
def test_a_ring_leaves_out_the_scores_that_a_mask_leaves_empty(model: str, text: str, ring: RingWork) -> None:
    trace = gpt() if model == "gpt" else TraceSource(captured(model), MODELS[model].batch).read()
    work = work_of(trace)
    split = split_of(work, trace, Plan.parse(text))
    assert split.rings == tuple((ring,) * len(part.attentions) for part in work.parts)
    assert any(split.rings) and not any(split_of(work, trace, Plan.parse("sequence=all_to_all:2")).rings)


def test_heads_take_the_place_of_positions() -> None:
    _, layer, _ = moves_of("sequence=all_to_all:4")
    held = ROWS * SEQ * EMBED / 4
    assert [(m.kind, m.elements, m.is_forward) for m in layer] == [
        ("all-to-all", 3 / 4 * 4 * held, True), ("all-to-all", 3 / 4 * 4 * held, False)
    ]  # fmt: skip


def test_few_key_value_heads_stay_whole() -> None:
    trace = TraceSource(captured("llama"), MODELS["llama"].batch).read()
    work = work_of(trace)
    heads = {name for part in work.parts for product in part.products for name, _ in product.outer if "heads" in name}
    assert heads == {"heads"}
    assert split_of(work, trace, Plan.parse("tensor=4")).local((("heads", 4),)) == 1
    assert split_of(work, trace, Plan.parse("tensor=8")).local((("heads", 4),)) == 4


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


@pytest.mark.parametrize("plan", ["sequence=ring:8", "sequence=all_to_all:8", "tensor=8 sequence=gather"])
def test_positions_that_are_filled_up_are_counted(plan: str) -> None:
    trace = TraceSource(captured("vit"), MODELS["vit"].batch).read()
    split = split_of(work_of(trace), trace, Plan.parse(plan))
    positions = {name for name in split.axes_of if split.axes_of[name] in (("sequence",), ("tensor",))}
    assert 9 in {split.local(((name, 65),)) for name in positions}
