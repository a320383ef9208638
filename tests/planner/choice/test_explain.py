"""What other values of each word would cost, and that it is what a search would have found."""

from dataclasses import replace

import pytest
from toys import question, space

from cjax.plan import Plan
from cjax.planner.choice.explain import WORDS, Alternative, Explanation, difference, explain
from cjax.planner.choice.scored import Scored


def explained(text: str, memory: float = 40, **facts: object) -> Explanation:
    found = explain(question(memory), space(**facts), Plan.parse(text).resolve(8))
    assert isinstance(found, Explanation)
    return found


def others(found: Explanation, word: str) -> dict[str, Alternative]:
    return {each.word: each for each in found.words[word]}


def test_each_word_has_its_nearest_other_values() -> None:
    found = explained("tensor=2 zero=1 microbatches=4 precision=bfloat16")
    assert [word.partition("=")[0] for word in found.words] == list(WORDS)
    assert {*others(found, "tensor=2")} == {"tensor=1", "tensor=4"}
    assert {*others(found, "sequence=1")} == {"sequence=gather", "sequence=ring:2", "sequence=all_to_all:2"}
    assert {*others(found, "pipeline=1")} == {"pipeline=1f1b:2"}
    assert {*others(found, "microbatches=4")} == {"microbatches=2", "microbatches=8"}
    assert {*others(found, "overlap=1")} == {"overlap=2"}
    assert {*others(found, "zero=1")} == {"zero=0", "zero=2", "zero=3"}
    assert {*others(found, "remat=none")} == {"remat=dots", "remat=block"}
    assert {*others(found, "precision=bfloat16")} == {"precision=float32", "precision=float16"}


def test_a_pipeline_has_other_schedules_and_chunks() -> None:
    found = explained("pipeline=interleaved:2/2 microbatches=8 zero=2/4")
    assert {*others(found, "pipeline=interleaved:2/2")} == {
        *("pipeline=1", "pipeline=interleaved:4/2", "pipeline=interleaved:2/4"),
        *("pipeline=1f1b:2", "pipeline=gpipe:2", "pipeline=zero_bubble:2"),
    }
    assert {*others(found, "zero=2")} == {"zero=0", "zero=1", "zero=3"}  # a group of all four goes without saying
    assert {*others(explained("data=8 zero=2/4"), "zero=2/4")} == {
        "zero=0",
        "zero=1/4",
        "zero=3/4",
        "zero=1",
        "zero=2",
        "zero=3",
    }


def test_a_grid_has_other_modes_and_sizes() -> None:
    found = explained("tensor=2d:4")
    assert {*others(found, "tensor=2d:4")} == {"tensor=1", "tensor=4"}
    (cube,) = [each for each in explained("tensor=8").words["tensor=8"] if each.word == "tensor=3d:8"]
    assert cube.scored is None and cube.why == "no cubes here"


def test_the_cost_of_each_is_what_scoring_it_gives() -> None:
    asked, found = question(40), explained("tensor=2 microbatches=4")
    for alternatives in found.words.values():
        for each in alternatives:
            assert each.scored is not None
            assert asked.score(each.scored.plan) == each.scored
            differing = [name for name in WORDS if getattr(each.scored.plan, name) != getattr(found.chosen.plan, name)]
            assert set(differing) == {each.word.partition("=")[0], *(word.partition("=")[0] for word in each.changes)}


def test_micro_batches_that_do_not_divide_any_more_change_too() -> None:
    found = others(explained("tensor=8 microbatches=64"), "tensor=8")["tensor=4"]
    assert found.scored and found.scored.plan.microbatches == 32 and found.changes == ("microbatches=32",)


def test_what_does_not_fit_is_said_in_gib() -> None:
    found = others(explained("tensor=1 zero=1 remat=block microbatches=8", memory=12), "zero=1")["zero=0"]
    assert found.scored and not found.scored.fits and found.why == "60.1 of 12.0 GiB"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": {"matmul": 0.5, "tensor": 0.138}}, "+38 ms of transfers"),
        ({"seconds": {"matmul": 0.5, "tensor": 0.0}}, "-100 ms of transfers"),
        ({"seconds": {"matmul": 0.4, "tensor": 0.1, "bubble": 0.3}}, "+200 ms (+300 ms of idle stages)"),
        ({"seconds": {"matmul": 0.5, "tensor": 0.1001}}, "as fast"),
        ({"seconds": {"matmul": 0.5, "tensor": 0.1}, "memory": {"params": 2**29}}, "as fast, 512 MiB less"),
        (
            {"seconds": {"matmul": 0.9}, "memory": {"params": 2**30 * 1.1}},
            "+300 ms (+400 ms of arithmetic), 102 MiB more",
        ),
        ({"memory": {"params": 91.2 * 2**30}}, "91.2 of 1.5 GiB"),
    ],
)
def test_differences_in_words(changes: dict[str, dict[str, float]], said: str) -> None:
    base = Scored(
        Plan(data=1), 1, {"params": 2**30}, 3 * 2**29, {"matmul": 0.5, "tensor": 0.1}, 0.5, 0.7, 0.4, tokens=1024
    )
    assert difference(base, replace(base, **changes)) == said  # type: ignore[arg-type]


def test_a_plan_that_can_not_be_had_says_why() -> None:
    assert explain(question(), space(), Plan.parse("tensor=3d:8").resolve(8)) == "no cubes here"


def test_what_a_model_has_not_is_not_offered() -> None:
    found = explained("data=8", stacks=(), lengths=(), heads=((3, 3),), num_rows=(8,), auto="auto loss=microbatch")
    assert found.words["pipeline=1"] == found.words["sequence=1"] == found.words["microbatches=1"] == ()
    (tensor,) = [each for each in found.words["tensor=1"] if each.word == "tensor=2"]
    assert tensor.scored is None and "can't be split" in tensor.why
