"""Mixtures of experts under plans that share experts out among data-parallel devices: as their authors train them, what
a device holds, what is exchanged, and what is refused."""

import functools
import math
import os
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import SUBJECTS, assert_trained_alike, begun, on_host, program_of, source_of, subject
from mixtures import Grouped, Merged
from zoo import BATCH, TEXT, case, linen, next_token
from zoo_linen import EMBED, SEQ, MoEDecoder

import cjax
from cjax.audit import audit
from cjax.machines import Cluster
from cjax.plan import Auto, Plan
from cjax.planner.choice.planning import Asked, Planning
from cjax.planner.choice.scored import Scored
from cjax.planner.choice.walks import walks_in
from cjax.planner.hardware import hardware_of_cluster
from cjax.tree import leaf_names

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
SUBJECTS |= {
    "grouped": case("linen", linen(MoEDecoder, 0, Grouped), next_token, **TEXT, blocks=(3,)),
    "dropped": case(
        "linen", linen(MoEDecoder, 0, functools.partial(Grouped, rate=0.2)), next_token, **TEXT, blocks=(3,)
    ),
    "merged": case("linen", linen(MoEDecoder, 0, Merged), next_token, **TEXT, blocks=(3,)),
}
PAIRS = [
    ("linen_moe_capacity", "expert=4 zero=2"),
    ("dropped", "expert=4 tensor=2 zero=3 remat=block"),
    ("merged", "expert=2 zero=1 microbatches=2"),
]
MORE = [
    *(("grouped", f"expert={size}{zero}") for size in (2, 4) for zero in ("", " zero=1", " zero=2", " zero=3")),
    ("grouped", "expert=4 microbatches=2 zero=3"),
    ("grouped", "expert=2 pipeline=1f1b:2 microbatches=4"),
    ("grouped", "expert=4 pipeline=gpipe:2 microbatches=2 zero=1"),
    ("grouped", "expert=2 sequence=ring:2"),
    ("grouped", "expert=2 sequence=all_to_all:2 zero=1"),
    ("grouped", "expert=2 tensor=2 sequence=gather"),
    ("grouped", "expert=2 tensor=4"),
    ("grouped", "expert=2 tensor=2 microbatches=4 overlap=2"),
    ("grouped", "expert=4 remat=dots"),
    ("grouped", "expert=4 unroll=layers"),
    *(("merged", f"expert={size}") for size in (2, 4)),
    ("merged", "expert=2 tensor=2 zero=2"),
    ("merged", "expert=4 tensor=2 remat=block"),
    ("grouped", "expert=4 tensor=2 zero=3 remat=block"),
    ("dropped", "expert=4 tensor=2 zero=1"),
    ("dropped", "expert=2 remat=block"),
    ("linen_moe_capacity", "expert=2"),
    ("linen_moe_capacity", "expert=4 tensor=2 zero=1"),
    ("linen_moe_capacity", "expert=2 zero=3 remat=block"),
    ("linen_moe_capacity", "expert=2 microbatches=2 loss=microbatch"),
]


@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *MORE] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


def is_expert(path: str) -> bool:
    return bool(re.search(r"(Grouped|Merged)_\d/(up|down|bias)$", path))


@pytest.mark.full("expert=2", "expert=4 zero=3")
@pytest.mark.parametrize("plan", ["expert=2", "expert=4 zero=1", "expert=4 zero=3"])
def test_a_device_has_its_experts_alone_and_zero_shares_out_the_rest(plan: str) -> None:
    """Of experts, ZeRO's shares are those of the devices that have the same."""
    program = program_of("grouped", plan, wide=False)
    state, shapes = begun(program, "grouped", wide=False), subject("grouped", wide=False).captured.params_shape
    expert = program.plan.expert
    kinds = {True: 0, False: 0}
    for path, leaf in zip(leaf_names(shapes), jax.tree.leaves(shapes), strict=True):
        kinds[is_expert(path)] += math.prod(leaf.shape)

    def held(stage: int) -> tuple[float, float]:
        shares = program.plan.data if program.plan.zero_stage >= stage else 1
        least = 4 * (kinds[True] / expert / max(1, shares // expert) + kinds[False] / shares)
        return least, 1.1 * least  # some are too small to be shared out

    def here(arrays: Any) -> int:
        device = jax.devices()[0]
        shards = [s for x in jax.tree.leaves(arrays) for s in x.addressable_shards if s.device == device]
        return sum(s.data.nbytes for s in shards)

    low, high = held(3)
    assert low <= here(state._params) <= high
    low, high = held(1)
    assert 3 * low <= here(state._opt) <= 3 * high + 64, "two moments, and what the tests record"


def exchanged(name: str, plan: str, **given: Any) -> list[tuple[int, float, tuple[str, ...]]]:
    """How often, how many bytes, and along which axes: all that is exchanged in a step."""
    program = cjax.parallelize(
        MoEDecoder(0, {"grouped": Grouped, "merged": Merged}[name]), next_token, optax.sgd(0.1),
        {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), np.int32)}, plan, **given,
    )  # fmt: skip
    facts = audit(program.lower().compile(), program.mesh)
    return [(each.count, each.bytes, each.axes) for each in facts.collectives if each.kind == "all-to-all"]


def test_who_is_sent_where_among_all_rows_stays_where_it_is() -> None:
    """With seats for tokens of the whole batch, as large as the tokens times the seats: of three axes that split them
    XLA brought these to the examples for the gradient of the gates, four times what else is sent."""
    program = program_of("linen_moe_capacity", "expert=2 tensor=2", wide=False)
    facts = audit(program.lower().compile(), program.mesh)
    assert facts.moved("collective-permute") + facts.moved("all-to-all") < 0.02 * facts.moved()


@pytest.mark.full("merged-expert=2-4")
@pytest.mark.parametrize(
    ("name", "plan", "times"),
    [
        ("grouped", "expert=4", 4),
        ("merged", "expert=2", 4),
        ("grouped", "expert=4 remat=block", 6),
        ("grouped", "expert=2 tensor=2", 4),
    ],
)
def test_seats_are_exchanged_to_experts_and_back_in_both_passes(name: str, plan: str, times: int) -> None:
    """And once more where a layer is made again; nothing else is, and each time a device sends all but its own."""
    found = exchanged(name, plan)
    size = int(re.search(r"expert=(\d)", plan)[1])  # pyright: ignore[reportOptionalSubscript]
    seats = {"grouped": SEQ * 2 // 4, "merged": SEQ // 2}[name]
    rows = BATCH // (4 if "tensor" in plan else 8)
    each = 4 * rows * 4 * seats * EMBED * (size - 1) / size  # float32, rows of a device, experts
    assert {axes for _, _, axes in found} == {("expert",)}
    assert sum(count * moved for count, moved, _ in found) == pytest.approx(3 * times * each)


@pytest.mark.full
def test_evaluates_batches_that_do_not_divide_and_takes_up_elsewhere() -> None:
    batch = subject("grouped", wide=False).batches[0]
    program, plain = (program_of("grouped", plan, wide=False) for plan in ("expert=4", "zero=3"))
    state = begun(program, "grouped", wide=False)
    part = jax.tree.map(lambda x: x[:3], batch)
    given, wanted = program.evaluate(state, part), plain.evaluate(plain.restore(state), part)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), given, wanted)
    there = plain.restore(program.step(state, batch)[0])
    back = program.restore(there)
    for one, other in zip(jax.tree.leaves(plain.params(there)), jax.tree.leaves(program.params(back)), strict=True):
        np.testing.assert_array_equal(on_host(one), on_host(other))


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("linen_decoder", "expert=2", "this model has none that it can: no product in it has a weight of its own"),
        ("grouped", "expert=8", r"expert=8 can't share out 4 experts evenly. Write a size that divides them: 2, 4\."),
        ("linen_moe_soft", "expert=2", "this model has none that it can"),
    ],
)
def test_refused(name: str, plan: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        program_of(name, plan, wide=False)


# -- what the planner makes of it --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def planning() -> Planning:
    return Planning(source_of("grouped"), optax.adam(1e-3), lambda num: hardware_of_cluster(Cluster("h100"), num))


def scored(planning: Planning, plan: str) -> Scored:
    found = planning.question.score(Plan.parse(plan))
    assert isinstance(found, Scored)
    return found


def test_devices_multiply_as_much_with_a_part_of_the_experts(planning: Planning) -> None:
    """Of their own experts, what all examples have for them."""
    every, some = (scored(planning, f"data=8{words}") for words in ("", " expert=4"))
    assert some.seconds["matmul"] == pytest.approx(every.seconds["matmul"], rel=0.1)
    assert some.memory["params"] < 0.8 * every.memory["params"] and some.memory["activations"] > 0
    assert some.memory["batch"] == every.memory["batch"]
    less, more = (scored(planning, f"data=8 expert=4 zero={stage}").memory for stage in (3, 0))
    assert less["params"] == pytest.approx(more["params"] * shares(4), rel=0.05)


def shares(size: int) -> float:
    """Of what a device has of the model where so many have different experts, what ZeRO leaves it of eight."""
    kinds = {True: 0, False: 0}
    shapes = subject("grouped", wide=False).captured.params_shape
    for path, leaf in zip(leaf_names(shapes), jax.tree.leaves(shapes), strict=True):
        kinds[is_expert(path)] += math.prod(leaf.shape)
    own, rest = kinds[True] / size, kinds[False]
    return (own / (8 // size) + rest / 8) / (own + rest)


def test_what_other_numbers_of_devices_with_different_experts_would_cost(planning: Planning) -> None:
    found = planning.explain(Plan.parse("data=8 expert=4 zero=1"))
    assert not isinstance(found, str)
    assert [each.word for each in found.words["expert=4"]] == ["expert=2"]
    kept = {each.word: each.changes for each in found.words["tensor=1"]}
    assert kept["tensor=2"] == () and kept["tensor=2d:4"] == ("expert=1",)
    (halved,) = (each for each in found.words["pipeline=1"] if each.word == "pipeline=1f1b:2")
    assert halved.changes[-1:] != ("expert=2",), "four of data=4 have different ones still"
    assert {each.word for each in found.words["zero=1"]} == {"zero=0", "zero=2", "zero=3"}


def test_a_search_keeps_the_user_s_number_and_finds_its_own(planning: Planning) -> None:
    fixed = planning.search(Asked((8,), Auto.parse("auto expert=2"), top=5))
    assert {each.plan.expert for each in fixed.best} == {2}
    sizes = {plan.expert for plan in planning.space(Auto(), 8).arrangements(8)}
    assert sizes == {1, 2, 4}
    assert {plan.expert for plan in walks_in(planning.space(Auto(), 8), 8)} == {1}, "a walk has all experts everywhere"


def test_a_number_that_no_plan_has_is_the_word_to_leave_out() -> None:
    with pytest.raises(
        ValueError, match="need a multiple of 3 devices, and there are 8.*leave out words of 'auto expert=3'"
    ):
        cjax.parallelize(
            MoEDecoder(0, Grouped), next_token, optax.sgd(0.1), {"tokens": np.zeros((BATCH, SEQ + 1), np.int32)},
            "auto expert=3",
        )  # fmt: skip
