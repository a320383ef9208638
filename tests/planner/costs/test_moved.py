"""Bytes by axis, as arithmetic has them, against those of compiled steps.

`audited.json` has what `cjax.audit` read from programs that XLA compiled for eight H100s: bytes a device receives in a
step, by mesh axes. `python tests/planner/costs/test_moved.py` makes it anew, for two hours on two cores; of some pairs,
`... test_moved.py "wide gpt" sequence=gather`. The wide ones are of the widths, vocabularies and lengths that people
train, and in bfloat16; what a table or a loss moves is nothing beside small ones' layers.
"""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from reading_cases import MODELS, PAIRS, SEQ, TEXT, WIDE_PAIRS, captured

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.models import Llama, llama_loss
from cjax.models.llama import LlamaConfig
from cjax.plan import Plan
from cjax.planner.costs.moved import moved
from cjax.planner.costs.transformer import Decoder, split_of_decoder, work_of_decoder
from cjax.planner.reading.readings import Readings
from cjax.planner.table import PlanTable
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

LADDERS = Path(__file__).parents[3] / "docs/results/auto-ladder-2026-11-23.log"
MEDIUM = Decoder(24, 1024, 16, 50257)
AUDITED = Path(__file__).parent / "audited.json"
ANEW = (
    ("own", "data=8 zero=3"), ("bert", "data=2 tensor=2d:4"),
    ("wide tied", "data=2 tensor=4 sequence=gather precision=bfloat16"),
    ("gpt", "data=2 tensor=4 zero=1"), ("gpt", "data=8 zero=1 precision=bfloat16"), ("gpt", "data=8 zero=3/4"),
    ("t5", "data=8 zero=1"),
    ("wide gpt", "data=2 tensor=2d:4 precision=bfloat16"),
    ("wide t5", "data=2 sequence=all_to_all:4 precision=bfloat16"),
    ("wide llama", "data=8 zero=3/4 precision=bfloat16"),
    ("llama", "data=2 sequence=ring:2 pipeline=1f1b:2 microbatches=4 zero=1 precision=bfloat16"),
)  # fmt: skip


@functools.cache
def read(name: str) -> Readings:
    return Readings(TraceSource(captured(name), MODELS[name].batch))


def predicted(name: str, text: str) -> dict[str, float]:
    """Bytes by axes, as the audit has them."""
    plan = Plan.parse(text)
    readings = read(name)
    found = moved(readings.work(plan), readings.split(plan), PlanTable.of([plan])).by_axis()
    return {axes: float(amount[0]) for axes, amount in found.items()}


def compiled(name: str, plan: str) -> dict[str, float]:
    model = MODELS[name]
    program = cjax.parallelize(model.build, model.loss, optax.adamw(1e-3), model.batch, plan, devices="h100:8")
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    return facts.moved_by_axis()


def assert_close(mine: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    """Within 2 % along each axis, but for what is one percent of all."""
    least = 0.01 * sum(theirs.values())
    for axes in {*mine, *theirs}:
        assert mine.get(axes, 0.0) == pytest.approx(theirs.get(axes, 0.0), rel=0.02, abs=least), axes
    assert sum(mine.values()) == pytest.approx(sum(theirs.values()), rel=0.02)


@pytest.mark.parametrize(("name", "plan"), PAIRS + WIDE_PAIRS)
def test_bytes_by_axis_are_the_audits(name: str, plan: str) -> None:
    assert_close(predicted(name, plan), json.loads(AUDITED.read_text())[f"{name} {plan}"])


@pytest.mark.parametrize("plan", [plan for name, plan in PAIRS if name == "switch" and "expert" not in plan])
def test_who_is_sent_where_is_counted_to_a_fraction_of_a_percent(plan: str) -> None:
    """Masks and gates are 3 % of what this mixture moves, and a gate's gradient alone is half a percent."""
    theirs = json.loads(AUDITED.read_text())[f"switch {plan}"]
    assert sum(predicted("switch", plan).values()) == pytest.approx(sum(theirs.values()), rel=0.0025)


@pytest.mark.aot
@pytest.mark.full(*(f"{name}-{plan}" for name, plan in ANEW[3:]))
@pytest.mark.parametrize(("name", "plan"), ANEW)
def test_some_are_compiled_anew(name: str, plan: str) -> None:
    assert_close(predicted(name, plan), compiled(name, plan))


def test_scanned_layers_go_to_the_optimizer_where_stages_have_unlike_numbers_of_them() -> None:
    """GPT-2 medium's head is worth three layers: stages have 7, 7, 7 and 3, the optimizer 6 on each device.

    The compiled step is of a time when that was so of all layers.
    """
    rows = map(json.loads, LADDERS.read_text().splitlines())
    row = next(row for row in rows if row["part"] == "compiled" and "zero_bubble:4" in row["plan"])
    plan, alone = Plan.parse(row["plan"]), work_of_decoder(MEDIUM, row["rows"], row["tokens"])
    assert not moved(alone, split_of_decoder(MEDIUM, alone), PlanTable.of([plan])).layers, "each with leaves of its own"
    scanned = [replace(part, weights=tuple(replace(w, is_scanned=True) for w in part.weights)) for part in alone.parts]
    work = replace(alone, parts=tuple(scanned))
    found = moved(work, split_of_decoder(MEDIUM, work), PlanTable.of([plan]))
    messages, layers = found.pipeline["pipe"][0] / 2**30, found.layers["pipe"][0] / 2**30
    table = 2 * 3 / 4 * 4 * MEDIUM.vocab * MEDIUM.hidden / 2**30  # its gradient, over the stages
    assert layers == pytest.approx(7 * 3 * 4 * MEDIUM.layer_parameters / 2**30), (
        "gradients, parameters, state; and back"
    )
    assert messages + layers + table == pytest.approx(row["GiB moved"]["pipe"], rel=0.02)
    even = moved(work, split_of_decoder(MEDIUM, work), PlanTable.of([Plan.parse("data=2 pipeline=2 microbatches=16")]))
    assert not even.layers, "of two stages both have twelve"
    together = moved(work, replace(split_of_decoder(MEDIUM, work), in_lockstep=True), PlanTable.of([plan]))
    assert not together.layers, "stages that all run the head have as many layers each"


@functools.cache
def few_heads() -> Readings:
    """Two heads of keys for eight heads of queries."""
    config = LlamaConfig(**TEXT, num_kv_heads=2, head_dim=16, context=SEQ)
    batch = MODELS["llama"].batch
    return Readings(TraceSource(capture(lambda rngs: Llama(config, rngs=rngs), llama_loss, batch), batch))


@pytest.mark.parametrize(
    ("text", "audited"),
    [("data=1 tensor=8 precision=bfloat16", 13194289), ("data=1 tensor=8 remat=block", 26891313),
     ("data=1 tensor=8 precision=bfloat16 remat=block", 13456433), ("data=2 tensor=4", 11281450)],
)  # fmt: skip
def test_few_heads_of_keys_have_scores_gathered_or_queries_where_layers_are_made_again(text: str, audited: int) -> None:
    """As the audit of these steps, compiled for eight H100s, has it."""
    plan = Plan.parse(text)
    found = moved(few_heads().work(plan), few_heads().split(plan), PlanTable.of([plan])).by_axis()
    assert float(found["tensor"][0]) == pytest.approx(audited, rel=0.002)


def test_a_fault_shows() -> None:
    """Twice the gradients of a tied table, or a gather that nobody counts, is more than the tolerance."""
    theirs = json.loads(AUDITED.read_text())["gpt data=8 zero=3"]
    mine = predicted("gpt", "data=8 zero=3")
    for wrong in (1.03, 0.97):
        with pytest.raises(AssertionError):
            assert_close({axes: wrong * amount for axes, amount in mine.items()}, theirs)


@pytest.mark.parametrize("words", ["tensor=2", "sequence=ring:2"])
def test_a_table_of_plans_is_its_plans_one_by_one(words: str) -> None:
    texts = ["data=8", "data=4 zero=1 microbatches=2", "data=4 zero=3/2", "data=2 pipeline=2 microbatches=4",
             "data=8 zero=2 precision=bfloat16", "data=2 pipeline=2 microbatches=8 zero=3",
             "data=2 remat=block pipeline=interleaved:2/2 microbatches=4"]  # fmt: skip
    plans = [Plan.parse(f"{words} {text}") for text in texts]
    work, split = read("gpt").work(plans[0]), read("gpt").split(plans[0])
    together = moved(work, split, PlanTable.of(plans)).by_axis()
    for at, plan in enumerate(plans):
        alone = moved(work, split, PlanTable.of([plan])).by_axis()
        for axes, amount in together.items():
            np.testing.assert_allclose(amount[at], alone.get(axes, [0.0])[0], err_msg=f"{plan}: {axes}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    known = json.loads(AUDITED.read_text()) if AUDITED.exists() else {}
    for pair in PAIRS + WIDE_PAIRS:
        if not sys.argv[1:] or any(asked in " ".join(pair) for asked in sys.argv[1:]):
            known[" ".join(pair)] = compiled(*pair)
            AUDITED.write_text(json.dumps(known, indent=1) + "\n")
            print(*pair, flush=True)
