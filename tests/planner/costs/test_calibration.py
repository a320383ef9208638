"""Constants by card: which, from where, and how sure."""

import dataclasses

import pytest

from cjax.cards import CARDS
from cjax.planner.costs.calibration import FITTED, MEASURED_SPREAD, calibration_of
from cjax.planner.hardware import Hardware


def hardware(kind: str, flops: float | None = 312e12, memory: float | None = 2e12) -> Hardware:
    return Hardware(kind, 8, 8, 2**36, memory_bandwidth=memory, bf16_flops=flops, f16_flops=flops)


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H100"), ("Tesla V100-SXM2-16GB", "V100"), ("NVIDIA A800-SXM4-80GB", "A100"),
    ],
)  # fmt: skip
def test_a_card_has_its_chips_constants(kind: str, chip: str) -> None:
    found = calibration_of(hardware(kind))
    assert found is not None and found.matmul == FITTED[f"matmul {chip}"]
    assert chip in found.source and "published runs" in found.source


def test_where_it_comes_from_says_how_sure_it_is() -> None:
    """The card itself, the same chip with other memory, a card without a run."""
    kinds = ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090"]
    found = [calibration_of(hardware(kind)) for kind in kinds]
    spreads = [each.spread for each in found if each is not None]
    assert len(spreads) == 3 and spreads == sorted(set(spreads))
    assert found[2] is not None and "no published run on NVIDIA GeForce RTX 4090" in found[2].source


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090"])
def test_one_device_alone_begins_a_step_sooner(kind: str) -> None:
    one, eight = (calibration_of(dataclasses.replace(hardware(kind), num_devices=num)) for num in (1, 8))
    assert one is not None and eight is not None
    assert (one.step, eight.step) == (2e-3, 1e-2)
    assert dataclasses.replace(one, step=eight.step) == eight


def test_every_card_has_some() -> None:
    for card in CARDS.values():
        flops = card.bf16_flops or card.f16_flops
        found = calibration_of(hardware(card.kind, flops, card.memory_bandwidth))
        assert found is not None and 0 < found.matmul <= 1 and card.chip is not None or found is not None


def test_no_constants_where_no_rates_are_known() -> None:
    assert calibration_of(Hardware("cpu", 8, 8, 2**33)) is None
    assert calibration_of(hardware("cpu", None, 1e11)) is None


def test_shares_are_shares() -> None:
    """Else a bound would be none."""
    found = calibration_of(hardware("NVIDIA A100-SXM4-80GB"))
    assert found is not None
    names = ("matmul", "attention", "memory", "links", "adapters", "hidden_data", "hidden_gather", "hidden_tensor",
             "hidden_pipeline", "overlapped")  # fmt: skip
    for name in names:
        assert 0 < getattr(found, name) <= 1, name
    assert found.factor * found.matmul <= 1
    assert {field.name for field in dataclasses.fields(found)}.issuperset(names)


def test_a_step_that_took_longer_makes_all_others_longer() -> None:
    found = calibration_of(hardware("NVIDIA A100-SXM4-80GB"))
    assert found is not None
    slower = found.measured(2.0, "a step that ran")
    assert slower.factor == found.factor / 2 and slower.source == "a step that ran"
    assert slower.spread == MEASURED_SPREAD < found.spread
