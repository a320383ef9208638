"""Which plan: all that there are, memory first, then time, for all plans of an arrangement at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cjax.planner.choice.scored import Costs, Objective, Question, Scored, least
from cjax.planner.choice.space import Space

ALIKE = 1e-3  # times that differ by less are the same: nobody could measure it


@dataclass
class Found:
    """What a search found.

    Args:
      best: the plans with the least of the objective, in order; none that differs from one before it in nothing that
        counts.
      front: of all plans that fit, those that no other beats in both time and memory; fastest first.
      fastest, leanest, cheapest, fewest: of all plans that fit; the cheapest by devices times seconds.
      least: the plan with the least memory, whether or not it fits; None where there is no plan at all.
      num_plans, num_fitting: how many there are.
      refused: arrangements that the model or the batch rules out, with the reason.
    """

    best: list[Scored] = field(default_factory=list)
    front: list[Scored] = field(default_factory=list)
    fastest: Scored | None = None
    leanest: Scored | None = None
    cheapest: Scored | None = None
    fewest: Scored | None = None
    least: Scored | None = None
    num_plans: int = 0
    num_fitting: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def search(
    question: Question, space: Space, num_devices: Sequence[int], objective: Objective = "time", top: int = 1
) -> Found:
    """The best plans of a space.

    Args:
      question: the model and the devices.
      space: what may be chosen from.
      num_devices: numbers of devices that may be taken.
      objective: what is to be least; every plan has to fit memory.
      top: how many plans are wanted.

    The same input gives the same plans: those that cost the same come in the order of fewer words, then of their text.
    """
    found = Found()
    ranks: dict[str, list[tuple[float, ...]]] = {}
    for costs, memory in _tables(question, space, num_devices, found):
        rows = np.flatnonzero(memory <= costs.hardware.memory)
        found.num_plans += len(costs)
        found.num_fitting += len(rows)
        if found.least is None or least(memory) < found.least.bytes:
            found.least = question.timed(costs, _first(memory, costs, 1)).row(0)
        if len(rows):
            _merge(found, question.timed(costs, rows), objective, top, ranks)
    found.best = _distinct(found.best)[:top]
    return found


def _tables(
    question: Question, space: Space, num_devices: Sequence[int], found: Found
) -> Iterator[tuple[Costs, np.ndarray]]:
    for num in num_devices:
        for arrangement in space.arrangements(num):
            table = space.table(arrangement, num)
            if not len(table):
                continue
            costs = question.memory_of(arrangement, table, num)
            if isinstance(costs, str):
                found.refused[str(arrangement)] = costs
            else:
                yield costs, costs.bytes


def _merge(
    found: Found, costs: Costs, objective: Objective, top: int, ranks: dict[str, list[tuple[float, ...]]]
) -> None:
    """Takes from these plans what is better than what was found so far."""
    time, memory, values = costs.durations.total, costs.bytes, costs.of(objective)
    # More than are wanted, since some will turn out to be alike.
    rows = _first(values, costs, 4 * top)
    worst = _value(found.best[-1], objective) if len(found.best) >= 4 * top else np.inf
    new = [costs.row(i) for i in rows if values[i] <= worst]
    found.best = sorted([*found.best, *new], key=lambda each: _order(each, objective))[: 4 * top]
    _keep(found, "fastest", costs, (time, memory), ranks)
    _keep(found, "leanest", costs, (memory, time), ranks)
    devices = np.full(len(costs), costs.hardware.num_devices)
    _keep(found, "cheapest", costs, (time * devices, time), ranks)
    _keep(found, "fewest", costs, (devices, time), ranks)
    found.front = _front(found.front, costs)


def _keep(
    found: Found, name: str, costs: Costs, keys: tuple[np.ndarray, ...], ranks: dict[str, list[tuple[float, ...]]]
) -> None:
    """Remembers the first plan by these keys, where it comes before the one that is remembered."""
    i = int(np.lexsort((costs.words, *reversed([_rounded(key) for key in keys])))[0])
    rank = (*(float(_rounded(key)[i]) for key in keys), float(costs.words[i]))
    if name not in ranks or [rank] < ranks[name]:
        ranks[name] = [rank]
        setattr(found, name, costs.row(i))


def _first(values: np.ndarray, costs: Costs, number: int) -> np.ndarray:
    """Numbers of the rows with the least values, and all that tie with the last of them by value and words."""
    rounded = _rounded(values)
    order = np.lexsort((costs.words, rounded))
    if len(order) > number:
        last = order[number - 1]
        ties = (rounded[order] == rounded[last]) & (costs.words[order] == costs.words[last])
        order = order[: max(number, int(np.flatnonzero(ties)[-1]) + 1)] if number > 1 else order[:1]
    return order


def _rounded(values: np.ndarray) -> np.ndarray:
    """To seven digits: sums in another order should tie, not decide."""
    return values.astype(np.float32).astype(np.float64)


def _value(scored: Scored, objective: Objective) -> float:
    found = {"time": scored.time, "memory": scored.bytes, "cost": scored.dollars, "energy": scored.kwh}[objective]
    assert found is not None, "`Costs.of` raises before"
    return found


def _order(scored: Scored, objective: Objective) -> tuple[float, int, int, str]:
    text = str(scored.plan)
    return float(np.float32(_value(scored, objective))), scored.num_devices, len(text.split()), text


def _distinct(plans: Sequence[Scored]) -> list[Scored]:
    """Without plans that differ from one before them in ZeRO, remat or micro-batches alone, and gain nothing by it."""
    kept: list[Scored] = []
    for each in plans:
        same = [
            other
            for other in kept
            if _flavour(other) == _flavour(each)
            and abs(other.time - each.time) <= ALIKE * each.time
            and other.bytes <= each.bytes
            and len(str(other.plan).split()) <= len(str(each.plan).split())
        ]
        if not same:
            kept.append(each)
    return kept


def _flavour(scored: Scored) -> tuple[object, ...]:
    plan = scored.plan
    return scored.num_devices, plan.data, plan.tensor, plan.sequence, plan.expert, plan.pipeline


def _front(front: Sequence[Scored], costs: Costs) -> list[Scored]:
    """The plans of both that no other beats in both time and memory."""
    time, memory = costs.durations.total, costs.bytes
    order = np.lexsort((costs.words, memory, time))
    lower = np.minimum.accumulate(memory[order])
    own = order[np.concatenate([[True], memory[order][1:] < lower[:-1]])]
    if front:
        times, sizes = np.asarray([each.time for each in front]), np.asarray([each.bytes for each in front])
        # Of those that are as fast or faster, the leanest.
        at = np.searchsorted(times, time[own], side="right") - 1
        own = own[(at < 0) | (memory[own] < sizes[np.maximum(at, 0)])]
    merged = sorted([*front, *(costs.row(int(i)) for i in own)], key=lambda each: (each.time, each.bytes))
    kept: list[Scored] = []
    for each in merged:
        if not kept or each.bytes < kept[-1].bytes:
            kept.append(each)
    return kept
