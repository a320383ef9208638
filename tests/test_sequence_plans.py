"""Models with attention under plans that split their positions: as their authors train them, and what is refused."""

import functools
import os
import re

import jax
import numpy as np
import optax
import pytest
from contract import (
    SUBJECTS,
    assert_trained_alike,
    author,
    begun,
    norm,
    on_host,
    program_of,
    subject,
)
from zoo import BATCH, MODELS, TEXT4, builder, case, nnx_next_token
from zoo_linen import EMBED, SEQ, LinenDecoder
from zoo_nnx import SinkLlama

import cjax
from cjax.trace.attention.positions import positions
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
SUBJECTS |= {"sinks": case("nnx", builder(SinkLlama), nnx_next_token, **TEXT4)}
# Every mode, alone and with all that it can be combined with; in tests/sharding/attention, every kind of attention.
PAIRS = [
    ("nnx_llama", "sequence=ring:4 zero=1/2"),
    ("linen_remat", "sequence=all_to_all:2"),
    ("linen_masked_mean", "sequence=ring:2 microbatches=2 zero=3"),
    ("nnx_llama", "sequence=all_to_all:2 zero=3"),
    ("linen_vit", "sequence=ring:4 zero=1/2"),  # 15 positions
    ("sinks", "sequence=ring:4 zero=1"),
]
MORE = [  # for the full product: other models under modes that the pairs above have, and these in grids and matrices
    ("linen_tied", "tensor=2d:4 sequence=ring:2"),
    ("nnx_llama", "sequence=ring:2 tensor=2 remat=block"),
    ("linen_remat", "sequence=all_to_all:2 microbatches=2"),
    ("linen_decoder", "sequence=ring:4"),
    ("linen_decoder", "sequence=all_to_all:2 zero=3"),
    ("linen_encoder", "tensor=4 sequence=gather"),
    ("linen_scan", "tensor=2 sequence=ring:2 zero=1"),
    ("linen_moe_soft", "sequence=ring:2 remat=block"),
    ("nnx_encoder", "tensor=2 sequence=gather microbatches=2"),
    ("cjax_t5", "sequence=ring:2 tensor=2"),
    ("linen_encoder", "sequence=ring:2 zero=1"),
    ("linen_packed_qkv", "tensor=2 sequence=all_to_all:2"),
    ("linen_moe_capacity", "tensor=2 sequence=gather zero=1"),
    ("nnx_decoder", "sequence=ring:2 tensor=2 microbatches=2"),
    ("nnx_scan", "sequence=all_to_all:4"),
    ("nnx_llama", "sequence=all_to_all:2"),
    ("cjax_gpt", "sequence=ring:2 zero=1"),
    ("cjax_vit", "sequence=ring:2"),
    ("cjax_bert", "sequence=all_to_all:2"),
    ("cjax_llama", "tensor=2 sequence=gather"),  # by default with a fused kernel
    # Positions that the axis does not divide: 9 and 13, 10, 12, 15.
    ("linen_encoder_decoder", "tensor=2 sequence=gather"),
    ("linen_encoder_decoder", "tensor=2d:4 sequence=ring:2"),
    ("linen_encoder_decoder", "pipeline=1f1b:2 microbatches=2 sequence=ring:2"),
    ("linen_encoder_decoder", "sequence=ring:4 microbatches=2"),
    ("linen_encoder_decoder", "sequence=all_to_all:2 zero=3"),
    ("cjax_vit", "tensor=2 sequence=ring:4"),
    ("cjax_vit", "tensor=4 sequence=gather"),
    ("nnx_llama", "sequence=ring:8"),
    ("linen_vit", "sequence=all_to_all:2 microbatches=2 zero=3"),
    ("sinks", "sequence=all_to_all:2 zero=3"),
    ("sinks", "tensor=2 sequence=gather"),
    ("sinks", "tensor=2 sequence=ring:2 remat=block"),
    ("sinks", "sequence=ring:2 pipeline=1f1b:2 microbatches=2"),
    ("sinks", "tensor=2d:4 sequence=ring:2"),
]
EVERY_PAIR = [*PAIRS, *MORE]


@pytest.mark.full(
    "linen_masked_mean-sequence=ring:2 microbatches=2 zero=3",
    "nnx_llama-sequence=all_to_all:2 zero=3",
    "nnx_llama-sequence=ring:4 zero=1/2",
)
@pytest.mark.parametrize(("name", "plan"), EVERY_PAIR if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


@pytest.mark.full
@pytest.mark.parametrize(
    "mode",
    [
        "sequence=ring:4",
        pytest.param("tensor=2 sequence=gather", marks=pytest.mark.full),
        pytest.param("sequence=all_to_all:2", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("name", ["linen_decoder", "nnx_llama"] if ALL else ["nnx_llama"])
def test_bfloat16_is_as_good_as_on_one_device(name: str, mode: str) -> None:
    assert 0 < error(name, f"{mode} precision=bfloat16") <= 1.5 * error(name, "data=1 precision=bfloat16")


@functools.cache
def error(name: str, plan: str) -> float:
    """Of all gradients together."""
    program, wanted = program_of(name, plan, wide=False), author(name, 1, wide=False).steps[0]
    grads = on_host(program.value_and_grad(begun(program, name, wide=False), subject(name, wide=False).batches[0])[1])
    return norm(jax.tree.map(lambda a, b: a - b, grads, wanted.grads))


def test_positions_are_those_of_attentions() -> None:
    model, loss, batch = MODELS["linen_decoder"].make(np.float32)
    trace = TraceSource(capture(model, loss, batch, None), batch).read()
    found, reasons = positions(trace)
    assert set(found.values()) == {SEQ} and not reasons
    assert {trace.names[c] for c in found} <= {"sequence", "sequence_2"}


@pytest.mark.full
def test_scores_are_never_whole() -> None:
    """No array of the step has as many numbers as a device's share of the matrix of scores."""
    model = LinenDecoder(2 if ALL else 1, 0.0)
    batch = {"tokens": jax.ShapeDtypeStruct((2, 257), np.int32)}
    loss = MODELS["linen_decoder"].make(np.float32)[1]

    def squares(plan: str) -> list[str]:
        program = cjax.parallelize(model, loss, optax.sgd(1e-2), batch, plan, devices=jax.devices()[:4])
        text = program.lower().compile().as_text()
        return re.findall(r"f32\[(?:\d+,)*(?:256,256|64,256|256,64)(?:,\d+)*\]", text)

    assert squares("data=1 tensor=4"), "the reference has them"
    assert not squares("sequence=ring:4")


@pytest.mark.full
@pytest.mark.parametrize("name", ["nnx_llama", *(["nnx_decoder"] if ALL else [])])
def test_evaluates_batches_that_do_not_divide(name: str) -> None:
    batch = subject(name, wide=False).batches[0]
    program, plain = (program_of(name, plan, wide=False) for plan in ("sequence=ring:2", "data=8"))
    state = begun(program, name, wide=False)
    part = jax.tree.map(lambda x: x[:3], batch)
    given, wanted = program.evaluate(state, part), plain.evaluate(plain.restore(state), part)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), given, wanted)


# -- lengths that the axis does not divide ----------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "kind", "times"),
    [
        # Keys and values to three others in each pass, and their gradients to three and home.
        ("sequence=ring:4 zero=1/2", "collective-permute", 2 * (3 + 3 + 4)),
        # Queries, keys, values and results, there and back, each but for the part that stays.
        pytest.param("sequence=all_to_all:4", "all-to-all", 3 / 4 * 8, marks=pytest.mark.full),
    ],
)
def test_moves_what_lengths_would_that_divide(plan: str, kind: str, times: float) -> None:
    with jax.enable_x64(True):
        program = program_of("linen_vit", plan, wide=True)
        facts = cjax.audit(program.lower().compile(), program.mesh)
    rows, filled, layers = BATCH // 2, 16, 4
    whole = 8 * layers * rows * filled // 4 * EMBED  # bytes of queries on a device, in float64
    assert facts.moved(kind, ["sequence"]) == pytest.approx(times * whole, rel=0.02)
    assert "15 positions are filled up to 16 over sequence" in program._composed.notes


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "plan", "said"),
    [
        ("linen_lstm", "sequence=ring:2", "this model has none.*Leave `sequence` out.*cjax.attention"),
        ("linen_conv", "tensor=2 sequence=gather", "this model has none"),
    ],
)
def test_refuses_what_cannot_be_split(name: str, plan: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        program_of(name, plan, wide=False)
