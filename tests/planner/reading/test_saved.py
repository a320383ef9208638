"""What a step keeps for its backward pass: shapes known by construction, and every model of the zoo."""

import functools
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from contract import trace_of
from remembered import ahead_loss

from cjax.models import GPT, T5, loss, t5
from cjax.models.gpt import GPTConfig
from cjax.planner.reading.work import work_of
from cjax.planner.work import BATCH, Dims, Kept, NamedTensor, Work, elements
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

ROWS, WIDTH, HIDDEN, LAYERS = 16, 32, 64, 4


def read(model: Any, of: Any, batch: Any) -> Work:
    shapes = jax.eval_shape(lambda: batch)
    return work_of(TraceSource(capture(model, of, shapes), shapes).read())


def size(values: Iterable[NamedTensor]) -> int:
    return sum(elements(value.dims) * value.itemsize * value.times for value in values)


def shapes(values: Iterable[NamedTensor]) -> list[tuple[Dims, int]]:
    return sorted((value.dims, value.itemsize) for value in values for _ in range(value.times))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(LAYERS):
            x = x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(HIDDEN)(x)))
        return x


@functools.cache
def stack() -> Work:
    return read(Stack(), lambda model, x: (model(x) ** 2).mean(), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


def layer(remat: Any, form: Any = "float32") -> Kept:
    work = stack()
    return next(k for part, k in zip(work.parts, work.kept[remat, form, False], strict=True) if part.repeats == LAYERS)


def test_a_layer_saves_results_of_matmuls_or_what_it_is_handed() -> None:
    handed, made = ((BATCH, ROWS), ("embed", WIDTH)), ((BATCH, ROWS), ("ffn", HIDDEN))
    assert shapes(layer("none").saved) == shapes(layer("dots").saved) == [(handed, 4), (made, 4)]
    assert shapes(layer("block").saved) == [(handed, 4)]
    assert sorted(n for _, n in shapes(layer("none", "half").saved)) == [2, 4]  # the stream stays float32


def test_under_recomputation_a_layer_is_there_whole() -> None:
    (most,) = [max(map(size, layer(remat).working)) for remat in ("block",)]
    assert 4 * ROWS * 2 * HIDDEN <= most - 4 * 2 * WIDTH * HIDDEN <= 4 * ROWS * (4 * HIDDEN + 4 * WIDTH)


def test_a_pipelines_stage_saves_the_same_of_a_layer_and_hands_on_the_stream() -> None:
    found = layer("none")
    assert shapes(found.staged) == shapes(found.saved)
    assert shapes(found.payload) == [(((BATCH, ROWS), ("embed", WIDTH)), 4)]
    assert size(found.crossing) > 0


SEQ, HEADS = 64, 4
CONFIG = GPTConfig(num_layers=3, num_heads=HEADS, embed_dim=64, mlp_dim=160, vocab_size=200, context=SEQ)


@functools.cache
def gpt() -> Work:
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    return read(lambda rngs: GPT(CONFIG, rngs=rngs), loss, {"inputs": tokens, "targets": tokens})


@pytest.mark.full
def test_scores_are_saved_unless_a_kernel_makes_them() -> None:
    def scores(remat: Any, form: Any) -> int:
        (_, kept, _) = gpt().kept[remat, form, False]
        return sum(v.times for v in kept.saved if elements(v.dims) == ROWS * HEADS * SEQ * SEQ)

    assert scores("none", "float32") >= 1 and scores("none", "half") >= 1 and scores("none", "fused") == 0
    assert scores("block", "float32") == scores("dots", "fused") == 0


def test_gpts_layer_under_a_kernel() -> None:
    """The stream twice, queries, keys, values and what is mixed, the wide one: 22 bytes a position and feature in half
    precision where the wide one is 4 times the stream's width, and a few for each row and head."""
    (_, kept, _) = gpt().kept["none", "fused", False]
    wide, rows = CONFIG.mlp_width, ROWS * SEQ
    assert size(kept.saved) == pytest.approx(2 * rows * (6 * 64 + wide) + 4 * rows * (HEADS + 4), rel=0.02)


def test_a_pipelines_stage_beside_a_grid_saves_as_much_of_a_layer() -> None:
    alone, beside = (gpt().kept["none", "fused", at_once][1] for at_once in (False, True))
    assert size(beside.staged) == size(alone.staged) > 0 and size(beside.payload) == size(alone.payload)


@pytest.mark.full
def test_logits_are_a_part_at_a_time_but_in_a_grid() -> None:
    config = GPTConfig(num_layers=2, num_heads=HEADS, embed_dim=32, vocab_size=4000, context=512)
    tokens = jax.ShapeDtypeStruct((ROWS, 512), jnp.int32)
    work = read(lambda rngs: GPT(config, rngs=rngs), loss, {"inputs": tokens, "targets": tokens})
    part, whole = (
        max(size(values) for values in work.kept["none", "fused", at_once][-1].working) for at_once in (False, True)
    )
    assert 4 * ROWS * 128 * 4000 < part < 4 * ROWS * 512 * 4000 < whole


OTHERS = ("linen_conv", "linen_lstm", "linen_moe_capacity", "linen_remat", "linen_scan", "cjax_t5")


@pytest.mark.full("cjax_t5", "linen_remat", "linen_scan")
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_read_and_no_batch_is_lost(name: str) -> None:
    work = work_of(trace_of(name))
    found = work.kept["none", "float32", False]
    values = [v for kept in found for values in (kept.saved, *kept.working) for v in values]
    assert len(found) == len(work.parts) and values
    largest = max(values, key=lambda v: elements(v.dims))
    assert BATCH in dict(largest.dims) or not any(name == "?" for name, _ in largest.dims)


def test_what_is_dear_to_make_and_read_twice_stands_in_float32() -> None:
    """A layer's tanh, of which a product reads one form and its derivative another."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(LAYERS):
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(x)))
            return x

    work = read(Twice(), lambda model, x: (model(x) ** 2).mean(), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    at = next(i for i, part in enumerate(work.parts) if part.repeats == LAYERS)
    (kept, plain) = (which.kept["block", "half", False][at] for which in (work, stack()))

    def wide(found: Kept) -> int:
        return max(
            sum(v.times for v in some if v.itemsize == 4 and ("ffn", HIDDEN) in v.dims) for some in found.working
        )

    assert wide(kept) >= 1 and wide(plain) <= wide(kept)


@pytest.mark.full
def test_logits_wait_for_the_product_that_learns_the_table() -> None:
    """What is computed a part at a time, in a loop, leaves nothing to wait for."""
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    whole = read(lambda rngs: GPT(CONFIG, rngs=rngs), functools.partial(loss, chunk=None), batch)
    (_, layer, after) = whole.kept["none", "half", False]
    assert shapes(after.waiting) == [(((BATCH, ROWS), ("sequence", SEQ), ("vocab", 200)), 2)] and not layer.waiting
    in_parts = read(lambda rngs: GPT(CONFIG, rngs=rngs), functools.partial(loss, chunk=16), batch)
    (_, _, after) = in_parts.kept["none", "half", False]
    assert all(elements(v.dims) < ROWS * SEQ * 200 for v in after.waiting)


def test_what_all_layers_of_a_decoder_read_of_an_encoder_stands_ahead() -> None:
    """Keys and values of all layers, one by one and together, and room for what is learned of them."""
    config = t5("t5-mini", num_layers=2)
    ids = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    batch = {"inputs": ids, "targets": ids, "source": ids}
    found = read(lambda rngs: T5(config, rngs=rngs), ahead_loss, batch).kept["block", "half", False]
    ahead = [each for each in found if each.ahead]
    assert len(ahead) == 1 and sum(1 for each in found if each.saved) >= 3
    stacked = [v for v in ahead[0].ahead if len(v.dims) == 5]
    assert sum(v.times for v in stacked) >= 4 and sum(v.times for v in ahead[0].ahead if len(v.dims) == 4) >= 4
