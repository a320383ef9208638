"""Cards by name: how many hosts they fill, and how the compiler is told about them."""

import re

import pytest

from cjax.cards import CARDS, card_of_kind


@pytest.mark.parametrize(("num", "topology"), [(1, "1x1x1"), (5, "1x1x5"), (8, "1x1x8"), (16, "2x1x8"), (64, "8x1x8")])
def test_cards_fill_hosts(num: int, topology: str) -> None:
    assert CARDS["h100"].xla_topology(num) == topology


@pytest.mark.parametrize(("num", "instead"), [(0, "h100:8"), (12, "h100:8 or h100:16"), (20, "h100:16 or h100:24")])
def test_hosts_in_part_are_refused(num: int, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"{instead}\."):
        CARDS["h100"].xla_topology(num)


def test_an_h200_is_an_h100_with_more_and_faster_memory() -> None:
    h100, h200 = CARDS["h100"], CARDS["h200"]
    assert h200.memory > 1.6 * h100.memory and h200.memory_bandwidth > 1.4 * h100.memory_bandwidth
    assert h200.bf16_flops == h100.bf16_flops and card_of_kind(h200.kind) is h200


@pytest.mark.parametrize("name", CARDS)
def test_the_compiler_is_told_what_the_datasheet_says(name: str) -> None:
    card = CARDS[name]
    told = dict(re.findall(r"(\w+): (\d+)", card.xla_target()))
    wanted = {
        "core_count": card.cores, "fpus_per_core": card.units_per_core, "device_memory_size": card.memory,
        "memory_bandwidth": int(card.memory_bandwidth), "l2_cache_size": card.l2_cache,
        "shared_memory_per_core": card.shared_memory, "shared_memory_per_block_optin": card.shared_memory_optin,
        "active_links": card.nvlinks,
    }  # fmt: skip
    assert {field: int(told[field]) for field in wanted} == wanted


def test_unknown_kinds_are_no_card() -> None:
    assert card_of_kind("cpu") is None
