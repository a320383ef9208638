"""The search finds the best of all plans, as scoring each of them alone does, and says what else there is."""

import functools
import itertools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toys import GIB, Bytes, question, space, split

from cjax.plan import Plan
from cjax.planner.choice.scored import SECONDS, Objective, Question, Scored, check_objective
from cjax.planner.choice.search import search
from cjax.planner.choice.space import plan_at
from cjax.planner.table import PlanTable
from cjax.planner.work import WorkSplit

SMALL = {"num_rows": (16,), "stacks": (4,), "lengths": ()}


@functools.cache
def every(size: float, num_devices: int = 8) -> list[Scored]:
    """All plans, scored one by one."""
    asked, of = question(size), space(**SMALL)
    found = []
    for each in of.arrangements(num_devices):
        table = of.table(each, num_devices)
        scored = [asked.score(plan_at(each, table, i)) for i in range(len(table))]
        found += [one for one in scored if isinstance(one, Scored)]
    return found


@pytest.mark.parametrize("size", [15, 40, 1000])
@pytest.mark.parametrize("objective", ["time", "memory", "cost", "energy"])
def test_the_best_is_the_best_of_all_plans_scored_alone(objective: Objective, size: float) -> None:
    asked, of = question(size), space(**SMALL)
    fitting = [each for each in every(size) if each.fits]
    found = search(asked, of, [8], objective, top=3)
    value = {"time": "time", "memory": "bytes", "cost": "dollars", "energy": "kwh"}[objective]
    least = min(getattr(each, value) for each in fitting)
    assert getattr(found.best[0], value) == pytest.approx(least, rel=1e-6) and found.best[0].fits
    ties = [each for each in fitting if getattr(each, value) <= least * (1 + 1e-7)]
    assert str(found.best[0].plan) == min((str(each.plan) for each in ties), key=lambda t: (len(t.split()), t))
    assert found.num_fitting == len(fitting) and found.num_plans == len(every(size))
    values = [getattr(each, value) for each in found.best]
    assert values == sorted(values) and len({each.plan for each in found.best}) == 3


def test_nothing_of_the_front_is_beaten_and_nothing_beats_it() -> None:
    asked, of = question(20), space(**SMALL)
    fitting = [each for each in every(20) if each.fits]
    front = search(asked, of, [8]).front
    assert len(front) > 3
    for one, other in itertools.pairwise(front):
        assert one.time < other.time and one.bytes > other.bytes
    for each in fitting:
        assert any(one.time <= each.time and one.bytes <= each.bytes for one in front)


def test_marks_are_the_extremes_of_all_plans_and_numbers_of_devices() -> None:
    asked, of = question(36), space(**SMALL)
    found = search(asked, of, [1, 2, 4, 8])
    fitting = [each for num in (1, 2, 4, 8) for each in every(36, num) if each.fits]
    assert found.fastest and found.leanest and found.cheapest and found.fewest
    assert found.fastest.time == pytest.approx(min(each.time for each in fitting))
    assert found.leanest.bytes == pytest.approx(min(each.bytes for each in fitting))
    assert found.fewest.num_devices == min(each.num_devices for each in fitting) == 2
    spent = [each.time * each.num_devices for each in fitting]
    assert found.cheapest.time * found.cheapest.num_devices == pytest.approx(min(spent))


def test_where_nothing_fits_the_leanest_of_all_is_told() -> None:
    asked, of = question(0.01), space(**SMALL)
    found = search(asked, of, [8])
    assert not found.best and not found.front and found.fastest is None and found.num_fitting == 0
    assert found.least and found.least.bytes == pytest.approx(min(each.bytes for each in every(0.01)))
    assert not found.least.fits


def test_same_input_same_plans() -> None:
    first, again = (search(question(20), space(), [4, 8], top=8) for _ in range(2))
    assert first == again
    assert [str(each.plan) for each in first.best] == [str(each.plan) for each in again.best]


def test_arrangements_that_the_model_refuses_are_told_and_asked_for_once() -> None:
    asked: list[Plan] = []

    def refuses(plan: Plan) -> WorkSplit:
        asked.append(plan)
        if plan.tensor.size > 1:
            raise ValueError("heads 8: no")
        return split(plan)

    found = search(question(40, refuses), space(**SMALL), [8, 4, 8], top=4)
    assert found.refused == {f"tensor={name}": "heads 8: no" for name in ("2", "4", "8", "2d:4", "2.5d:8/2", "3d:8")}
    assert all(each.plan.tensor.size == 1 for each in found.best) and len(asked) == len(set(asked)) == 7


def test_plans_that_differ_and_gain_nothing_are_one() -> None:
    """Stages 1 and 2 of ZeRO cost and save the same here, so that the second is no news."""
    best = search(question(1000), space(**SMALL), [8], top=8).best
    assert len(best) == 8
    stages = {each.plan.zero_stage for each in best}
    assert stages >= {0, 1} and 2 not in stages


def test_fewer_words_win_a_tie() -> None:
    def flat(*args: Any) -> Any:
        table: PlanTable = args[2]
        parts = dict.fromkeys(SECONDS, np.zeros(len(table))) | {"matmul": np.ones(len(table))}
        total = parts["matmul"]
        return SimpleNamespace(**parts, total=total, low=total, high=total, bound=total, moved={})

    def none(*args: Any) -> Any:
        return Bytes(np.ones(len(args[2])), np.ones(len(args[2])))

    asked = question(40)
    found = search(Question(asked.work, asked.split, asked.hardware_at, none, flat), space(), [8])
    assert str(found.best[0].plan) == "data=8"


@pytest.mark.parametrize(("objective", "fact"), [("cost", "price"), ("energy", "power")])
def test_an_objective_needs_its_fact(objective: Objective, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        search(question(40, split, **{fact: None}), space(**SMALL), [8], objective)
    found = search(question(40, split, **{fact: None}), space(**SMALL), [8])
    assert getattr(found.best[0], {"price": "dollars", "power": "kwh"}[fact]) is None


def test_what_is_said_of_a_plan_adds_up() -> None:
    plan = Plan.parse("data=4 tensor=2 zero=1 precision=bfloat16")
    scored = question(40).score(plan)
    assert isinstance(scored, Scored) and scored.plan == plan and scored.num_devices == 8
    assert scored.bytes == sum(scored.memory.values()) == pytest.approx((60 / 2 / 4 + 60 / 8) * GIB)
    assert scored.low < scored.time < scored.high and scored.bound < scored.time
    assert scored.tokens_per_second == pytest.approx(64 * 1024 / scored.time)
    assert scored.mfu == 0  # of a work without arithmetic
    assert scored.dollars == pytest.approx(8 * 3.6 / 3600 * scored.time * 1e9 / (64 * 1024))
    busy = scored.seconds["matmul"]
    assert scored.kwh == pytest.approx(8 * (0.3 * scored.time + 0.7 * busy) / 3600 * 1e9 / (64 * 1024))
    assert question(40).score(Plan.parse("data=1 tensor=3d:8")) == "no cubes here"


def test_an_objective_that_is_none() -> None:
    with pytest.raises(ValueError, match="objective is one of time, memory, cost, energy, not 'speed'"):
        check_objective("speed")
    assert check_objective("energy") == "energy"


@pytest.mark.full
def test_a_hundred_thousand_plans_take_seconds() -> None:
    """Of the search's own work; what costs take is told where they are computed."""
    of = space(num_rows=(4096,), stacks=(96,), heads=((96, 96),), lengths=(4096,))
    started = time.process_time()
    found = search(question(40), of, [256, 512, 1024], top=8)
    assert found.num_plans > 100_000
    assert (time.process_time() - started) / found.num_plans < 2e-5, "2 s for 100,000"
