"""Cards by name: what their datasheets say, and how the compiler is told about them."""

import re

import pytest

from cjax.cards import CARDS, card_of_kind


def test_an_h200_is_an_h100_with_more_and_faster_memory() -> None:
    h100, h200 = CARDS["h100"], CARDS["h200"]
    assert h200.memory > 1.6 * h100.memory and h200.memory_bandwidth > 1.4 * h100.memory_bandwidth
    assert h200.bf16_flops == h100.bf16_flops and card_of_kind(h200.kind) is h200


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.is_compilable])
def test_the_compiler_is_told_what_the_datasheet_says(name: str) -> None:
    card = CARDS[name]
    assert (chip := card.chip) is not None
    told = dict(re.findall(r"(\w+): (\d+)", card.xla_target()))
    wanted = {
        "core_count": chip.cores, "fpus_per_core": chip.units_per_core, "device_memory_size": card.memory,
        "memory_bandwidth": int(card.memory_bandwidth), "l2_cache_size": chip.l2_cache,
        "shared_memory_per_core": chip.shared_memory, "shared_memory_per_block_optin": chip.shared_memory_optin,
        "threads_per_core_limit": chip.threads_per_core, "active_links": chip.nvlinks,
    }  # fmt: skip
    assert {field: int(told[field]) for field in wanted} == wanted


def test_unknown_kinds_are_no_card() -> None:
    assert card_of_kind("cpu") is None


def test_figures_of_a_card_agree_with_each_other() -> None:
    """A slip of a factor of a thousand, two or eight would show here."""
    assert len({card.kind for card in CARDS.values()}) == len(CARDS)
    for name, card in CARDS.items():
        assert card.name == name and card_of_kind(card.kind) is card
        assert 15 * 2**30 < card.memory < 150 * 2**30 and 0.25e12 < card.memory_bandwidth < 5e12
        half = card.bf16_flops or card.f16_flops
        assert half and card.f16_flops and card.f32_flops < half < 20 * card.f32_flops
        assert card.tf32_flops is None or half / 2.1 < card.tf32_flops <= half / 1.9
        assert card.host_bandwidth < card.memory_bandwidth and 70 < card.power <= 700 and (card.price or 1) < 4
        assert card.network_bandwidth * card.adapters_per_host <= card.host_bandwidth * card.cards_per_host
        if (chip := card.chip) is not None:
            # Two operations a clock in each float32 unit. Datasheets of some server cards count a lower clock.
            peak = 2 * chip.cores * chip.units_per_core * chip.clock_ghz * 1e9
            assert 0.7 * peak < card.f32_flops < 1.06 * peak, name
