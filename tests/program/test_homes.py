"""What a report says of the homes of a program's rows, from sizes and what its programs compute."""

import pytest

from cjax.cluster import Cluster
from cjax.plan import Plan
from cjax.planner.choice.homes import choose_homes
from cjax.planner.hardware import Hardware, hardware_of_cluster
from cjax.planner.homes import Peaks, Phase, RowBytes, RowSizes
from cjax.program.homes import walk_use

MIB = 2**20
SIZES: RowSizes = {
    "params": ((RowBytes(4 * MIB, 8 * MIB, 8 * MIB),) * 8,),
    "frozen": ((RowBytes(0, 0, 0),) * 8,),
    "opt": ((RowBytes(8 * MIB, 16 * MIB, 16 * MIB),) * 8,),
    "grads": ((RowBytes(4 * MIB, 8 * MIB, 8 * MIB),) * 8,),
    "inputs": ((RowBytes(MIB, 2 * MIB, 2 * MIB),) * 8,),
}
PEAKS = Peaks(outside=5 * MIB, forward=2 * MIB, after=3 * MIB, backward=6 * MIB, update=MIB)
PLAN = Plan(data=2, precision="bfloat16", budget=64 * MIB, host=150 * MIB, disk=1024 * MIB)
H100 = hardware_of_cluster(Cluster.parse("h100:2"), 2)
HOMES = choose_homes(SIZES, PEAKS, PLAN.budget, PLAN.host, PLAN.disk, record=6 * MIB)


def test_all_that_is_held_and_moved_is_there() -> None:
    peak = 989.4e12
    flops: dict[Phase, float] = {"forward": peak * 1e-3, "after": peak * 1e-3, "backward": peak * 2e-3}
    use = walk_use(PLAN, SIZES, PEAKS, HOMES, H100, 4096, flops, record=6 * MIB)
    assert use.peak <= 64 * MIB and use.total("host") <= 150 * MIB
    assert use.total("disk") <= 1024 * MIB and use.classes[-1].name == "the rest"
    assert [each.name for each in use.classes][:-1] == ["params", "optimizer", "gradients", "activations"]
    for each in use.classes[:-1]:
        assert sum(each.layers.values()) == 8
        assert (each.link_in > 0) == (each.layers["device"] < 8)
    # What is lost after the layers counts to the backward pass.
    assert use.phases["forward"].compute == pytest.approx(1e-3) and use.phases["backward"].compute == pytest.approx(
        3e-3
    )
    assert use.phases["update"].compute == 0 and use.is_bound and "(assumed)" in use.rates
    assert (use.budget, use.host_limit, use.disk_limit) == (PLAN.budget, PLAN.host, PLAN.disk)


def test_rows_that_an_optimizer_reads_again_are_moved_again() -> None:
    once = walk_use(PLAN, SIZES, PEAKS, HOMES, H100, 4096)
    again = walk_use(PLAN, SIZES, PEAKS, HOMES, H100, 4096, again={"grads": 1})
    of = {use is again: {each.name: each for each in use.classes} for use in (once, again)}
    assert of[True]["gradients"].link_in == 2 * of[False]["gradients"].link_in > 0
    assert of[True]["optimizer"] == of[False]["optimizer"]


def test_without_rates_there_is_no_time() -> None:
    unknown = Hardware("cpu", 2, 2, 2**30)
    use = walk_use(PLAN, SIZES, PEAKS, HOMES, unknown, 4096, {"forward": 1e9})
    assert use.seconds is None and use.hidden_from is None and use.total("link_in") > 0
