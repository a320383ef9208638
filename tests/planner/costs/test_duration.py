"""A step's time: parts that add up, laws that any plan obeys, and figures by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from reading_cases import MODELS, captured

from cjax.pipeline.schedule import build
from cjax.pipeline.simulate import Times, simulate
from cjax.plan import Plan
from cjax.planner.costs.calibration import Calibration, Software, calibration_of
from cjax.planner.costs.duration import PARTS, Durations, durations
from cjax.planner.costs.moved import moved
from cjax.planner.costs.transformer import Decoder, Sharing, split_of_decoder, work_of_decoder
from cjax.planner.hardware import Hardware
from cjax.planner.reading.readings import Readings
from cjax.planner.table import PlanTable
from cjax.trace.source import TraceSource

H100 = Hardware(
    "NVIDIA H100 80GB HBM3", 64, 8, 80 * 2**30, memory_bandwidth=3.35e12, bf16_flops=989e12, f16_flops=989e12,
    f32_flops=494e12, host_bandwidth=450e9, network_bandwidth=50e9, adapters_per_host=8,
)  # fmt: skip
GPT = Decoder(16, 2048, 16, 51200)
ROWS, LENGTH = 512, 1024
found = calibration_of(H100)
assert found is not None
FITTED = found
# Nothing hidden, nothing lost: what is left is arithmetic.
PURE = Calibration(
    "by hand", cores=132, matmul=1.0, attention=1.0, thin=0.0, memory=1.0, links=1.0, adapters=1.0, latency=0.0,
    hop=0.0, hidden_data=0.0, hidden_gather=0.0, hidden_tensor=0.0, overlapped=0.0, hidden_pipeline=0.0, launch=0.0,
    step=0.0, straggling=0.0,
)  # fmt: skip


def of(*plans: str, calibration: Calibration = FITTED, hardware: Hardware = H100, rows: int = ROWS) -> Durations:
    """Of plans that share a tensor word."""
    parsed = [Plan.parse(plan if "precision" in plan else f"precision=bfloat16 {plan}") for plan in plans]
    spread = Sharing(parsed[0].tensor.size)
    work = work_of_decoder(GPT, rows, LENGTH, spread)
    return durations(work, split_of_decoder(GPT, work, spread), PlanTable.of(parsed), hardware, calibration)


PLANS = [
    "data=64", "data=64 zero=1", "data=64 zero=3 remat=block", "data=64 zero=3/8 remat=dots",
    "data=16 pipeline=1f1b:4 microbatches=8", "data=16 pipeline=gpipe:4 microbatches=8 remat=block zero=2",
    "data=16 pipeline=interleaved:4/2 microbatches=8 zero=1", "data=8 pipeline=zero_bubble:8 microbatches=16",
    "data=16 pipeline=zero_bubble:4/2 microbatches=8", "data=32 microbatches=4 zero=2", "data=64 precision=float32",
]  # fmt: skip
TENSOR_PLANS = [
    "data=8 tensor=8 zero=1",
    "data=8 tensor=8 remat=block microbatches=4",
    "data=2 tensor=8 pipeline=1f1b:4 microbatches=8",
]


def test_parts_add_up_to_the_total_between_the_bound_and_the_interval() -> None:
    for each in (of(*PLANS), of(*TENSOR_PLANS)):
        parts = [getattr(each, part) for part in PARTS]
        assert each.total == pytest.approx(np.sum(parts, axis=0))
        assert all((part >= 0).all() for part in parts)
        assert (each.bound <= each.total).all() and (each.bound > 0).all()
        assert (each.low < each.total).all() and (each.total < each.high).all()


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_costs_the_same_alone_and_among_others(plan: str) -> None:
    assert of(plan).total[0] == pytest.approx(of(*PLANS).total[PLANS.index(plan)], rel=1e-12)


RATES = ["memory_bandwidth", "bf16_flops", "host_bandwidth", "network_bandwidth"]


@settings(deadline=None, max_examples=25)
@given(some.sampled_from(RATES), some.floats(1.0, 10.0))
def test_a_faster_machine_is_never_slower(name: str, more: float) -> None:
    faster = dataclasses.replace(H100, **{name: more * getattr(H100, name)})
    for plans in (PLANS[:-1], TENSOR_PLANS):
        assert (of(*plans, hardware=faster).total <= of(*plans).total * (1 + 1e-12)).all()


@settings(deadline=None, max_examples=25)
@given(some.sampled_from(["matmul", "attention", "memory", "links", "adapters"]), some.floats(0.1, 1.0))
def test_nothing_beats_the_bound_whatever_shares_are_reached(name: str, share: float) -> None:
    calibration = dataclasses.replace(PURE, **{name: share})
    for plans in (PLANS, TENSOR_PLANS):
        each = of(*plans, calibration=calibration)
        assert (each.bound <= each.total * (1 + 1e-12)).all()


def test_arithmetic_by_hand() -> None:
    """6 FLOP a parameter and token, and attention's 6 s h a layer; a quarter more of the layers with remat."""
    each = of("data=64", "data=64 remat=block", "data=64 microbatches=2", calibration=PURE)
    tokens = ROWS * LENGTH / 64
    layers, head = GPT.layers * GPT.layer_parameters, GPT.vocab * GPT.hidden
    attention = 6 * GPT.layers * LENGTH * GPT.hidden
    assert each.flops[0] == pytest.approx(tokens * (6 * (layers + head) + attention))
    assert each.flops[1] - each.flops[0] == pytest.approx(tokens * (2 * layers + attention / 3))
    assert each.flops[2] == pytest.approx(each.flops[0])
    assert each.bound == pytest.approx(each.flops / H100.bf16_flops)
    # A flash kernel's backward pass makes the scores again: 2.5 forward passes for 2.
    assert each.attention[0] == pytest.approx(tokens * attention / 3 * 3.5 / H100.bf16_flops)
    assert each.recompute[0] == 0 < each.recompute[1]


def test_a_batch_twice_as_large_takes_twice_the_computation() -> None:
    one, two = of("data=64", calibration=PURE), of("data=64", calibration=PURE, rows=2 * ROWS)
    for part in ("attention", "elementwise"):
        assert getattr(two, part)[0] == pytest.approx(2 * getattr(one, part)[0])
    assert two.data[0] == pytest.approx(one.data[0])
    assert two.optimizer[0] == pytest.approx(one.optimizer[0])


def held(calibration: Calibration = PURE) -> float:
    return GPT.layers * GPT.layer_parameters + GPT.vocab * GPT.hidden


def test_gradients_and_parameters_move_as_audits_count_them() -> None:
    """Bytes received: an all-reduce moves twice what a scatter or a gather does; float32 behind micro-batches."""
    moved = [
        of(plan).moved["data"][0] / held() / (63 / 64)
        for plan in ("data=64", "data=64 zero=1", "data=64 zero=2", "data=64 microbatches=2")
    ]
    assert moved == pytest.approx([2 * 2, 2 + 2, 2 + 2, 2 * 4])


def test_micro_batches_that_overlap_hide_what_layers_wait_for_and_nothing_else() -> None:
    """Arithmetic and bytes are those of the micro-batches; sums of gradients are written once for each turn."""
    plans = ["data=8 tensor=8 microbatches=4", "data=8 tensor=8 microbatches=4 overlap=2"]
    plans += ["data=8 tensor=8 microbatches=4 overlap=4"]
    found = of(*plans)
    for part in ("matmul", "attention", "recompute", "optimizer", "bubble"):
        assert getattr(found, part) == pytest.approx(getattr(found, part)[0]), part
    alone, two, four = found.tensor
    assert alone > 3 * two and two == pytest.approx(four) and two > 0
    sent = found.tensor + found.data + found.hidden
    assert sent == pytest.approx(sent[0], rel=1e-6), "as much is sent"
    assert found.elementwise[0] > found.elementwise[1] > found.elementwise[2]
    none = of(*plans, calibration=PURE)
    assert none.tensor == pytest.approx(none.tensor[0]), "where nothing is hidden, nothing is gained"


def test_zero_3_gathers_layers_twice_for_each_micro_batch_and_what_is_outside_once() -> None:
    table, layers = GPT.vocab * GPT.hidden, GPT.layers * GPT.layer_parameters
    for microbatches in (1, 4):
        moved = of(f"data=64 zero=3 microbatches={microbatches}").moved["data"][0]
        # Gathered and scattered in two bytes.
        assert moved == pytest.approx(microbatches * 63 / 64 * 2 * (2 * layers + table + layers + table))


def test_groups_of_zero_talk_among_themselves_and_hand_on_an_eighth() -> None:
    each = of("data=64 zero=1/8")
    assert each.moved["zero"][0] == pytest.approx(held() * 7 / 8 * (2 + 2))
    assert each.moved["data"][0] == pytest.approx(held() / 8 * 2 * 2 * 7 / 8)
    # On a host, and between hosts by one adapter each.
    seconds = held() * 7 / 8 * 4 / 450e9 + held() / 8 * 4 * 7 / 8 / 50e9
    assert of("data=64 zero=1/8", calibration=PURE).data[0] == pytest.approx(seconds, rel=1e-3)


def test_tensor_parallelism_moves_two_all_reduces_a_layer_each_way_and_two_more_with_remat() -> None:
    each = of("data=8 tensor=8", "data=8 tensor=8 remat=block")
    stream = ROWS * LENGTH / 8 * GPT.hidden * 2 * 2 * 7 / 8
    assert each.moved["tensor"] == pytest.approx([stream * (4 * GPT.layers + 2), stream * (6 * GPT.layers + 2)])
    pure = of("data=8 tensor=8", calibration=PURE)
    assert pure.tensor[0] == pytest.approx(pure.moved["tensor"][0] / 450e9)


def test_what_is_hidden_is_not_waited_for() -> None:
    half = dataclasses.replace(PURE, hidden_tensor=0.5)
    bare, beside = of("data=8 tensor=8", calibration=PURE), of("data=8 tensor=8", calibration=half)
    assert beside.tensor[0] + beside.hidden[0] == pytest.approx(bare.tensor[0])
    # All but the embedding's, beside which there is next to nothing to compute.
    assert bare.tensor[0] * 0.45 < beside.hidden[0] < bare.tensor[0] / 2


@pytest.mark.parametrize("plan", ["1f1b:4", "gpipe:4", "interleaved:4/2", "zero_bubble:4", "zero_bubble:4/2"])
def test_a_pipeline_in_lockstep_waits_as_simulate_says(plan: str) -> None:
    """With a head that costs nothing, stages are equal, and the bubble is the schedule's."""
    decoder = dataclasses.replace(GPT, vocab=1)
    work = work_of_decoder(decoder, ROWS, LENGTH)
    plain = [dataclasses.replace(part, products=(), touched=()) for part in work.parts]
    work = dataclasses.replace(work, parts=(plain[0], work.parts[1], plain[2]))
    parsed = Plan.parse(f"data=16 pipeline={plan} microbatches=16 precision=bfloat16")
    each = durations(work, split_of_decoder(decoder, work), PlanTable.of([parsed]), H100, PURE)
    busy = each.matmul[0] + each.attention[0] + each.elementwise[0] - accumulated(each)
    forward = (each.flops[0] / 3) / each.flops[0]
    assert 0 < forward < 1
    pipeline = parsed.pipeline
    weight = each.matmul[0] / 3
    first = (each.matmul[0] - weight) / 2 + each.attention[0] / 3.5 + (each.elementwise[0] - accumulated(each)) / 3
    times = Times(first, busy - weight - first, weight)
    exact = simulate(build(pipeline.schedule, 4, 16, pipeline.chunks), scaled(times, 1 / 16)).makespan
    assert busy + each.bubble[0] == pytest.approx(exact, rel=2e-2)


def scaled(times: Times, share: float) -> Times:
    return Times(times.forward * share, times.backward * share, times.weight * share)  # type: ignore[operator]


def accumulated(each: Durations) -> float:
    """Gradients of micro-batches added up in float32: 10 bytes a parameter of a stage, with every one."""
    return 16 * GPT.layers / 4 * GPT.layer_parameters * 10 / H100.memory_bandwidth


def test_more_micro_batches_shrink_the_bubble_and_the_slowest_stage_has_the_head() -> None:
    each = of(*(f"data=8 pipeline=1f1b:8 microbatches={count}" for count in (8, 16, 32)), calibration=PURE)
    shares = each.bubble / (each.total - each.pipeline)
    assert shares[0] > shares[1] > shares[2] > 0
    # 1F1B in lockstep, p - 1 of m + p - 1 ticks, were stages alike; the head makes the others wait.
    assert shares[2] > 7 / (32 + 7) * 0.8


def test_stages_that_take_all_branches_run_the_head_and_wait_only_for_the_ends_of_the_schedule() -> None:
    """Of one, two and four stages in lockstep each computes the whole head, beside its share of the layers."""
    spread, words = (
        Sharing(tensor=8, is_split=True),
        "data=2 precision=bfloat16 tensor=8 sequence=gather microbatches=8",
    )
    work = work_of_decoder(GPT, ROWS, LENGTH, spread)
    table = PlanTable.of([Plan.parse(f"{words} pipeline=1f1b:{stages}") for stages in (1, 2, 4)])
    split = split_of_decoder(GPT, work, spread)
    each = durations(work, split, table, H100, PURE)
    # What comes before and after the layers: two halves of the layers have it twice.
    head, ends = (2 * two - one for one, two, _ in (each.matmul, each.elementwise))
    assert head >= 6 * ROWS * LENGTH / 2 * GPT.vocab * GPT.hidden / 8 / H100.bf16_flops and ends > 0
    for outside, (one, _, four) in ((head, each.matmul), (ends, each.elementwise)):
        assert four - outside == pytest.approx((one - outside) / 4)
    # F and B of a quarter of the layers in three ticks more than there are micro-batches; the head in these alone.
    inside = (each.total - each.data - each.optimizer)[0] - head
    assert 0.8 < each.bubble[2] / (inside / 4 * 3 / 8) < 1
    alone = durations(work, dataclasses.replace(split, in_lockstep=False), table, H100, PURE)
    assert alone.bubble[2] > each.bubble[2], "there only the last stage has the head, and all others wait for it"


def test_messages_go_both_ways_in_each_tick_and_nothing_hides_them() -> None:
    """1F1B has m + 2 (p - 1) ticks; a message is a micro-batch's activation in two bytes."""
    each = of("data=16 pipeline=1f1b:2 microbatches=8", calibration=PURE)
    message = ROWS * LENGTH / 16 / 8 * GPT.hidden * 2
    assert each.pipeline[0] == pytest.approx((8 + 2 * 1) * 2 * message / 50e9, rel=1e-6), (
        "stages are on different hosts"
    )


def test_stages_that_do_not_go_in_lockstep_wait_less() -> None:
    free = dataclasses.replace(PURE, software=Software(is_lockstep=False))
    plan = "data=16 pipeline=1f1b:4 microbatches=4"
    assert of(plan, calibration=free).bubble[0] < of(plan, calibration=PURE).bubble[0] * 1.001


def test_a_measured_step_is_the_factor_of_all_others() -> None:
    measured = FITTED.measured(1.5, "a run of this program")
    plain, scaled_ = of(*PLANS), of(*PLANS, calibration=measured)
    assert scaled_.total == pytest.approx(1.5 * plain.total)
    assert ((scaled_.high / scaled_.low) < (plain.high / plain.low)).all()


def test_what_no_run_was_like_has_a_wider_interval() -> None:
    """A batch of few tokens spends its step on transfers and on the optimizer."""
    usual, small = of("data=64"), of("data=64", rows=64)
    assert small.high[0] / small.low[0] > usual.high[0] / usual.low[0]


def test_unknown_links_cost_nothing_and_break_nothing() -> None:
    bare = dataclasses.replace(H100, host_bandwidth=None, network_bandwidth=None, adapters_per_host=None)
    each = of(*PLANS, hardware=bare)
    assert np.isfinite(each.total).all()
    assert (each.total < of(*PLANS).total).all()


def test_a_hundred_thousand_plans_are_counted_in_few_numpy_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work grows with the number of different batch shares and of pipelines, not with that of plans."""
    import cjax.planner.costs.compute as compute

    calls = []
    busy = compute._busy
    monkeypatch.setattr(compute, "_busy", lambda *args: calls.append(len(args[1])) or busy(*args))
    few, many = ["data=64", "data=32 microbatches=2"], ["data=64"] * 500 + ["data=32 microbatches=2"] * 500
    of(*few)
    counted = len(calls), sum(calls)
    calls.clear()
    of(*many)
    assert (len(calls), sum(calls)) == counted


@pytest.mark.parametrize(
    "text", ["data=8", "data=8 zero=1 precision=bfloat16", "data=2 tensor=4", "data=8 remat=block"]
)
@pytest.mark.parametrize(("model", "what"), [("switch", "told"), ("scattered", "ordered")])
def test_rows_sent_about_take_as_long_as_their_bytes(model: str, what: str, text: str) -> None:
    """Who is sent where, and tokens put in the order of their experts."""
    plan = Plan.parse(text)
    readings = Readings(TraceSource(captured(model), MODELS[model].batch))
    work, split, table = readings.work(plan), readings.split(plan), PlanTable.of([plan])
    without = dataclasses.replace(work, parts=tuple(dataclasses.replace(part, **{what: ()}) for part in work.parts))
    seconds = [durations(each, split, table, H100, PURE).gather[0] for each in (work, without)]
    bytes_ = [sum(amount[0] for amount in moved(each, split, table).by_axis().values()) for each in (work, without)]
    assert bytes_[0] > bytes_[1] and H100.host_bandwidth is not None
    assert seconds[0] - seconds[1] == pytest.approx((bytes_[0] - bytes_[1]) / H100.host_bandwidth)
