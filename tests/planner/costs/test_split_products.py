"""A product on several devices is shared out once, whatever dims their axes split."""

import dataclasses

import numpy as np
import pytest

from cjax.plan import Plan
from cjax.planner.costs.calibration import Calibration
from cjax.planner.costs.duration import Durations, durations
from cjax.planner.hardware import Hardware
from cjax.planner.table import PlanTable
from cjax.planner.work import BATCH, AttentionWork, AxisMove, Dims, MatmulWork, NamedTensor, Part, Work, WorkSplit

CARD = Hardware("card", 4, 4, 2**40, 1e12, 100e12, 100e12, 50e12, host_bandwidth=100e9)
ONE_D = {"heads": ("tensor",), "ffn": ("tensor",)}
GRID = {"heads": ("col",), "embed": ("col",), "ffn": ("col",), BATCH: ("row", "col")}
CUBE = {"heads": ("j",), "embed": ("k",), "ffn": ("j",), BATCH: ("i", "j", "k")}
STREAM: Dims = ((BATCH, 16), ("sequence", 1024))


def work_of(vocab: int = 4096) -> Work:
    embed, ffn = (("embed", 2048),), (("ffn", 8192),)
    products = (MatmulWork((), STREAM, embed, ffn, reads=0), MatmulWork((), STREAM, ffn, embed, reads=1))
    attention = AttentionWork(
        ((BATCH, 16),), (("heads", 16),), (("sequence", 1024),), (("sequence", 1024),), features=128, kv_heads=16
    )
    head = MatmulWork((), STREAM, embed, (("vocab", vocab),), reads=0)
    return Work((Part("layers", 8, products, (attention,)), Part("head", 1, (head,))), 16, 16 * 1024)


def computed(axes_of: dict[str, tuple[str, ...]], sizes: dict[str, int], plan: str, vocab: int = 4096) -> np.ndarray:
    """FLOPs, seconds in matmuls, and in attentions' kernels."""
    found = asked(WorkSplit(axes_of, sizes, ((), ()), (0, 0)), plan, vocab)
    return np.array([found.flops[0], found.matmul[0], found.attention[0]])


def asked(split: WorkSplit, plan: str, vocab: int = 4096) -> Durations:
    table = PlanTable.of([Plan.parse(f"{plan} precision=bfloat16")])
    return durations(work_of(vocab), split, table, CARD, Calibration("here"))


@pytest.mark.parametrize(
    ("axes_of", "sizes"),
    [
        (ONE_D | {"sequence": ("tensor",), "vocab": ("tensor",)}, {"tensor": 4}),
        (GRID, {"row": 2, "col": 2}),
        (CUBE, {"i": 2, "j": 2, "k": 2}),
    ],
    ids=["gather", "2d", "3d"],
)
def test_axes_that_split_two_dims_of_a_product_split_it_once(axes_of, sizes) -> None:  # fmt: skip
    many = int(np.prod(list(sizes.values())))
    copies, split = computed({}, {}, f"data={many}"), computed(axes_of, sizes, "data=1")
    assert split[0] == pytest.approx(copies[0])
    assert split[1] == pytest.approx(copies[1], rel=0.2), "tiles fit less well, and that is all"
    assert split[2] == pytest.approx(copies[2]), "a kernel takes attentions whose heads are split"


def test_a_split_of_positions_alone_keeps_the_kernel_away() -> None:
    assert computed({"sequence": ("sequence",)}, {"sequence": 4}, "data=1")[2] == 0


def test_what_tensor_cores_do_not_take_is_filled_up() -> None:
    whole, odd = computed({}, {}, "data=4", 4096), computed({}, {}, "data=4", 4097)
    assert whole[1] < odd[1] < 1.1 * whole[1]


def test_an_exchange_is_waited_for_and_a_ring_goes_on_beside() -> None:
    waits = {}
    for kind in ("collective-permute", "all-to-all"):
        moves = (AxisMove(kind, ("sequence",), 1e8, is_forward=True),)
        waits[kind] = asked(
            WorkSplit({"sequence": ("sequence",)}, {"sequence": 4}, (moves, ()), (0, 0)), "data=1"
        ).sequence[0]
    assert waits["all-to-all"] > 2 * waits["collective-permute"] > 0


def test_of_several_stacks_each_is_a_chunk_more() -> None:
    one = work_of()
    layers, head = one.parts
    half = dataclasses.replace(layers, repeats=4)
    split = WorkSplit({}, {}, ((), ()), (0, 0))
    two = WorkSplit({}, {}, ((), (), ()), (0, 0, 0))
    args = (CARD, Calibration("here"))

    def step(work: Work, on: WorkSplit, plan: str) -> float:
        return float(durations(work, on, PlanTable.of([Plan.parse(f"data=1 microbatches=8 {plan}")]), *args).total[0])

    both = step(Work((half, half, head), one.num_rows, one.tokens), two, "pipeline=1f1b:2")
    assert both == pytest.approx(step(one, split, "pipeline=interleaved:2/2"), rel=1e-3)


def test_stages_wait_for_those_that_hand_on_between_hosts() -> None:
    stream = NamedTensor((*STREAM, ("embed", 2048)), 4)
    work = work_of()
    layers = dataclasses.replace(work.parts[0], stream=stream)
    work = dataclasses.replace(work, parts=(layers, work.parts[1]))
    table = PlanTable.of([Plan.parse("data=1 pipeline=1f1b:4 microbatches=8 precision=bfloat16")])
    sent = {}
    for cards in (2, 4):
        hosts = dataclasses.replace(CARD, devices_per_host=cards, network_bandwidth=1e9, adapters_per_host=1)
        found = durations(work, WorkSplit({}, {}, ((), ()), (0, 0)), table, hosts, Calibration("here"))
        sent[cards] = float(found.pipeline[0])
    assert sent[2] > 10 * sent[4] > 0
