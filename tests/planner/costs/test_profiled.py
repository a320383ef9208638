"""What was measured on devices that are here, where a plan is for others of their kind, joined in another way."""

import dataclasses

import numpy as np
import pytest

from cjax.cards import CARDS
from cjax.machines import Cluster
from cjax.plan import Plan
from cjax.planner.costs.calibration import calibration_of
from cjax.planner.costs.compute import Computing
from cjax.planner.costs.duration import durations
from cjax.planner.costs.profiled import profiled
from cjax.planner.costs.transformer import Decoder, Sharing, split_of_decoder, work_of_decoder
from cjax.planner.hardware import Hardware, hardware_of_cluster
from cjax.planner.profile import Profile
from cjax.planner.table import PRECISIONS, PlanTable
from cjax.planner.work import AxisMove, MatmulWork, Part, WorkSplit

A100 = CARDS["a100"]
assert A100.bf16_flops is not None
ON_CARD = Profile(
    kind=A100.kind, machine="", num_devices=8, shares_cores=False, matmul={"bfloat16": 0.5 * A100.bf16_flops},
    thin=0.0, memory_bandwidth=0.75 * A100.memory_bandwidth, link_bandwidth={"all-reduce": 0.5 * A100.host_bandwidth},
    latency=7e-5, launch=1e-5, jax="0.10.2", date="2026-11-23",
)  # fmt: skip
ON_CORES = Profile(
    kind="cpu", machine="Some Processor, 4 cores", num_devices=8, shares_cores=True, matmul={"float32": 1e10},
    thin=6.4e-9, memory_bandwidth=1e9, link_bandwidth={"all-gather": 4e8, "all-reduce": 2e8}, latency=7e-4, launch=1e-3,
    jax="0.10.2", date="2026-11-23",
)  # fmt: skip


@pytest.mark.parametrize("wiring", ["", "/nvlink=25GB/s", "/nvlink=900GB/s", "/node=4,network=4x25GB/s"])
def test_the_share_of_links_is_of_those_that_were_measured(wiring: str) -> None:
    """Half of what the card's own links could do is half of what others could, slower and faster ones."""
    planned = hardware_of_cluster(Cluster.parse(f"a100:16{wiring}"), 16)
    fitted = calibration_of(planned)
    known, found = profiled(planned, ON_CARD)
    assert fitted is not None and found is not None
    assert known == planned, "a datasheet's figures stay, whatever was measured"
    assert (found.links, found.matmul, found.memory) == (0.5, 0.5, 0.75)
    assert found.latency == pytest.approx(1e-5) and found.source == ON_CARD.source
    assert found.step == ON_CARD.launch, "published runs, and not this card, take 10 ms beside their kernels"
    measured = {"links", "matmul", "memory", "latency", "source", "step"}
    for field in dataclasses.fields(found):
        assert field.name in measured or getattr(found, field.name) == getattr(fitted, field.name), field.name


def test_no_share_is_more_than_all() -> None:
    """Else a bound would be none."""
    planned = hardware_of_cluster(Cluster.parse("a100:8"), 8)
    fast = {"all-reduce": 3 * A100.host_bandwidth}
    _, found = profiled(planned, dataclasses.replace(ON_CARD, link_bandwidth=fast, memory_bandwidth=1e15))
    assert found is not None and (found.links, found.memory) == (1.0, 1.0)


def test_of_one_card_no_links_were_measured() -> None:
    planned = hardware_of_cluster(Cluster.parse("a100:8"), 8)
    fitted, (_, found) = calibration_of(planned), profiled(planned, dataclasses.replace(ON_CARD, link_bandwidth={}))
    assert fitted is not None and found is not None and found.links == fitted.links


@pytest.mark.parametrize("num", [1, 2, 8, 16])
def test_virtual_devices_have_together_what_the_cores_have(num: int) -> None:
    known, found = profiled(Hardware("cpu", num, num, 2**30), ON_CORES)
    assert found is not None and found.shares_cores and found.cores == 0
    rates = (known.f32_flops, known.memory_bandwidth, known.host_bandwidth)
    assert [num * rate for rate in rates if rate] == pytest.approx([8e10, 8e9, 8 * 3e8])
    assert known.bf16_flops is None, "nobody measured it"
    # What was measured is reached whole, and nothing is hidden where all cores are busy.
    assert (found.matmul, found.memory, found.links, found.factor) == (1.0, 1.0, 1.0, 1.0)
    assert found.hidden_data == found.hidden_tensor == found.hidden_pipeline == found.overlapped == 0.0
    assert found.latency == 7e-4, "all meet at once"
    # A matmul is at half of its rate where its least dim is 64, as measured, however many share the cores.
    product = MatmulWork((), (("batch", 64),), (("in", 1024),), (("out", 1024),), reads=0)
    whole, place = WorkSplit({}, {}, ((),), (0,)), np.array([PRECISIONS.index("float32")])
    there, *_ = Computing(known, found, whole, np.ones(1), np.ones(1), place).passes(Part("one", products=(product,)))
    assert found.thin * there.thin[0] == pytest.approx(there.matmul[0])
    assert dict(found.kinds) == pytest.approx({"all-gather": 4 / 3, "all-reduce": 2 / 3})


@pytest.mark.parametrize("name", ["a100:16/nvlink=25GB/s", "cpu"])
def test_without_a_profile_nothing_changes(name: str) -> None:
    cpus = Hardware("cpu", 8, 8, 2**30)
    planned = cpus if name == "cpu" else hardware_of_cluster(Cluster.parse(name), 16)
    assert profiled(planned, None) == (planned, calibration_of(planned))


def test_stages_that_take_all_branches_throw_away_what_cores_could_have_done() -> None:
    """A ring's stages run in each tick what any of them has to: of one micro-batch in four stages, four times all of
    it; stages without a ring leave the cores to each other."""
    decoder = Decoder(8, 256, 8, 512)
    known, found = profiled(Hardware("cpu", 8, 8, 2**30), ON_CORES)
    assert found is not None

    def computed(text: str, sharing: Sharing) -> float:
        work = work_of_decoder(decoder, 16, 128, sharing)
        table = PlanTable.of([Plan.parse(text)])
        each = durations(work, split_of_decoder(decoder, work, sharing), table, known, found)
        return sum(getattr(each, part)[0] for part in ("matmul", "attention", "elementwise", "sequence", "bubble"))

    ring = Sharing(context=2)
    alone, apart = computed("data=1 sequence=ring:2", ring), computed("data=2", Sharing())
    for count in (1, 4):
        words = f"pipeline=1f1b:4 microbatches={count}"
        assert computed(f"data=2 {words}", Sharing()) < 0.5 * apart
        # F and B of a micro-batch in m + 3 ticks each, of a quarter of the layers; the ends once for each micro-batch.
        assert computed(f"data=1 sequence=ring:2 {words}", ring) == pytest.approx(
            alone * (count + 3) / (4 * count), rel=0.3
        )


def test_what_lies_in_one_piece_is_gathered_at_its_own_rate() -> None:
    rates = {"all-gather": 1e8, "outer all-gather": 4e8, "all-reduce": 1e8}
    known, found = profiled(Hardware("cpu", 8, 8, 2**30), dataclasses.replace(ON_CORES, link_bandwidth=rates))
    assert found is not None and dict(found.kinds) == {"all-gather": 1.0, "outer all-gather": 4.0, "all-reduce": 1.0}
    moves = [AxisMove("all-gather", ("i",), 1e6, True, is_outer=is_outer) for is_outer in (False, True)]
    part, table = Part("one"), PlanTable.of([Plan.parse("data=1")])
    work = dataclasses.replace(work_of_decoder(Decoder(8, 256, 8, 512), 16, 128), parts=(part,))
    seconds = [
        durations(work, WorkSplit({}, {"i": 8}, ((move,),), (0,)), table, known, found).tensor[0] for move in moves
    ]
    assert seconds[0] - found.latency == pytest.approx(4 * (seconds[1] - found.latency))


@pytest.mark.parametrize(("name", "again"), [("cpu", 2), ("another", 0)])
def test_cpus_copy_layers_weights_out_of_their_stack_in_each_pass(name: str, again: int) -> None:
    """Read and written, forward and backward; what stands outside of the layers is in no stack."""
    decoder, num = Decoder(8, 256, 8, 512), 3
    measured = dataclasses.replace(ON_CORES, kind=name)
    known, found = profiled(Hardware(name, 8, 8, 2**30), measured)
    assert found is not None and known.memory_bandwidth is not None
    work = work_of_decoder(decoder, 24, 128)
    table, split = PlanTable.of([Plan.parse(f"data=8 microbatches={num}")]), split_of_decoder(decoder, work)
    without = dataclasses.replace(found, software=dataclasses.replace(found.software, copies_weights=False))
    plain, copied = (durations(work, split, table, known, each).elementwise[0] for each in (without, found))
    weights = 4 * decoder.layers * decoder.layer_parameters
    assert copied - plain == pytest.approx(again * num * 2 * weights / known.memory_bandwidth)
