"""Homes of what passes forward read and remember: the least that moves, beside all choices made one by one."""

import itertools
import re
from collections.abc import Sequence

import pytest

from cjax.plan import Plan
from cjax.planner.choice.homes import TooLittle
from cjax.planner.choice.passes import PassHomes, PassRows, choose_pass_homes, keep_memory
from cjax.planner.homes import RowBytes

LENGTH, WEIGHT, MEMORY, FIXED = 4, 5, 3, 7


def rows(length: int, size: int) -> PassRows:
    return PassRows(length, RowBytes(size, 2 * size, size))


def needed(lengths: Sequence[int], kept: Sequence[int], memory_kept: int) -> int:
    """Of a device, with the first of the stacks remembering: what stays, and two rows on their way of the stack that is
    gone through."""
    passing = [min(2, length - n) * WEIGHT for length, n in zip(lengths, kept, strict=True)]
    passing[0] += min(2, lengths[0] - memory_kept) * MEMORY
    return FIXED + sum(kept) * WEIGHT + memory_kept * MEMORY + max(passing)


def counts(homes: PassHomes) -> tuple[list[int], int]:
    return [stack.count("device") for stack in homes.weights], homes.memory.count("device")


def moved(kept: int, memory_kept: int) -> int:
    """A row of weights is read, one of memory is read and written."""
    return (LENGTH - kept) * WEIGHT + 2 * (LENGTH - memory_kept) * MEMORY


@pytest.mark.parametrize("host", [None, 2 * MEMORY * 2, 2 * MEMORY * LENGTH + 2 * WEIGHT])
def test_the_least_that_moves_of_all_that_fits(host: int | None) -> None:
    def fits(kept: int, memory_kept: int, budget: int) -> bool:
        there = host is None or (LENGTH - memory_kept) * 2 * MEMORY <= host
        return there and needed([LENGTH], [kept], memory_kept) <= budget

    every = list(itertools.product(range(LENGTH + 1), repeat=2))
    for budget in range(needed([LENGTH], [0], 0) - 1, needed([LENGTH], [LENGTH], LENGTH) + 2):
        fitting = [moved(*choice) for choice in every if fits(*choice, budget)]
        if not fitting:
            with pytest.raises(TooLittle):
                choose_pass_homes([rows(LENGTH, WEIGHT)], rows(LENGTH, MEMORY), 0, FIXED, budget, host)
            continue
        homes = choose_pass_homes([rows(LENGTH, WEIGHT)], rows(LENGTH, MEMORY), 0, FIXED, budget, host)
        (kept,), memory_kept = counts(homes)
        assert fits(kept, memory_kept, budget)
        assert moved(kept, memory_kept) == min(fitting), budget
        in_host = homes.weights[0].count("host") * 2 * WEIGHT + homes.memory.count("host") * 2 * MEMORY
        assert host is None or in_host <= host
        assert host is not None or "disk" not in homes.weights[0]


def test_stacks_are_gone_through_one_after_the_other() -> None:
    """So that the least budget has room for the rows on their way of one of them alone."""
    lengths = [LENGTH, LENGTH]
    least = needed(lengths, [0, 0], 0)
    stacks, memory = [rows(n, WEIGHT) for n in lengths], rows(LENGTH, MEMORY)
    homes = choose_pass_homes(stacks, memory, 0, FIXED, least)
    assert needed(lengths, *counts(homes)) <= least
    with pytest.raises(TooLittle) as raised:
        choose_pass_homes(stacks, memory, 0, FIXED, least - 1)
    written = re.search(r"[Ww]rite (budget=\w+)", str(raised.value))
    assert written and Plan.parse(written[1]).budget == least
    assert (raised.value.what, raised.value.missing) == ("budget", 1)


def test_what_may_not_stay_does_not() -> None:
    for forced, at_home in (("params", ([0], LENGTH)), ("activations", ([LENGTH], 0))):
        homes = choose_pass_homes([rows(LENGTH, WEIGHT)], rows(LENGTH, MEMORY), 0, FIXED, None, forced=[forced])
        assert counts(homes) == at_home


def test_memory_takes_what_weights_leave() -> None:
    memory, peak = rows(LENGTH, MEMORY), 10
    for kept in range(LENGTH + 1):
        room = peak + memory.held(kept)
        homes = keep_memory(memory, peak, room, budget=100, forced=False, host=None)
        assert homes.count("device") == max(n for n in range(LENGTH + 1) if peak + memory.held(n) <= room)
    with pytest.raises(TooLittle, match="leaves"):
        keep_memory(memory, peak, peak + memory.in_flight(0) - 1, budget=100, forced=False, host=None)
    with pytest.raises(TooLittle, match="of host memory"):
        keep_memory(memory, peak, 100, budget=100, forced=True, host=2 * MEMORY * LENGTH - 1)
