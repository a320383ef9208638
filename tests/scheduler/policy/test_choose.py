"""Hulls, and the table that finds the largest sum."""

import itertools

import numpy as np
import pytest

from cjax.scheduler.policy.choose import PickedSizes, choose, knapsack
from cjax.scheduler.policy.job import Job, Speed, SpeedTable
from cjax.scheduler.policy.worth import Worth, hull, worth_of


def test_the_hull_leaves_out_what_lies_under_it_and_behind_the_largest() -> None:
    assert hull([0, 1, 2, 3, 4, 8], [0.0, 1.0, 1.1, 2.0, 2.5, 2.4]) == [0, 1, 4]
    assert hull([0, 1, 2], [0.0, 1.0, 2.0]) == [0, 2]  # a straight line has no corner
    assert hull([0], [0.0]) == [0]


@pytest.mark.parametrize("seed", range(5))
def test_the_table_finds_the_largest_sum(seed: int) -> None:
    random = np.random.default_rng(seed)
    worths = []
    for number in range(4):
        sizes = (0, *sorted(random.choice(np.arange(1, 8), 3, replace=False).tolist()))
        worths.append(
            Worth(Job(str(number), SpeedTable([Speed(1, 1.0)])), 0, sizes, (0.0, *random.random(3).tolist()), 0.0)
        )
    options = itertools.product(range(4), repeat=4)
    sums = {
        ats: sum(w.values[at] for w, at in zip(worths, ats, strict=True))
        for ats in options
        if sum(w.sizes[at] for w, at in zip(worths, ats, strict=True)) <= 9
    }
    assert sums[tuple(knapsack(worths, 9))] == pytest.approx(max(sums.values()))


def test_a_size_for_which_there_is_no_room_gives_way_to_the_next_below() -> None:
    table = SpeedTable([Speed(1, 1.0), Speed(2, 2.0), Speed(3, 9.0)])
    worths = [worth_of(Job(name, table, work_left=1e6, restart=0.0), 0, {4: 1}) for name in "ab"]
    picked = PickedSizes(worths, {4: 1}, {})
    assert picked.raise_to(0, 3) and picked.raise_to(1, 3)
    assert [picked.size(0), picked.size(1)] == [3, 1]
    assert not picked.raise_to(1, 2)
    assert sorted(choose(worths, {4: 1}).values()) == [1, 3]
    assert choose(worths, {4: 1}, {"b": 2})["b"] == 2


def test_what_is_free_goes_to_whom_it_adds_most_and_nobody_takes_what_adds_nothing() -> None:
    tables = {"a": [1.0, 1.1, 1.2], "b": [1.0, 0.9, 9.0]}
    worths = [
        worth_of(Job(name, SpeedTable([Speed(n, v) for n, v in enumerate(values, 1)]), work_left=1e6), 0, {4: 1})
        for name, values in tables.items()
    ]
    picked = PickedSizes(worths, {4: 1}, {"a": 2, "b": 1})
    assert not picked.raise_to(1, 3)  # three are too many, and two are worth less than one
    picked.fill()
    assert [picked.size(0), picked.size(1), picked.free] == [3, 1, 0]
