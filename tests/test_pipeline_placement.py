"""What stages of a pipeline hold and hand on: bytes on a device, memory of a step, messages."""

import dataclasses
import functools
import os

import jax
import numpy as np
import optax
import pytest
from contract import bytes_on_a_device
from plans import NUM_DEVICES, num_parts
from starts import begin

import cjax
from cjax.models.gpt import GPT, gpt
from cjax.models.gpt import loss as gpt_loss
from cjax.plan import Plan
from cjax.program import Given, Program
from cjax.program.compose import compose
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

ALL = os.environ.get("CJAX_TEST_ALL") == "1"

# -- placement --------------------------------------------------------------------------------------------------------
SIZES = gpt("gpt-mini", vocab_size=512, num_layers=8)
OUTSIDE = (512 + 256 + 2) * 192  # embedding, which is the head too, positions, and the last norm: no layer's


@functools.cache
def mini_source(vocab: int) -> TraceSource:
    """What all plans and all numbers of rows share."""
    batch = {name: jax.ShapeDtypeStruct((16, 64), np.int32) for name in ("inputs", "targets")}
    sizes = dataclasses.replace(SIZES, vocab_size=vocab)
    return TraceSource(capture(lambda rngs: GPT(sizes, rngs=rngs), gpt_loss, batch), batch)


def mini(plan: str, rows: int, num_devices: int = NUM_DEVICES, vocab: int = SIZES.vocab_size) -> Program:
    given = Given(mini_source(vocab).on_rows(rows), optax.adamw(1e-3))
    return Program(compose(given, plan, jax.devices()[:num_devices]))


@pytest.mark.full("pipeline=1f1b:4 microbatches=4-1-1")
@pytest.mark.parametrize(
    ("plan", "tensor", "zero"),
    [
        ("pipeline=1f1b:4 microbatches=4", 1, 1),
        ("pipeline=interleaved:4/2 microbatches=4", 1, 1),
        ("pipeline=zero_bubble:2/2 microbatches=4 tensor=2", 2, 1),
        ("pipeline=1f1b:2 microbatches=4 zero=3", 1, 4),
    ],
)
def test_a_stage_holds_its_own_layers(plan: str, tensor: int, zero: int) -> None:
    """1 / p of the layers and of AdamW's moments; of the parameters also all that is not in a layer."""
    state = begin(mini(plan, 16))
    size = Plan.parse(plan).pipeline.size
    layers = (SIZES.num_params - OUTSIDE) / size
    wanted = 4 * (layers + OUTSIDE) / tensor / zero
    near = 0.01 if tensor == 1 else 0.03  # positions, norms and some biases are whole
    assert bytes_on_a_device(state._params) == pytest.approx(wanted, rel=near)
    moments = 8 * SIZES.num_params / size / tensor / zero
    assert bytes_on_a_device(state._opt) == pytest.approx(moments, rel=near)


@pytest.mark.parametrize("zero", ["", " zero=1", " zero=2"])
def test_what_stages_all_have_is_kept_in_parts_where_it_is_rounded_to_be_used(zero: str) -> None:
    """Under bfloat16 a step gathers tables in bfloat16: in float32 a stage has of them what it updates."""
    state = begin(mini(f"pipeline=1f1b:4 microbatches=4{zero} precision=bfloat16", 16))
    shards = 4 * (2 if zero else 1)
    layers = (SIZES.num_params - OUTSIDE) / shards
    assert bytes_on_a_device(state._params) == pytest.approx(4 * (layers + OUTSIDE / shards), rel=0.02)
    assert bytes_on_a_device(state._opt) == pytest.approx(8 * SIZES.num_params / shards, rel=0.02)


SCHEDULES = ["1f1b:4", "interleaved:4/2", "zero_bubble:4", "zero_bubble:4/2"]


@functools.cache
def temporary(schedule: str, num_microbatches: int) -> int:
    program = mini(f"pipeline={schedule} microbatches={num_microbatches}", 2 * num_microbatches, num_devices=4)
    return program.lower().compile().memory_analysis().temp_size_in_bytes


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES if ALL else ["1f1b:4"])
def test_memory_does_not_grow_with_the_number_of_micro_batches(schedule: str) -> None:
    """From 2p on; with p of them a stage holds fewer than it has places for."""
    few, many = temporary(schedule, 8), temporary(schedule, 32)
    assert temporary(schedule, 4) <= few == pytest.approx(many, rel=0.01)
    assert many < temporary("gpipe:4", 32) / 2, "GPipe's grows"


# -- traffic ----------------------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "num_devices", "parts", "counts"),
    [
        # A head that is worth two layers: no layer goes to another stage for its update.
        ("pipeline=1f1b:4 microbatches=8", 4, 1, (3, 3, 2, 0)),
        ("pipeline=1f1b:2 microbatches=8 tensor=2d:4", 8, 4, (4, 4)),
        ("pipeline=1f1b:2 microbatches=4 data=2", 4, 2, (4, 4)),
        ("pipeline=zero_bubble:2 microbatches=8 tensor=2", 4, 1, (4, 4)),  # between layers 1d keeps activations whole
        ("pipeline=1f1b:2 microbatches=8 sequence=ring:2", 4, 2, (4, 4)),
    ][: 5 if ALL else 1],
)
def test_stages_hand_on_one_activation_and_one_gradient(
    plan: str, num_devices: int, parts: int, counts: tuple[int, ...]
) -> None:
    """In each tick one each way, in as many parts as it is split into anyway."""
    program = mini(plan, 16, num_devices=num_devices, vocab=6144 if 0 in counts else SIZES.vocab_size)
    assert program._composed.line.partition.count == counts
    facts = cjax.audit(program.lower().compile())
    sent = [each for each in facts.collectives if each.kind == "collective-permute" and each.axis == "pipe"]
    ticks = program._composed.line.schedule.num_ticks
    assert sum(each.count for each in sent) == 2 * ticks
    rows = 16 // num_parts(plan)
    assert {each.bytes for each in sent} == {4 * rows * 64 * 192 / parts}


@pytest.mark.full
def test_reports_draw_the_schedule() -> None:
    report = mini("pipeline=1f1b:4 microbatches=8", 16, num_devices=4).report()
    assert "1f1b: 4 stages, 8 micro-batches, 14 ticks" in str(report) and "stage 3 F" in str(report)
    assert "<svg" in report._repr_html_() and {row.stages for row in report.params} == {"pipe", None}
    (sent,) = [each for each in report.transfers if each.axis == "pipe" and each.kind == "collective-permute"]
    assert sent.bytes == 2 * 14 * 4 * 2 * 64 * 192
