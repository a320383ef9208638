"""Whether a model can be trained beside host memory and disk: the table, and what is missing where it can't."""

import re
from typing import Any

import jax
import optax
import pytest
import small_gpt

from cjax.models import GPT, loss
from cjax.plan import Plan
from cjax.planner.choice.homes import TooLittle
from cjax.program.walks import _nothing, walk_plans

CALL: Any = (lambda rngs: GPT(small_gpt.CONFIG, rngs=rngs), loss, optax.adam(1e-3), small_gpt.TOKENS)


def least(target: str, plan: str = "zero=3") -> str:
    """The smallest budget, as the refusal of one that is too small names it."""
    with pytest.raises(ValueError, match="less than a device needs") as raised:
        walk_plans(CALL, target, "1KiB", plan=plan)
    found = re.search(r"write budget=(\w+)", str(raised.value))
    assert found is not None
    return found[1]


def test_the_fastest_come_first_with_what_they_hold_and_move() -> None:
    found = walk_plans(CALL, "h100:2", "2MiB", "4MiB", "8MiB", plan="auto precision=bfloat16", top=3)
    times = [each.use.seconds or 0.0 for each in found.plans]
    assert len(times) == 3 and 0 < times[0] and times == sorted(times)
    assert found.num_fitting <= found.num_plans and found.shared == "budget=2MiB host=4MiB disk=8MiB"
    for each in found.plans:
        assert "precision=bfloat16" in each.plan and "budget" not in each.plan
        assert each.use.peak <= 2 * 2**20 and each.use.total("host") <= 4 * 2**20
        assert each.use.total("disk") <= 8 * 2**20
    text = str(found)
    assert text.startswith("on      2 x NVIDIA H100 80GB HBM3\nof ")
    for label in ("best", "holds", "homes", "link", "walk", "note"):
        assert re.search(rf"^{label} ", text, re.MULTILINE)
    assert "nothing of it was compiled" in re.sub(r"\s+", " ", text) and max(map(len, text.splitlines())) <= 100


def test_an_update_counts_as_the_run_makes_it() -> None:
    """Adam's in the backward pass where there is room, of layers on disk; with clipping in the next forward pass, with
    gradients on disk twice; and where devices or disk have no room for that, in a pass of its own."""
    clipped = (*CALL[:2], optax.chain(optax.clip_by_global_norm(1.0), CALL[2]), CALL[3])
    plan = "zero=3 offload=params+optimizer+gradients"

    def use(call: Any, budget: str, disk: str = "100MiB") -> Any:
        return walk_plans(call, "h100:2", budget, "0B", disk, plan=plan).best.use

    def grads(use: Any) -> Any:
        return next(each for each in use.classes if each.name == "gradients")

    fused, little, much = use(CALL, "8MiB"), use(CALL, least("h100:2")), use(clipped, "8MiB")
    assert fused.phases["update"].disk == much.phases["update"].disk == 0 < little.phases["update"].disk
    assert not grads(fused).disk_written and grads(much).disk_written > 0 and grads(much).disk == 2 * grads(little).disk
    last = use(clipped, "8MiB", f"{much.total('disk') - grads(much).disk // 2}B")
    assert 2 * grads(last).disk == grads(much).disk and last.phases["update"].disk > 0
    assert last.total("disk_read") > much.total("disk_read") > fused.total("disk_read")
    for each in (fused, little, much, last):
        assert any(of.name == "the rest" and of.disk_written for of in each.classes), "is committed with each step"


def test_an_optimizer_that_no_walk_can_be_had_of_is_refused() -> None:
    def mixed(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(updates)
        like = [[other for other in leaves if other.shape == leaf.shape][-1] for leaf in leaves]
        return jax.tree.unflatten(tree, like), state

    across = optax.GradientTransformation(lambda params: optax.EmptyState(), mixed)
    with pytest.raises(ValueError, match="The optimizer puts together what belongs to several layers"):
        walk_plans((*CALL[:2], across, CALL[3]), "h100:2", "1MiB")


def test_all_of_a_device_where_nobody_says_how_much() -> None:
    found = walk_plans(CALL, "h100:1/memory=20GiB", host="1GiB", plan="microbatches=2")
    assert found.shared == "budget=18GiB host=1GiB" and found.num_plans == 1
    assert found.best.use.total("link_in") == 0 and "nothing leaves the devices" in str(found)


@pytest.mark.full
def test_devices_of_unknown_rates_have_sizes_and_no_time() -> None:
    found = walk_plans(CALL, "cpu:2", least("cpu:2"), plan="zero=3")
    assert found.best.use.seconds is None and found.best.use.total("host") and "time unknown" in str(found)


@pytest.mark.full(
    "arguments0-options0-none of \\\\d+ plans fits. '.*' comes nearest: budget=1KiB is less .* write budget=\\\\w+",
    "arguments1-options1-host=1KiB takes them in part; write host=\\\\w+, or host=1KiB disk=",
    "arguments2-options2-the plan does not fit: .* disk=1KiB is .* less",
)
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1KiB",), {}, r"none of \d+ plans fits. '.*' comes nearest: budget=1KiB is less .* write budget=\w+"),
        (("LEAST", "1KiB"), {"plan": "zero=3"}, r"host=1KiB takes them in part; write host=\w+, or host=1KiB disk="),
        (("LEAST", "1KiB", "1KiB"), {"plan": "zero=3"}, r"the plan does not fit: .* disk=1KiB is .* less"),
        (("2MiB",), {"plan": "zero=3 budget=1GiB"}, "budget is in the plan and is an argument too"),
        (("2MiB",), {"plan": "auto pipeline=2"}, "write zero=3, which shares out layers too"),
        (("2MiB",), {"plan": "auto budget=1GiB"}, "does not go behind auto"),
        (("2 MiB",), {}, "write budget=16GiB, without a space"),
        (("2MiB", None, "1GiB"), {}, "host=64GiB disk=1GiB"),
    ],
)
def test_what_is_missing_is_said(arguments: Any, options: Any, message: str) -> None:
    arguments = [least("h100:2") if each == "LEAST" else each for each in arguments]
    with pytest.raises(ValueError, match=message):
        walk_plans(CALL, "h100:2", *arguments, **options)


def test_of_what_is_missing_the_least_is_said_and_room_before_a_budget() -> None:
    plans = [Plan(data=8, zero=stage) for stage in (0, 1, 2, 3)]
    errors = [("far", "room", 900), ("near", "room", 5), ("nearer, of another kind", "budget", 1), ("none", "", 0)]
    refused = [
        (plan, TooLittle(text, what, missing) if what else ValueError(text))  # type: ignore[arg-type]
        for plan, (text, what, missing) in zip(plans, errors, strict=True)
    ]
    assert _nothing(plans, refused) == "none of 4 plans fits. 'data=8 zero=1' comes nearest: near"
    assert _nothing(plans[:1], refused[:1]) == "the plan does not fit: far"
    assert _nothing(plans, refused[3:]) == "no plan can be had; 'data=8 zero=3': none"


def test_a_number_of_cards_is_needed() -> None:
    with pytest.raises(ValueError, match="write h100:8"):
        walk_plans(CALL, "h100", "2MiB")
