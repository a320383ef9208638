"""How long a pipeline takes: its schedule's ticks by what is in them, for any number of micro-batches at once.

`cjax.pipeline.simulate` lays every op of a table out in time. Where all stages take equally long, most ticks of a table
are alike, so that it is enough to know how many there are of each kind. That is the same number to the last bit, and
does not grow with the micro-batches.
"""

import functools
from collections import Counter
from collections.abc import Mapping

import numpy as np

from cjax.pipeline.schedule import build

Amount = tuple[int, ...]  # how many F, B and W a stage runs in a tick
Ticks = Mapping[tuple[Amount, ...], int]  # how many ticks there are in which stages run these, and nobody more

F, B, W, FB = (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)


@functools.lru_cache(maxsize=4096)
def ticks(schedule: str, stages: int, microbatches: int, chunks: int) -> Ticks:
    """The ticks of one of cjax's schedules, by the most that any stage runs in them; an op is of one chunk.

    >>> ticks("1f1b", 4, 100, 1)
    {((1, 0, 0),): 3, ((1, 1, 0),): 100, ((0, 1, 0),): 3}
    """
    p, m, v = stages, microbatches, chunks
    if schedule == "1f1b":
        return {(F,): p - 1, (FB,): m, (B,): p - 1}
    if schedule == "interleaved":
        return {(F,): v * p - 1, (FB,): v * m - (v - 1) * p, (B,): v * p - 1}
    if schedule == "gpipe" and v == 1:
        return {(F,): m + p - 2, (FB,): 1, (B,): m + p - 2}
    # From 2p micro-batches on, each one more is one more of the same ticks in the middle.
    known = 2 * p
    if m <= known + 1:
        return _counted(schedule, p, m, v)
    least, more = (_counted(schedule, p, known + one, v) for one in (0, 1))
    found = {kind: least.get(kind, 0) + (m - known) * (more.get(kind, 0) - least.get(kind, 0)) for kind in more}
    assert least.keys() <= more.keys() and min(found.values()) >= 0, (schedule, p, m, v)
    return found


@functools.lru_cache(maxsize=512)
def _counted(schedule: str, stages: int, microbatches: int, chunks: int) -> Ticks:
    """From the table itself."""
    found: Counter[tuple[Amount, ...]] = Counter()
    for row in build(schedule, stages, microbatches, chunks).ticks:
        amounts = {tuple(sum(op.kind == kind for op in ops) for kind in "FBW") for ops in row}
        found[tuple(sorted(a for a in amounts if not any(_is_more(b, a) for b in amounts)))] += 1
    return dict(found)


@functools.lru_cache(maxsize=4096)
def turns(schedule: str, stages: int, microbatches: int, chunks: int, stacks: int) -> Amount:
    """In how many ticks any stage runs an F, a B or a W of a stack, added up over stacks of `chunks` chunks each: so
    often each of them does where all run whatever one of them has to. Without a W, the B is that too.

    >>> turns("1f1b", 4, 100, 1, 1)
    (103, 103, 103)
    """
    p, m = stages, microbatches
    if schedule in ("1f1b", "gpipe") and chunks * stacks == 1:
        return (m + p - 1,) * 3
    # From 2p micro-batches on, each p more are as many more of the same ticks in the middle.
    if m <= 3 * p:
        return _turns(schedule, p, m, chunks, stacks)
    least, more = (np.array(_turns(schedule, p, k * p, chunks, stacks)) for k in (2, 3))
    return tuple((least + (m - 2 * p) * (more - least) // p).tolist())


@functools.lru_cache(maxsize=512)
def _turns(schedule: str, stages: int, microbatches: int, chunks: int, stacks: int) -> Amount:
    found: Counter[str] = Counter()
    for row in build(schedule, stages, microbatches, chunks * stacks).ticks:
        found.update(kind for kind, _ in {(op.kind, op.chunk // chunks) for ops in row for op in ops})
    return found["F"], found["B"], found["W"] or found["B"]


def _is_more(one: Amount, other: Amount) -> bool:
    return one != other and all(x >= y for x, y in zip(one, other, strict=True))


def makespan(
    found: Ticks, forward: np.ndarray, backward: np.ndarray, weight: np.ndarray, together: bool = False
) -> np.ndarray:
    """Seconds from the first op to the last in lockstep, without transfers; times are of a chunk, `backward` without
    `weight`. Where a table has no W, its B is backward + weight.

    Where stages take all branches `together`, each runs whatever any of them has to, in every tick.

    >>> found = ticks("1f1b", 2, 4, 1)
    >>> [float(makespan(found, *map(np.float64, (1, 1, 1)), together)) for together in (False, True)]
    [15.0, 15.0]
    """
    split = any(amount[2] for kind in found for amount in kind)
    back = backward if split else backward + weight
    total = np.zeros(np.broadcast(forward, backward, weight).shape)
    for kind, count in found.items():
        tick = np.zeros_like(total)
        for f, b, w in [tuple(map(max, zip(*kind, strict=True)))] if together else kind:
            tick = np.maximum(tick, f * forward + b * back + w * weight)
        total += count * tick
    return total


def asynchronous(
    schedule: str, stages: np.ndarray, chunks: np.ndarray, forward: np.ndarray, backward: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Seconds for which stages wait that run each op as soon as they can: the papers' bubbles, times of a whole stage.

    Args:
      schedule: "1f1b", "gpipe", "interleaved", or "zero_bubble", which is ZB-H1 with one chunk and ZB-H2 with two.
    """
    whole = (stages - 1) * (forward + backward + weight)
    if schedule == "interleaved":
        return whole / chunks
    if schedule == "zero_bubble":
        # Twice the memory of 1F1B buys all of the bubble but the optimizer's wait.
        return np.where(chunks == 1, (stages - 1) * np.maximum(0.0, forward + backward - weight), 0.0)
    return whole
