"""Whether a model can be trained with host memory and disk beside its devices, and how fast, by arithmetic alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from cjax.machines import Cluster
from cjax.mesh import Device
from cjax.plan import Auto, Plan, is_auto
from cjax.plan.plan import WALKED
from cjax.plan.sizes import num_bytes, size_text
from cjax.planner.choice.homes import TooLittle
from cjax.planner.choice.planning import Planning
from cjax.planner.choice.walks import ScoredWalk, Updates, score_walk, walks_in
from cjax.planner.hardware import Hardware
from cjax.program.compose import compose
from cjax.program.composed import Given
from cjax.program.homes import describe_walk
from cjax.program.plans import planned
from cjax.program.walk_report import reads_again
from cjax.program.walking import walking_of
from cjax.report.walk import WalkRanking, WalkRow

GUESSED = "memory and time are arithmetic of shapes and rates: nothing of it was compiled or measured"


def walk_plans(
    call: tuple[Any, Any, Any, Any],
    devices: Sequence[Device] | Cluster | str,
    budget: int | str | None = None,
    host: int | str | None = None,
    disk: int | str | None = None,
    *,
    plan: str = "auto",
    top: int = 8,
) -> WalkRanking:
    """The fastest plans that walk over a model's layers, predicted; nothing runs, and the devices need not be here.

    Args:
      call: what `cjax.parallelize` takes: (model, loss, optimizer, batch).
      devices: JAX devices, a `cjax.Cluster`, or text such as "h100:8".
      budget: bytes of a device; all that it has if not given.
      host: bytes of a process in host memory, one process for the devices of each host; None: no limit.
      disk: bytes of a process on disk; None: nothing.
      plan: "auto", and behind it words that every plan has to have; or one plan without these.
      top: how many to list.

    Raises:
      ValueError: no plan fits, with what is missing of the one that comes nearest; a model or an optimizer that no walk
        can be had of.
    """
    planning, numbers, _ = planned(call, devices)
    if len(numbers) != 1:
        raise ValueError(f"{devices} says no number of cards; write {Cluster.parse(str(devices)).with_devices(8)}")
    num = numbers[0]
    facts = planning.hardware(num)
    words: dict[str, Any] = {
        "budget": num_bytes("budget", budget, least=0) if budget is not None else _all_of(facts),
        "host": None if host is None else num_bytes("host", host, least=0),
        "disk": None if disk is None else num_bytes("disk", disk),
    }
    candidates = _candidates(planning, num, plan, words)
    found, refused = _scored(planning.question, candidates, _updates(planning))
    if not found:
        raise ValueError(_nothing(candidates, refused))
    found.sort(key=lambda each: (each.cost.total or 0.0, sum(m.link_in + m.link_out for m in each.cost.moved.values())))
    shared = " ".join(f"{name}={size_text(size)}" for name, size in words.items() if size is not None)
    rows = [WalkRow(_without(each.plan), _use(each), each.mfu) for each in found[:top]]
    hosts = -(-num // facts.devices_per_host)
    each = f"{facts.devices_per_host} devices" if facts.devices_per_host > 1 else "one device"
    many = f"{hosts} processes, each of {each}" if hosts > 1 else f"one process of {each}"
    return WalkRanking(
        f"{num} x {facts.name}", shared, rows, len(candidates), len(found), [f"{many}; {GUESSED}"],
    )  # fmt: skip


def _all_of(facts: Hardware) -> int:
    """What a device has, in whole units."""
    unit = 2**30 if facts.memory >= 2**33 else 2**20
    return facts.memory // unit * unit


def _candidates(planning: Any, num: int, text: str, words: dict[str, Any]) -> list[Plan]:
    if not is_auto(text):
        plan = Plan.parse(text)
        if given := [name for name in WALKED if name in words and getattr(plan, name) is not None]:
            raise ValueError(f"{given[0]} is in the plan and is an argument too; leave it out of {text!r}")
        return [dataclasses.replace(plan.resolve(num), **words)]
    auto = Auto.parse(text)
    Plan(**{**auto.fixed, "data": -1}, **words)  # refuses what does not go with a walk over layers
    plans = walks_in(planning.space(auto, num), num)
    if not plans:
        raise ValueError(f"plan={text!r}: no plan shares the rows of this batch over {num} devices; give other rows")
    return [dataclasses.replace(plan, **words) for plan in plans]


def _updates(planning: Planning) -> Updates | None:
    """What the optimizer does to layers, which no plan changes: of a program on one device, of which nothing is
    compiled.

    Raises:
      ValueError: as `parallelize` would, of the model or the optimizer.
    """
    given = Given(planning.source, planning.optimizer)
    composed = compose(given, Plan(data=1, offload=("optimizer",)), jax.local_devices()[:1])
    walker = composed.walker
    assert walker is not None
    if walker.optimizer is None:
        return None
    numbers = range(len(walker.lengths))
    alone = tuple(walker.optimizer.is_alone(k) for k in numbers)
    return Updates(alone, reads_again(walker.optimizer, len(numbers)), walking_of(composed).record_bytes)


def _scored(
    question: Any, plans: Sequence[Plan], updates: Updates | None
) -> tuple[list[ScoredWalk], list[tuple[Plan, ValueError]]]:
    found: list[ScoredWalk] = []
    refused: list[tuple[Plan, ValueError]] = []
    for plan in plans:
        try:
            found.append(score_walk(question, plan, updates))
        except ValueError as error:  # this one can't be had; others may
            refused.append((plan, error))
    return found, refused


def _nothing(plans: Sequence[Plan], refused: Sequence[tuple[Plan, ValueError]]) -> str:
    """What is missing of the plan that comes nearest: of those whose layers pass through the devices, if any do."""
    short = [(error, plan) for plan, error in refused if isinstance(error, TooLittle)]
    if not short:
        plan, error = refused[0]
        return f"no plan can be had; {str(plan)!r}: {error}"
    error, plan = min(short, key=lambda each: (each[0].what != "room", each[0].missing))
    if len(plans) == 1:
        return f"the plan does not fit: {error}"
    return f"none of {len(plans)} plans fits. {_without(plan)!r} comes nearest: {error}"


def _without(plan: Plan) -> str:
    """The text of a plan without its budget and what goes with that."""
    return str(dataclasses.replace(plan, budget=None, host=None, disk=None, offload=()))


def _use(each: ScoredWalk) -> Any:
    return describe_walk(
        each.plan, each.sizes, each.peaks, each.homes, each.cost, each.rates, each.tokens, each.record, is_bound=False
    )
