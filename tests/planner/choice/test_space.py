"""Which plans there are: every one is a plan that cjax would take, and nothing legal of the kind is missing."""

import dataclasses
import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from toys import space

from cjax.pipeline.schedule import build
from cjax.plan import Auto, Plan, Sequence, Zero
from cjax.plan.plan import WALKED
from cjax.plan.text import NAMES
from cjax.planner.choice.space import CARRIED, COLUMNS, WIDEST, num_words, plan_at, space_of, take
from cjax.planner.work import AttentionWork, Part, Work

PIPES_OF_7 = {"1f1b:7", "gpipe:7", "zero_bubble:7"}  # eight layers on seven stages
legal = functools.cache(build)


def plans(num_devices: int, auto: str = "auto", **facts: Any) -> list[Plan]:
    found = space(auto, **facts)
    tables = [(each, found.table(each, num_devices)) for each in found.arrangements(num_devices)]
    return [plan_at(each, table, i) for each, table in tables for i in range(len(table))]


@functools.cache
def everything() -> list[Plan]:
    return plans(8, num_rows=(24,), stacks=(6,))


def test_each_plan_is_there_once_resolved_and_in_the_same_order() -> None:
    found = everything()
    again = plans(8, num_rows=(24,), stacks=(6,))
    assert found == again and len(found) == len({str(plan) for plan in found}) > 1000
    assert all(plan.num_devices == 8 and plan.resolve(8) == plan for plan in found[::7])
    assert str(found[0]) == "data=8"


def test_a_search_knows_every_word() -> None:
    """One that it does not know would be left out of the plan that it finds, though the user fixed it."""
    assert {"tensor", "sequence", "expert", *CARRIED, *WALKED, *(set(COLUMNS) & set(NAMES))} == set(NAMES)


@pytest.mark.parametrize("word", ["layers", "none"])
def test_how_layers_are_compiled_is_the_user_s_word(word: str) -> None:
    """And where they are compiled one by one, no pipeline is among the plans: `Plan` would refuse it."""
    found = plans(8, f"auto unroll={word}", num_rows=(24,), stacks=(6,))
    assert {plan.unroll for plan in found} == {word}
    rest = [plan for plan in everything() if word == "none" or plan.pipeline.size == 1]
    assert len(found) == len(rest) > 100


def test_all_words_have_all_their_values() -> None:
    words = {word for plan in plans(16) for word in str(plan).split()}
    tensors = ["tensor=2", "tensor=8", "tensor=2d:4", "tensor=2d:16", "tensor=2.5d:8/2", "tensor=2.5d:16/4"]
    tensors += ["tensor=3d:8"]
    sequences = ["sequence=gather", "sequence=ring:16", "sequence=all_to_all:8"]
    pipelines = ["pipeline=1f1b:8", "pipeline=gpipe:2", "pipeline=interleaved:2/4", "pipeline=zero_bubble:4/2"]
    others = ["zero=1", "zero=2", "zero=3", "zero=3/8", "remat=dots", "remat=block", "microbatches=64", "data=16"]
    assert words >= {*tensors, *sequences, *pipelines, *others}
    assert not any(word.startswith("precision") for word in words), "the user's precision is the user's"


def test_micro_batches_overlap_where_1d_alone_splits_layers() -> None:
    found = plans(16)
    both = [plan for plan in found if plan.overlap > 1]
    assert {plan.overlap for plan in both} == {2} and {plan.tensor.mode for plan in both} == {"1d"}
    assert all(plan.tensor.size > 1 and plan.sequence == Sequence() and plan.pipeline.size == 1 for plan in both)
    alone = [plan for plan in found if plan.overlap == 1 and plan.microbatches % 2 == 0 and plan.tensor.size > 1]
    alone = [plan for plan in alone if plan.sequence == Sequence() and plan.pipeline.size == 1]
    assert {replace(plan, overlap=1) for plan in both} == {plan for plan in alone if plan.tensor.mode == "1d"}


def test_how_many_overlap_may_be_the_user_s_word() -> None:
    fixed = plans(8, "auto overlap=4")
    assert fixed and all(plan.overlap == 4 and plan.pipeline.size == 1 for plan in fixed)
    assert {plan.data for plan in fixed} >= {1, 8}, "under any other words that allow it"
    assert all(plan.overlap == 1 for plan in plans(8, "auto overlap=1"))


@pytest.mark.full("facts0", "facts2")
@pytest.mark.parametrize("facts", [{}, {"stacks": (8, 4)}, {"num_rows": (48,), "stacks": (12,), "lengths": (96,)}])
def test_what_divides_not_is_not_there(facts: dict[str, Any]) -> None:
    rows, stacks = facts.get("num_rows", (64,))[0], facts.get("stacks", (8,))
    for plan in plans(8, **facts):
        sizes = plan.axis_sizes()
        grid = {"2d": ("row",), "2.5d": ("depth", "row"), "3d": ("i", "j")}.get(plan.tensor.mode, ())
        shares = plan.data * plan.microbatches
        for axis in grid:
            shares *= sizes[axis]
        assert rows % shares == 0, plan
        if plan.pipeline.size > 1:
            assert all(n >= plan.pipeline.size * plan.pipeline.chunks for n in stacks), plan
            kind = "interleaved" if plan.pipeline.schedule == "1f1b" and len(stacks) > 1 else plan.pipeline.schedule
            legal(kind, plan.pipeline.size, plan.microbatches, plan.pipeline.chunks * len(stacks))


def test_a_grid_needs_rows_and_heads_that_its_side_divides() -> None:
    assert not [plan for plan in plans(8, num_rows=(3,)) if plan.tensor.mode != "1d"]
    assert {plan.tensor.size for plan in plans(8, heads=((6, 6),))} == {1, 2, 4, 8}  # 2x2, 2x2x2: the side is 2
    assert {plan.tensor.size for plan in plans(8, heads=((6, 6),)) if plan.tensor.mode == "1d"} == {1, 2}
    assert {plan.tensor.size for plan in plans(8, heads=((7, 7),))} == {1}


def test_experts_are_shared_out_where_there_are_any_and_as_many_as_divide() -> None:
    assert {plan.expert for plan in plans(8)} == {1}
    some = plans(8, experts=(6, 12))
    assert {plan.expert for plan in some} == {1, 2} and {plan.expert for plan in plans(8, experts=(8,))} == {1, 2, 4, 8}
    shared = [plan for plan in some if plan.expert > 1]
    assert {plan.tensor.mode for plan in shared} == {"1d"} and {plan.zero.group for plan in shared} == {None}
    assert all(plan.data % 2 == 0 for plan in shared) and {plan.pipeline.size for plan in shared} >= {1, 2, 4}
    assert {plan.tensor.size for plan in shared} == {1, 2, 4}
    assert {plan.zero_stage for plan in shared if plan.data == 2} == {0, 1, 2, 3}, "state of all but the experts"
    assert {plan.expert for plan in plans(8, "auto expert=3", experts=(6,))} == set()
    assert {plan.expert for plan in plans(12, "auto expert=3", experts=(6,), num_rows=(48,))} == {3}
    assert {plan.expert for plan in plans(8, splits_model=False, experts=(8,))} == {1}


def test_split_positions_need_attentions_that_can_be_split_so() -> None:
    sequences = {str(plan.sequence) for plan in plans(8, heads=((8, 2),), lengths=(1024,))}
    assert "all_to_all:8" in sequences  # each of two heads of keys is copied to four, with one of queries
    assert "all_to_all:8" not in {str(plan.sequence) for plan in plans(8, heads=((6, 6),))}
    few = {str(plan.sequence) for plan in plans(8, lengths=(5,))}
    assert few == {"ring:1", "gather", *(f"{mode}:{n}" for mode in ("ring", "all_to_all") for n in (2, 4))}  # filled up
    assert {str(plan.sequence) for plan in plans(8, lengths=())} == {"ring:1"}
    # Groups of heads that share keys stay together where positions are split.
    both = {(plan.tensor.size, str(plan.sequence)) for plan in plans(8, heads=((8, 2),)) if plan.tensor.mode == "1d"}
    assert (2, "ring:2") in both and (4, "ring:2") not in both and (4, "gather") in both


def test_without_stacks_there_are_no_stages_and_without_parts_no_micro_batches() -> None:
    assert {plan.pipeline.size for plan in plans(4, stacks=())} == {1}
    assert {plan.microbatches for plan in plans(4, cuts_batch=False)} == {1}
    assert {plan.model_size for plan in plans(8, splits_model=False)} == {1}
    assert {plan.zero_stage for plan in plans(1)} == {0}
    assert plans(7, stacks=(), lengths=()) == [] and {str(plan.pipeline) for plan in plans(7, lengths=())} == PIPES_OF_7


def test_arrangements_that_were_refused_are_left_out() -> None:
    every, refused = space().arrangements(8), "tensor=2 sequence=gather"
    kept = space(without=frozenset({refused})).arrangements(8)
    assert [plan for plan in every if plan not in kept] == [Plan.parse(refused)]


@pytest.mark.parametrize(
    "words",
    [
        *("data=4", "tensor=2", "tensor=2d:4", "tensor=1", "sequence=gather", "sequence=all_to_all:2", "sequence=1"),
        *("pipeline=interleaved:2/3", "pipeline=1", "microbatches=6", "zero=1", "zero=0", "remat=block"),
        *(
            "zero=3/2",
            "precision=bfloat16",
            "loss=microbatch",
            "reduce=float32",
            'rules={"vocab":null}',
            "tensor=2 zero=2",
        ),
    ],
)
def test_words_that_are_fixed_are_those_of_every_plan(words: str) -> None:
    facts: dict[str, Any] = {"num_rows": (24,), "stacks": (6,)}
    found, fixed = plans(8, f"auto {words}", **facts), Auto.parse(f"auto {words}").fixed
    assert found
    for plan, (name, value) in itertools.product(found, fixed.items()):
        given = dict(plan.rules) if name == "rules" else getattr(plan, name)
        # A group of all devices goes without saying.
        assert given == value or (value == Zero(3, 2) and plan.data == 2 and given == Zero(3))
    free = {name: value for name, value in fixed.items() if name not in ("precision", *CARRIED)}
    every = [str(plan) for plan in everything() if all(getattr(plan, n) == v for n, v in free.items())]
    assert len({*every} - {*map(str, found)}) == (len(every) if len(free) < len(fixed) else 0)
    assert every or words == "zero=3/2", "a group within a host is not in the space, but the user's to fix"


def test_a_group_of_zero_stays_in_a_host_where_all_devices_would_not() -> None:
    found = plans(32, stacks=(), lengths=())
    groups = {(plan.tensor.size, plan.zero.group) for plan in found if plan.tensor.mode == "1d"}
    assert groups == {(1, None), (1, 8), (2, None), (2, 4), (4, None), (4, 2), (8, None)}
    assert {plan.zero.group for plan in plans(8)} == {None}


def test_words_are_counted_as_they_are_written() -> None:
    found = space()
    for each in found.arrangements(4):
        table = found.table(each, 4)
        words = [len(str(plan_at(each, table, i)).split()) for i in range(len(table))]
        assert words == list(num_words(each, table))


def test_some_rows_of_a_table() -> None:
    table = space().table(Plan(), 8)
    some = take(table, table.zero == 3)
    assert 0 < len(some) < len(table) and set(some.zero) == {3}


def test_a_space_knows_a_work_by_its_attentions() -> None:
    attention = AttentionWork((("batch", 4),), (("heads", 6), ("groups", 2)), (("q", 32),), (("k", 16),), 64, 6)
    work = Work((Part("layers", 3, attentions=(attention, attention)),), num_rows=4, tokens=128)
    found = space_of(work, [4, 4], [3], 8, Auto())
    assert (found.num_rows, found.stacks, found.heads, found.lengths) == ((4,), (3,), ((12, 6),), (32, 16))


def test_no_layer_is_shared_by_more_devices_than_links_could_serve() -> None:
    of = space(num_rows=(4096,), heads=((512, 512),), lengths=(4096,))
    sizes = [plan.tensor.size * plan.sequence.size for plan in of.arrangements(1024)]
    assert max(sizes) == WIDEST
    fixed = dataclasses.replace(of, auto=Auto.parse("auto tensor=512"))
    assert [plan.tensor.size for plan in fixed.arrangements(1024)][:1] == [512]
