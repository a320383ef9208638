"""The best set of things that exclude each other, beside trying them all."""

import itertools
import random
import time

import pytest

from cjax.sharding.layout import independent
from cjax.sharding.layout.independent import best_set


def tried(worth, exclusions, bonuses):
    """All sets: the best, then the smallest, then the first."""
    best, found = (0, 0, 0), []
    for count in range(1, len(worth) + 1):
        for some in itertools.combinations(worth, count):
            if any(len(set(group) & set(some)) > 1 for group in exclusions):
                continue
            taken = [worth[thing] for thing in some] + [more for things, more in bonuses if set(things) & set(some)]
            total = tuple(map(sum, zip(*taken, strict=True)))
            if total > best:
                best, found = total, list(some)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_better(seed: int) -> None:
    draw = random.Random(seed)
    things = list(range(draw.randint(1, 9)))
    draw.shuffle(things)
    worth = {thing: (draw.randint(0, 3), -draw.randint(0, 3), -1) for thing in things}
    some = [*things, len(things)]  # one that is not asked for
    exclusions = [draw.sample(some, draw.randint(1, min(3, len(some)))) for _ in range(draw.randint(0, 8))]
    bonuses = [
        (draw.sample(some, draw.randint(0, min(3, len(some)))), (draw.randint(0, 3), 0, 0))
        for _ in range(draw.randint(0, 3))
    ]
    assert best_set(worth, exclusions, bonuses) == tried(worth, exclusions, bonuses)


def test_a_long_chain_takes_no_time() -> None:
    """As the channels of a deep convolutional network, where each layer's meet the next one's."""
    worth = {i: (1 + i % 3, 0, -1) for i in range(300)}
    start = time.perf_counter()
    found = best_set(worth, [(i, i + 1) for i in range(299)], [])
    assert time.perf_counter() - start < 10
    best = [0, 0]
    for i in range(300):  # of the first so many: with the last one or without
        best.append(max(best[-1], best[-2] + worth[i][0]))
    assert sum(worth[i][0] for i in found) == best[-1]


def test_a_knot_too_dense_to_be_tried_gives_up_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independent, "MAX_CHOICES", 4)
    worth = {i: (i + 1, 0, -1) for i in range(8)}
    assert best_set(worth, [(0, 7)], [(range(8), (1, 0, 0))]) == [5, 6, 7]
    monkeypatch.undo()
    assert best_set(worth, [(0, 7)], [(range(8), (1, 0, 0))]) == [1, 2, 3, 4, 5, 6, 7]
