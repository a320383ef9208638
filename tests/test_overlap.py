"""Micro-batches that are computed several at a time: what a step then moves, keeps and waits for."""

import re

import jax
import pytest
from large import ROWS, audited, program_of, waited_for

from cjax.audit import Audit

# -- compiled for the devices that are here ---------------------------------------------------------------------------
SMALL = (64, 3, 16, "")


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=2 tensor=4 zero=1", "data=4 tensor=2 zero=3"])
def test_moves_what_micro_batches_move(plan: str) -> None:
    """But for ZeRO-3, which gathers a layer's weights once for all that are computed at a time. XLA for GPUs adds up
    their gradients before it reduces them, and that for CPUs does not."""
    alone, _, _ = audited("own", f"{plan} microbatches=2", *SMALL)
    both, _, _ = audited("own", f"{plan} microbatches=2 overlap=2", *SMALL)

    def by_axis(facts: Audit) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for each in facts.collectives:
            if each.bytes >= 256:  # not losses and norms, a few numbers each
                key = each.kind, each.axis
                found[key] = found.get(key, 0.0) + each.total_bytes
        return found

    wanted, found = by_axis(alone), by_axis(both)
    assert found[("all-reduce", "tensor")] == pytest.approx(wanted[("all-reduce", "tensor")], rel=1e-3)
    gathers = 2 if "zero=3" in plan else 1
    for kind, fewer in (("all-gather", gathers), ("all-reduce", 1), ("reduce-scatter", 1)):
        size = wanted.get((kind, "data"), 0.0) / fewer
        assert found.get((kind, "data"), 0.0) == pytest.approx(size, rel=0.02)
    assert any(axis == "data" and size > 0 for (_, axis), size in wanted.items())


def test_all_layers_are_in_one_loop_each_way() -> None:
    _, _, alone = audited("own", "data=2 tensor=4 zero=1 microbatches=2", *SMALL)
    _, _, both = audited("own", "data=2 tensor=4 zero=1 microbatches=2 overlap=2", *SMALL)
    loops = [len(re.findall(r" while\(", text)) for text in (alone, both)]
    assert loops == [3, 2]  # over micro-batches and in it over layers, forwards and backwards; without the first


def test_says_where_there_is_nothing_to_hide() -> None:
    notes = [program_of("own", f"{plan} microbatches=2 overlap=2", *SMALL[:3], jax.devices()[:4])._composed.notes
             for plan in ("data=4 zero=1", "data=2 tensor=2")]  # fmt: skip
    assert [any("no tensor parallelism" in note for note in each) for each in notes] == [True, False]


# -- compiled for cards that are not here -----------------------------------------------------------------------------
LARGE = (2048, 4, 2048, "h100:8")


@pytest.mark.aot
@pytest.mark.full("gpt", "post")
@pytest.mark.parametrize("name", ["gpt", "own", "post"])
def test_hides_what_a_layer_waits_for(name: str) -> None:
    """Of the time that transfers take, about a quarter at most has nothing beside it (JAX 0.12: 27 % of this GPT): a
    half or more without, and a third or more if nobody waits. No more is moved, and no more memory needed."""
    share, moved, peak = {}, {}, {}
    for words in ("", " microbatches=2 overlap=2"):
        facts, devices, _ = audited(name, f"tensor=8 precision=bfloat16{words}", *LARGE)
        transfer, exposed = waited_for(facts, devices)
        assert facts.memory is not None
        share[words], moved[words], peak[words] = exposed / transfer, facts.moved(), facts.memory.peak
    (alone, both), (before, after), (least, most) = share.values(), moved.values(), peak.values()
    assert 0.45 < alone and 0 < both <= 0.28, share
    assert after == pytest.approx(before, rel=0.01) and most <= 1.03 * least


@pytest.mark.aot
def test_each_product_is_one_of_its_own() -> None:
    """XLA would multiply both micro-batches by a weight at once where products are small, and neither could wait."""
    _, _, text = audited("own", "tensor=8 precision=bfloat16 microbatches=2 overlap=2", *LARGE)
    assert "xla_gpu_dot_merger" not in text
    rows = ROWS * LARGE[2] // 2
    assert f"bf16[{rows}," in text and f"bf16[{2 * rows}," not in text
