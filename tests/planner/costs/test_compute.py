"""Passes over parts, against arithmetic by hand."""

import dataclasses

import numpy as np
import pytest

from cjax.planner.costs.calibration import Calibration, Software
from cjax.planner.costs.compute import CROOKED, FUSED_BACK, UNALIGNED, Computing, Pass
from cjax.planner.hardware import Hardware
from cjax.planner.table import PRECISIONS
from cjax.planner.work import BATCH, ROWS, AttentionWork, Dims, MatmulWork, NamedTensor, Part, RingWork, WorkSplit
from cjax.sharding.products.blocks import rows_multiplied
from cjax.sharding.products.tiles import rows_in_tiles

PEAK, MEMORY, CORES = 1e14, 1e12, 100
CARD = Hardware("card", 8, 8, 1, memory_bandwidth=MEMORY, bf16_flops=PEAK, f16_flops=PEAK, f32_flops=PEAK / 4)
WHOLE = WorkSplit({}, {}, ((),), (0,))
# 2 rows of 6400 positions: 100 tiles of 128 x 256 for each 256 features.
MATMUL = MatmulWork((), (("batch", 2), ("position", 6400)), (("in", 1024),), (("out", 256),), reads=0)


def passes(
    part: Part,
    split: WorkSplit = WHOLE,
    share: float = 1,
    precision: str = "bfloat16",
    card: Hardware = CARD,
    **software: bool,
) -> tuple[Pass, Pass]:
    calibration = Calibration("test", cores=CORES, software=dataclasses.replace(Software(), **software))
    place = np.array([PRECISIONS.index(precision)])
    return Computing(card, calibration, split, np.array([float(share)]), np.ones(1), place).passes(part)[:2]


def matmul(**changes: object) -> Part:
    return Part("one", products=(dataclasses.replace(MATMUL, **changes),))


def test_a_matmul_that_fills_all_cores_runs_at_the_peak() -> None:
    there, back = passes(matmul())
    flops = 2 * 12800 * 1024 * 256
    assert there.flops[0] == flops
    assert there.matmul[0] == there.matmul_least[0] == pytest.approx(flops / PEAK)
    assert there.thin[0] == pytest.approx(flops / PEAK * (PEAK / MEMORY) / 256)
    assert back.flops[0] == 2 * flops
    assert back.matmul_least[0] == pytest.approx(2 * flops / PEAK)


def test_float32_runs_at_its_own_peak_and_moves_twice_the_bytes() -> None:
    half, whole = passes(matmul())[0], passes(matmul(), precision="float32")[0]
    assert whole.matmul[0] == pytest.approx(4 * half.matmul[0])
    assert whole.thin[0] == pytest.approx(2 * half.thin[0])


def test_what_all_examples_make_is_shared_by_devices_and_not_by_micro_batches() -> None:
    """Beside examples they are what is shared, once: in who is sent where."""

    def flops(rows: Dims, inner: Dims, data: float = 4) -> float:
        product = dataclasses.replace(MATMUL, rows=rows, inner=inner)
        place = np.array([PRECISIONS.index("bfloat16")])
        computing = Computing(CARD, Calibration("test", cores=CORES), WHOLE, np.array([8.0]), np.array([data]), place)
        return computing.passes(Part("one", products=(product,)))[0].flops[0] / product.flops

    made, examples, width = ((ROWS, 64),), ((BATCH, 32),), (("in", 16),)
    assert flops(made, width) == 1 / 4
    assert flops(made, width, data=6) == 1  # which does not divide them
    assert flops(examples, width) == flops(made, examples) == flops(examples, made) == 1 / 8


def test_rows_in_groups_are_multiplied_in_blocks_and_few_by_all_groups() -> None:
    """Time, and no work of the model's."""
    for positions, groups in ((6400, 8), (4, 8)):
        one, many = (passes(matmul(rows=(("batch", 2), ("position", positions)), groups=num)) for num in (1, groups))
        for alone, grouped in zip(one, many, strict=True):
            times = rows_multiplied(2 * positions, groups) / (2 * positions)
            assert grouped.matmul[0] == pytest.approx(times * alone.matmul[0]) and grouped.flops[0] == alone.flops[0]


def test_rows_in_groups_are_multiplied_by_kernels_where_a_card_has_them() -> None:
    """In 16 bits, and of rows and features that they take."""
    hopper = dataclasses.replace(CARD, name="NVIDIA H200")

    def times(rows: int, inner: int, **how: str) -> float:
        sizes = {"rows": (("row", rows),), "inner": (("in", inner),)}
        one, many = (passes(matmul(**sizes, groups=num), card=hopper, **how)[0] for num in (1, 8))
        return float(many.matmul[0] / one.matmul[0])

    assert times(12800, 1024) == pytest.approx(rows_in_tiles(12800, 8) / 12800)
    for rows, inner, how in ((12800, 1000, {}), (12864, 1024, {}), (12800, 1024, {"precision": "float32"})):
        assert times(rows, inner, **how) == pytest.approx(rows_multiplied(rows, 8) / rows)


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    """101 rows of tiles for 100 cores are two waves of the largest; smaller ones fill them better."""
    more = matmul(rows=(("batch", 2), ("position", 6464)))
    busy = passes(more)[0].matmul_least[0] / passes(more)[0].matmul[0]
    assert 0.5 < busy < 0.95


def test_made_again_is_what_the_backward_pass_needs() -> None:
    place = np.array([PRECISIONS.index("bfloat16")])
    computing = Computing(CARD, Calibration("test", cores=CORES), WHOLE, np.ones(1), np.ones(1), place)
    last = dataclasses.replace(MATMUL, is_remade=False)
    there, _, again = computing.passes(Part("one", products=(MATMUL, MATMUL, last)))
    assert again.matmul[0] == pytest.approx(there.matmul[0] * 2 / 3) and again.flops[0] * 3 == there.flops[0] * 2


@pytest.mark.parametrize(("inner", "slower"), [(1024, 1.0), (1032, UNALIGNED), (1028, CROOKED)])
def test_tensor_cores_want_dims_that_eights_divide(inner: int, slower: float) -> None:
    there = passes(matmul(inner=(("in", inner),)), pads=False)[0]
    assert there.matmul[0] == pytest.approx(slower * there.matmul_least[0])


def test_xla_fills_dims_up_for_them_in_16_bits() -> None:
    crooked = matmul(inner=(("in", 1028),))
    half, whole = passes(crooked)[0], passes(crooked, precision="float32")[0]
    assert half.matmul[0] == pytest.approx(UNALIGNED * half.matmul_least[0])
    assert whole.matmul[0] == pytest.approx(CROOKED * whole.matmul_least[0])


def test_micro_batches_and_axes_divide_what_they_name() -> None:
    split = WorkSplit({"out": ("tensor",)}, {"tensor": 2}, ((),), (0,))
    whole, part = passes(matmul())[0], passes(matmul(), split, share=2)[0]
    assert part.flops[0] == whole.flops[0] / 4


HEADS, LENGTH, FEATURES = 16, 2048, 64
ATTENTION = AttentionWork(
    (("batch", 4),), (("heads", HEADS),), (("position", LENGTH),), (("keys", LENGTH),), FEATURES, HEADS, is_causal=True
)


def test_a_kernel_computes_half_of_causal_scores() -> None:
    there, back = passes(Part("one", attentions=(ATTENTION,)))
    flops = 4 * 4 * HEADS * LENGTH**2 * FEATURES
    assert there.attention[0] == there.attention_least[0] == pytest.approx(flops / 2 / PEAK)
    assert back.attention[0] == pytest.approx(FUSED_BACK * there.attention[0])
    assert there.matmul[0] == there.touched[0] == 0
    whole = passes(Part("one", attentions=(dataclasses.replace(ATTENTION, is_causal=False),)))[0]
    assert whole.attention[0] == pytest.approx(flops / PEAK)


@pytest.mark.parametrize("reason", ["work", "software", "precision", "split"])
def test_without_a_kernel_all_scores_are_made_and_go_through_memory(reason: str) -> None:
    work = dataclasses.replace(ATTENTION, is_fused=reason != "work")
    split = WorkSplit({"position": ("sequence",)}, {"sequence": 2}, ((),), (0,)) if reason == "split" else WHOLE
    precision = "float32" if reason == "precision" else "bfloat16"
    there = passes(Part("one", attentions=(work,)), split, precision=precision, is_fused=reason != "software")[0]
    assert there.attention[0] == 0
    parts, item = (2 if reason == "split" else 1), (4 if reason == "precision" else 2)
    assert there.flops[0] == pytest.approx(4 * 4 * HEADS * LENGTH**2 * FEATURES / parts)
    assert there.touched[0] == pytest.approx(5 * 4 * HEADS * LENGTH**2 * item / parts / MEMORY)


@pytest.mark.parametrize("share", [1.0, 9 / 16])
def test_a_ring_makes_scores_again_and_leaves_out_what_a_mask_does(share: float) -> None:
    split = WorkSplit({"position": ("sequence",)}, {"sequence": 4}, ((),), (0,))
    place = np.array([PRECISIONS.index("bfloat16")])
    computing = Computing(CARD, Calibration("test", cores=CORES), split, np.ones(1), np.ones(1), place)
    part = Part("one", attentions=(ATTENTION,))
    kept, kept_back, _ = computing.passes(part)
    there, back, _ = computing.passes(part, (RingWork(share, 1),))
    assert there.flops[0] == pytest.approx(share * kept.flops[0])
    # Of two products forward and four backward, the first once more; and of scores, 3 passes over memory of 5 and 10.
    assert back.flops[0] == pytest.approx(share * kept_back.flops[0] * 5 / 4)
    assert back.touched[0] == pytest.approx(share * kept_back.touched[0] * 13 / 10)
    halves, _, _ = computing.passes(part, (RingWork(share, 8),))
    assert halves.flops[0] == pytest.approx(there.flops[0])
    assert halves.thin[0] > there.thin[0], "chunks that are thinner than heads are wide"


def test_elementwise_operations_move_their_bytes_once_forward_and_twice_backward() -> None:
    dims = (("batch", 4), ("position", 1000))
    part = Part("one", touched=(NamedTensor(dims, 4, times=3), NamedTensor(dims, 4, is_computed=False)))
    there, back = passes(part, share=2)
    assert there.touched[0] == pytest.approx((3 * 2 + 4) * 2000 / MEMORY)
    assert back.touched[0] == 2 * there.touched[0]
    assert passes(part, precision="float32")[0].touched[0] == pytest.approx((3 * 4 + 4) * 4000 / MEMORY)
