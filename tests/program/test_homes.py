"""What a report says of the homes of a program's rows, from sizes and what its programs compute."""

from types import SimpleNamespace
from typing import Any

from cjax.machines import Cluster
from cjax.plan import Plan
from cjax.planner.choice.homes import choose_homes
from cjax.planner.costs.walk import rates_of, reading_again, walk_cost
from cjax.planner.hardware import Hardware, hardware_of_cluster
from cjax.planner.homes import Peaks, RowBytes, RowSizes
from cjax.program.homes import describe_walk
from cjax.program.walk_report import reads_again
from cjax.report import WalkUse

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


def use_of(again: Any = None, compute: Any = None, hardware: Hardware = H100) -> WalkUse:
    rates = rates_of(hardware)
    cost = walk_cost(SIZES, HOMES, rates, compute, 4096, reading_again(again or {}))
    return describe_walk(PLAN, SIZES, PEAKS, HOMES, cost, rates, 4096, record=6 * MIB)


def test_all_that_is_held_and_moved_is_there() -> None:
    use = use_of(compute={"forward": 1e-3, "backward": 3e-3})
    assert use.peak <= 64 * MIB and use.total("host") <= 150 * MIB
    assert use.total("disk") <= 1024 * MIB and use.classes[-1].name == "the rest"
    assert [each.name for each in use.classes][:-1] == ["params", "optimizer", "gradients", "activations"]
    for each in use.classes[:-1]:
        assert sum(each.layers.values()) == 8
        assert (each.link_in > 0) == (each.layers["device"] < 8)
    assert use.phases["forward"].compute == 1e-3 and use.phases["update"].compute == 0
    assert use.is_bound and "(assumed)" in use.rates
    assert (use.budget, use.host_limit, use.disk_limit) == (PLAN.budget, PLAN.host, PLAN.disk)


def test_a_pass_takes_as_long_as_the_direction_that_moves_more() -> None:
    rates = rates_of(H100)
    cost = walk_cost(SIZES, HOMES, rates, {"forward": 1e-3, "backward": 3e-3}, 4096, reading_again({}))
    use = describe_walk(PLAN, SIZES, PEAKS, HOMES, cost, rates, 4096)
    ways = {str(name): (each.link_in, each.link_out) for name, each in cost.seconds.items()}
    assert any(there > back for there, back in ways.values()) and any(there < back for there, back in ways.values())
    assert {name: each.link for name, each in use.phases.items()} == {name: max(each) for name, each in ways.items()}


def test_rows_that_an_optimizer_reads_again_are_moved_again() -> None:
    once, again = ({each.name: each for each in use_of(times).classes} for times in ({}, {"grads": 1}))
    assert again["gradients"].link_in == 2 * once["gradients"].link_in > 0
    assert again["optimizer"] == once["optimizer"]


def test_passes_of_an_optimizer_before_its_last() -> None:
    """The first reads gradients as they are made in one stack, and all of both stacks' in another pass."""
    reads = {(1, 0): {"grads"}, (1, 1): {"grads", "params"}, (2, 0): {"grads", "opt"}, (2, 1): {"grads"}}
    optimizer: Any = SimpleNamespace(
        num_rounds=2, reads=lambda number, k, layer: reads[number, k], is_early=lambda k, layer: k == 0
    )
    assert reads_again(optimizer, 2) == {"params": 1, "opt": 1, "grads": 2}
    assert reads_again(optimizer, 1) == {"params": 0, "opt": 1, "grads": 1}


def test_without_rates_there_is_no_time() -> None:
    use = use_of(compute={"forward": 1.0}, hardware=Hardware("cpu", 2, 2, 2**30))
    assert use.seconds is None and use.hidden_from is None and use.total("link_in") > 0
