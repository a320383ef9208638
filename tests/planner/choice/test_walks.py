"""Plans that walk over layers, by arithmetic: their rows against the model's own sizes."""

import dataclasses

import jax
import optax
import pytest
import small_gpt
from remembered import ahead_loss
from small_gpt import EMBED, LAYERS, MLP, ROWS, SEQ, TOKENS, VOCAB

from cjax.machines import Cluster
from cjax.models import GPT, T5, loss, t5
from cjax.plan import Auto, Plan
from cjax.planner.choice.homes import TooLittle
from cjax.planner.choice.planning import Planning
from cjax.planner.choice.walks import row_sizes, score_walk, walks_in
from cjax.planner.hardware import hardware_of_cluster
from cjax.planner.homes import Kind, Peaks, RowBytes, RowSizes
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

LAYER = 4 * (4 * (EMBED * EMBED + EMBED) + 2 * EMBED * MLP + EMBED + MLP + 4 * EMBED)  # float32
OUTSIDE = 4 * (EMBED * (VOCAB + SEQ) + 2 * EMBED)


@pytest.fixture(scope="module")
def planning() -> Planning:
    captured = capture(lambda rngs: GPT(small_gpt.CONFIG, rngs=rngs), loss, TOKENS)
    # Two hosts of two cards each.
    cluster = Cluster.parse("h100/node=2")
    return Planning(TraceSource(captured, TOKENS), optax.adam(1e-3), lambda num: hardware_of_cluster(cluster, num))


def rows(planning: Planning, text: str, num_devices: int = 4) -> tuple[RowSizes, Peaks]:
    plan = Plan.parse(text).resolve(num_devices)
    question = planning.question
    split = question.split(dataclasses.replace(plan, data=1, zero=0, microbatches=1))
    return row_sizes(question.work(plan), split, plan, question.hardware_at(num_devices))


def test_rows_are_the_models_own(planning: Planning) -> None:
    sizes, peaks = rows(planning, "data=1", 1)
    stream = ROWS * SEQ * EMBED * 4
    wanted: list[tuple[Kind, int]] = [("params", LAYER), ("opt", 2 * LAYER), ("grads", LAYER), ("inputs", stream)]
    for kind, size in wanted:
        assert sizes[kind] == ((sizes[kind][0][0],) * LAYERS,)
        assert sizes[kind][0][0] == pytest.approx([size] * 3, rel=0.01)
    assert "frozen" not in sizes
    batch = 2 * ROWS * SEQ * 4
    assert peaks.outside == pytest.approx(4 * OUTSIDE + batch, rel=0.01)
    assert min(peaks.backward, peaks.after) > 2 * stream


@pytest.mark.full
def test_what_passes_all_layers_of_a_decoder_stays_on_the_device() -> None:
    """Keys and values that are made of the encoder's text for all layers, before the first: they are in no layer's row,
    and there for each micro-batch."""
    config = t5("t5-mini", num_layers=4)
    ids = jax.ShapeDtypeStruct((ROWS, SEQ), "int32")
    batch = {"inputs": ids, "targets": ids, "source": ids}
    source = TraceSource(capture(lambda rngs: T5(config, rngs=rngs), ahead_loss, batch), batch)
    found = Planning(source, optax.adam(1e-3), lambda num: hardware_of_cluster(Cluster.parse("h100"), num))
    stream, inner = ROWS * SEQ * config.embed_dim * 4, ROWS * SEQ * config.num_heads * config.head_dim * 4
    outside = {}
    for num in (1, 2):
        sizes, peaks = rows(found, f"microbatches={num}", 1)
        assert [each[0].device for each in sizes["inputs"]] == [stream, stream]
        passing, handed = config.num_layers * 2 * inner, stream
        outside[num] = peaks.outside - passing - handed
        assert min(peaks.after, peaks.backward) > passing + 2 * stream
    assert outside[1] == outside[2] > 0


@pytest.mark.parametrize(
    ("plan", "kind", "shares", "on_disk"),
    [
        ("data=4", "params", 1, 1),  # both devices of a host have the same, which is on disk once
        ("zero=1", "params", 1, 1),
        ("zero=1", "opt", 4, 2),
        ("zero=1", "grads", 4, 2),
        ("zero=3", "params", 4, 2),
        ("zero=3/2", "params", 2, 2),
        ("tensor=2", "opt", 2, 2),
        ("tensor=2", "inputs", 2, 2),  # whole on both that share a matmul; two copies of the model share the batch
        ("microbatches=4", "inputs", 4, 2),  # all parts of the batch
    ],
)
def test_who_has_what(planning: Planning, plan: str, kind: str, shares: int, on_disk: int) -> None:
    whole: RowBytes = rows(planning, "data=1", 1)[0][kind][0][0]  # pyright: ignore
    row: RowBytes = rows(planning, plan)[0][kind][0][0]  # pyright: ignore
    assert row.device == pytest.approx(whole.device / shares, rel=0.02)
    assert row.host == 2 * row.device and row.disk == on_disk * row.device


def test_a_larger_budget_is_never_slower_and_a_small_one_says_what_would_do(planning: Planning) -> None:
    plan = Plan.parse("zero=3 precision=bfloat16").resolve(4)
    with pytest.raises(TooLittle, match="budget=1KiB is less than a device needs") as raised:
        score_walk(planning.question, dataclasses.replace(plan, budget=1024))
    least = 1024 + raised.value.missing
    found = [score_walk(planning.question, dataclasses.replace(plan, budget=int(least * more))) for more in (1, 1.2, 2)]
    for one, other in zip(found, found[1:], strict=False):
        assert one.cost.total is not None and other.cost.total is not None and one.cost.total >= other.cost.total
    for each in found:
        assert each.plan.budget is not None and each.occupied.peak <= each.plan.budget
        assert each.tokens == ROWS * SEQ and each.mfu is not None and 0 < each.mfu < 1
    assert sum(found[0].occupied.host.values()) > 0 == sum(found[-1].occupied.host.values())


@pytest.mark.parametrize("text", ["auto", "auto microbatches=2 precision=bfloat16", "auto zero=1", "auto remat=dots"])
def test_the_plans_of_a_space_can_walk(planning: Planning, text: str) -> None:
    auto = Auto.parse(text)
    plans = walks_in(planning.space(auto, 4), 4)
    assert plans and len(set(plans)) == len(plans)
    for plan in plans:
        walk = dataclasses.replace(plan, budget=2**30)  # does not clash
        assert walk.num_devices == 4 and all(getattr(plan, name) == value for name, value in auto.fixed.items())
        assert "zero" in auto.fixed or plan.zero_stage == (3 if plan.data * plan.sequence.size > 1 else 0)


def test_what_a_model_can_not_be_split_into_is_said(planning: Planning) -> None:
    plan = Plan.parse("tensor=3 budget=1GiB").resolve(3)
    with pytest.raises(ValueError, match="tensor"):
        score_walk(planning.question, plan)
    assert jax.default_backend() == "cpu"  # nothing of this needs the cards
