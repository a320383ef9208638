"""One model asked about on several kinds of devices."""

import os
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import optax
import pytest
from zoo import MODELS

from cjax import Plan
from cjax.machines import Cluster
from cjax.models import GPT, gpt, loss
from cjax.plan import Auto
from cjax.planner.choice.planning import Asked, Planning
from cjax.planner.choice.scored import Scored
from cjax.planner.hardware import Hardware, hardware_of_cluster
from cjax.planner.profile import Profile, machine_of, profile_path, write_profile
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource


def on_a100(num_devices: int) -> Hardware:
    return hardware_of_cluster(Cluster("a100"), num_devices)


def on_h100(num_devices: int) -> Hardware:
    return hardware_of_cluster(Cluster("h100"), num_devices)


def test_on_other_devices_a_plan_costs_what_it_would_if_it_were_read_again() -> None:
    config = gpt("gpt-mini", num_layers=2, context=32)
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    source = TraceSource(capture(lambda rngs: GPT(config, rngs=rngs), loss, batch, None), batch)
    first = Planning(source, optax.adam(1e-3), on_a100)
    plan = Plan.parse("data=2 tensor=2 precision=bfloat16")
    found = first.score(plan)
    there, anew = first.on(on_h100), Planning(source, optax.adam(1e-3), on_h100)
    assert there.trace is first.trace and there.work is first.work
    assert there.score(plan) == anew.score(plan) != found
    assert isinstance(found, Scored) and first.score(plan) == found


def test_a_runs_own_steps_are_the_measure_of_what_is_predicted_from_then_on() -> None:
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    config = gpt("gpt-mini", num_layers=2, context=32)
    source = TraceSource(capture(lambda rngs: GPT(config, rngs=rngs), loss, batch, None), batch)
    planning = Planning(source, optax.adam(1e-3), on_a100)
    plans = [Plan.parse(text) for text in ("data=8", "data=4 tensor=2")]
    before = [planning.score(plan) for plan in plans]
    assert all(isinstance(each, Scored) for each in before)
    planning.learn(plans[0], [9.0, 2 * before[0].time, 2 * before[0].time])
    after = [planning.score(plan) for plan in plans]
    for one, other in zip(before, after, strict=True):
        assert other.time == pytest.approx(2 * one.time)
        assert other.high / other.low < one.high / one.low
        assert other.bytes == one.bytes
    assert planning.calibration is not None and "took 2.00 times" in planning.calibration.source
    planning.learn(plans[0], [before[0].time])  # says how far the constants are off, not the last prediction
    assert planning.score(plans[0]).time == pytest.approx(before[0].time)


@pytest.mark.full
def test_several_processes_read_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine may have a file of its own, or none: all have to choose the same plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = Profile(
        "cpu", machine_of("cpu"), 8, True, {"float32": 1e10}, 0.0, 1e9, {}, 1e-4, 1e-3, "0.10.2", "2026-11-23"
    )
    write_profile(profile)
    source = contract.source_of("linen_tied")

    def planning() -> Planning:
        return Planning(source, optax.adam(1e-3), lambda num: Hardware("cpu", num, num, 2**33))

    alone = planning()
    assert alone.calibration is not None and alone.calibration.source == profile.source
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    together = planning()
    assert together.calibration is None and together.known(8).f32_flops is None
    chosen = [each.plan for each in together.search(Asked((8,), top=4)).best]
    profile_path("cpu").unlink()
    assert [each.plan for each in planning().search(Asked((8,), top=4)).best] == chosen


# By default of every kind of layer one.
KINDS = ["cjax_t5", "linen_moe_capacity", "linen_scan", "linen_lstm", "nnx_conv", "nnx_llama", "linen_mixer"]


@pytest.mark.full("cjax_t5", "linen_mixer", "linen_moe_capacity", "linen_scan", "nnx_llama")
@pytest.mark.parametrize("name", MODELS if os.environ.get("CJAX_TEST_ALL") == "1" else KINDS)
def test_every_model_has_a_prediction(name: str) -> None:
    planning = Planning(contract.source_of(name), optax.adam(1e-3), on_h100)
    for text in ("data=8", "data=8 zero=3 remat=block precision=bfloat16", "data=4 tensor=2 microbatches=2"):
        scored = planning.score(Plan.parse(text))
        if isinstance(scored, Scored):
            assert 0 < scored.low < scored.time < scored.high < 1
            assert 0 < scored.bytes < 2**30
        else:
            assert text.startswith("data=4 tensor")


@pytest.mark.parametrize(
    ("name", "hands_on"),
    [("linen_conv", True), ("nnx_conv", True), ("nnx_decoder", False), ("linen_lstm", False)],
)
def test_micro_batches_overlap_unless_they_hand_on_what_they_made(name: str, hands_on: bool) -> None:
    """Running statistics of a convolutional net; not counts of random numbers, as an NNX decoder with dropout has."""
    planning = Planning(contract.source_of(name), None, on_h100)
    plan = Plan.parse("data=2 tensor=4")
    assert planning.space(Auto.parse("auto"), 8).overlaps(plan, 4) == ([1] if hands_on else [1, 2])
    once = Plan.parse("data=2 tensor=4 microbatches=2 overlap=2")
    assert Asked((8,), refused=(once,)).limit(planning.space(Auto.parse("auto"), 8)).overlaps(plan, 4) == [1]


# What `auto` once climbed, cheapest first: ZeRO, remat, micro-batches.
LADDER = (
    (0, "none", 1), (1, "none", 1), (2, "none", 1), (3, "none", 1), (2, "dots", 1), (3, "dots", 1), (3, "block", 1),
    (3, "block", 2), (3, "block", 4),
)  # fmt: skip


# One of each kind of the zoo: a search reads a model as three plans have it, in seconds.
KINDS = ("linen_tied", "linen_conv", "linen_lstm", "linen_moe_capacity")


@pytest.mark.full("linen_lstm", "linen_moe_capacity", "linen_tied")
@pytest.mark.parametrize("name", KINDS)
def test_auto_is_never_slower_than_a_ladder_of_data_parallel_plans(name: str) -> None:
    """By prediction, with plenty of memory and with little, whichever of the ladder's plans is the first that fits."""
    planning = Planning(contract.source_of(name), optax.adam(1e-3), on_h100)
    num = 2
    rungs = [Plan(zero=zero, remat=remat, microbatches=many).resolve(num) for zero, remat, many in LADDER]
    rows = [leaf.shape[0] for leaf in jax.tree.leaves(planning.source.batch_shape) if leaf.shape]
    scored = [planning.score(rung) for rung in rungs if all(n % (num * rung.microbatches) == 0 for n in rows)]
    known = [each for each in scored if isinstance(each, Scored)]
    for limit in (2**34, min(int(each.bytes) + 1 for each in known)):
        found = planning.search(Asked((num,), memory=limit))
        whole = "microbatches" in found.refused  # the ladder would have been refused as well
        first = next(
            (each for each in known if each.bytes <= limit and (each.plan.microbatches == 1 or not whole)), None
        )
        if first is not None:
            assert found.best and found.best[0].bytes <= limit
            assert found.best[0].time <= first.time * (1 + 1e-6), (str(found.best[0].plan), str(first.plan))
