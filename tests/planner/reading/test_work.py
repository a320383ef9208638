"""What a trace's work is: its arithmetic is the trace's own, in products and attentions of named dims."""

import dataclasses
import math

import pytest
from contract import trace_of
from small_gpt import EMBED, HEADS, LAYERS, MLP, ROWS, SEQ, VOCAB, gpt
from zoo import MODELS

from cjax.plan import Plan
from cjax.planner.reading.derivative import Planned, derive
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.split import split_of
from cjax.planner.reading.work import work_of
from cjax.planner.work import BATCH, Work, elements
from cjax.trace.jaxpr.cost import cost


def forward_flops(work: Work) -> int:
    """Of one forward pass, no score left out."""
    found = 0
    for part in work.parts:
        found += part.repeats * sum(product.flops for product in part.products)
        for each in part.attentions:
            scores = math.prod(elements(dims) for dims in (each.batch, each.heads, each.queries, each.keys))
            found += part.repeats * each.times * 4 * scores * each.features
    return found


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_trace(name: str) -> None:
    trace = trace_of(name)
    assert forward_flops(work_of(trace)) == pytest.approx(cost(trace.closed).matmul_flops, rel=1e-3)


def test_gpts_layer_is_six_products_and_an_attention() -> None:
    work = work_of(gpt())
    assert [(part.name, part.repeats) for part in work.parts] == [("before", 1), ("layers", LAYERS), ("after", 1)]
    before, layer, after = work.parts
    rows = ((BATCH, ROWS), ("sequence", SEQ))
    heads = {name: (("heads", HEADS), (name, EMBED // HEADS)) for name in ("head_dim", "value_dim")}
    embed, ffn = (("embed", EMBED),), (("ffn", MLP),)
    assert [(p.rows, p.inner, p.outer) for p in layer.products] == [
        (rows, embed, heads["head_dim"]), (rows, embed, heads["head_dim"]), (rows, embed, heads["value_dim"]),
        (rows, heads["value_dim"], embed), (rows, embed, ffn), (rows, ffn, embed),
    ]  # fmt: skip
    assert [p.reads for p in layer.products] == [0, 0, 0, 1, 2, 3]  # queries, keys and values read one activation
    (attention,) = layer.attentions
    assert (attention.features, attention.kv_heads, attention.is_causal) == (EMBED // HEADS, HEADS, True)
    assert (attention.heads, attention.keys) == ((("heads", HEADS),), (("sequence", SEQ),))
    assert attention.is_fused is False and "multiples of 8" in attention.why_not  # heads are 12 wide
    assert (before.products, before.attentions, after.attentions) == ((), (), ())
    (classifier,) = after.products
    assert classifier.flops == 2 * ROWS * SEQ * EMBED * VOCAB
    assert before.stream == layer.stream and layer.stream is not None and layer.stream.dims == (*rows, *embed)


def test_a_layer_that_is_made_again_does_not_make_its_last_product() -> None:
    """The step that JAX derives of it has the products of the others once more, and no others."""
    trace = gpt()
    work = work_of(trace)
    layer = work.parts[1]
    assert [p.is_remade for p in layer.products] == [True] * 5 + [False]
    again = sum(p.flops for p in layer.products if p.is_remade)
    again += forward_flops(dataclasses.replace(work, parts=(dataclasses.replace(layer, products=(), repeats=1),)))
    steps = [derive(trace, Naming(trace, 1), Planned(trace, remat, "float32", False)) for remat in ("none", "block")]
    kept, made = (cost(step.of.closed).matmul_flops for step in steps)
    assert made - kept == pytest.approx(LAYERS * again, rel=1e-3)


def test_weights_stand_with_the_part_that_reads_them_first() -> None:
    work = work_of(gpt())
    before, layer, after = work.parts
    assert [weight.name for weight in before.weights] == ["token_embed/embedding", "position_embed/embedding"]
    assert len(layer.weights) == 16 and all(weight.name.startswith("blocks/0/") for weight in layer.weights)
    assert [weight.name for weight in after.weights] == ["norm/scale", "norm/bias"]  # the classifier's is tied
    trace = gpt()
    every = sum(math.prod(trace.leaves[i].shape) for i in trace.leaves_of("params"))
    assert sum(part.repeats * sum(elements(w.dims) for w in part.weights) for part in work.parts) == every


def test_a_batch_is_its_parts_together() -> None:
    whole, part = work_of(gpt()), work_of(gpt(), num_microbatches=3)
    assert (part.num_rows, part.tokens, part.batch_bytes) == (3 * ROWS, 3 * ROWS * SEQ, 3 * whole.batch_bytes)
    assert forward_flops(part) == 3 * forward_flops(whole)
    plan = Plan.parse("tensor=2d:4")
    one, three = (split_of(work, gpt(), plan) for work in (whole, part))
    for move, times in zip(one.moves[1], three.moves[1], strict=True):
        assert times.elements == (1 if move.of_weights else 3) * move.elements


def test_no_value_of_a_layer_is_as_large_as_its_scores() -> None:
    """And what a norm reads and writes is its stream, no intermediate number of it."""
    layer = work_of(gpt()).parts[1]
    assert layer.touched and max(elements(value.dims) for value in layer.touched) <= ROWS * SEQ * MLP
    streams = [value for value in layer.touched if value.dims == ((BATCH, ROWS), ("sequence", SEQ), ("embed", EMBED))]
    # Two norms: statistics of both kinds at once, then the norm itself, in and out; the two residuals: two in, one out.
    # The first residual's sum is made of the attention's result.
    assert len(streams) == 2 * 3 + 2 * 3


def test_classes_of_scanned_layers_are_layers_too() -> None:
    trace = trace_of("linen_scan")
    work = work_of(trace)
    assert [part.repeats for part in work.parts] == [1, 4, 1] and work.num_layers == 4
    assert len(work.parts[1].products) == 6
    every = sum(math.prod(trace.leaves[i].shape) for i in trace.leaves_of("params"))
    assert sum(part.repeats * sum(elements(w.dims) for w in part.weights) for part in work.parts) == every
