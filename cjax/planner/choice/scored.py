"""What plans cost, by arithmetic: arrays for all plans of one arrangement, and one plan with all that is said of it."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from cjax.plan import Plan
from cjax.planner.choice.space import arrangement_of, num_words, plan_at, take, words_of
from cjax.planner.costs.duration import PARTS
from cjax.planner.hardware import Hardware
from cjax.planner.table import PRECISIONS, PlanTable
from cjax.planner.work import Work, WorkSplit

Objective = Literal["time", "memory", "cost", "energy"]
SECONDS = PARTS
BUSY = ("matmul", "attention", "elementwise", "recompute", "optimizer")  # a card computes, and draws its full power
IDLE_POWER = 0.3  # of what a card draws at most
BILLION = 1e9


@dataclass(frozen=True)
class Scored:
    """One plan on so many devices, and what is predicted of it.

    Args:
      plan: resolved.
      num_devices: how many devices.
      memory: bytes a device, by use.
      limit: bytes that a device has.
      seconds: of a step, by what they are spent on; transfers are what no computation hides.
      low, high: seconds between which 80 of 100 steps would be.
      bound: seconds that no step can be shorter than.
      tokens: of a step.
      moved: bytes that a device receives, by axis.
      mfu: the model's own arithmetic as a share of what the devices could do; None where their peak is unknown.
      dollars, kwh: for 10^9 tokens; None where nobody said the price or the power.
    """

    plan: Plan
    num_devices: int
    memory: Mapping[str, float]
    limit: int
    seconds: Mapping[str, float]
    low: float
    high: float
    bound: float
    tokens: int
    moved: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    dollars: float | None = None
    kwh: float | None = None

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time


@dataclass(frozen=True)
class Costs:
    """Of all plans of a table: arrays with an entry a plan.

    Args:
      arrangement: the tensor, sequence and expert words that they share.
      table: the other words.
      hardware: what they run on.
      work: what they compute.
      memory: bytes a device by use.
      durations: as `durations` gives it; None as long as nobody needs times.
    """

    arrangement: Plan
    table: PlanTable
    hardware: Hardware
    work: Work
    memory: Mapping[str, np.ndarray]
    durations: Any = None

    def __len__(self) -> int:
        return len(self.table)

    @functools.cached_property
    def bytes(self) -> np.ndarray:
        return sum(self.memory.values(), np.zeros(len(self)))

    @functools.cached_property
    def words(self) -> np.ndarray:
        return num_words(self.arrangement, self.table)

    def of(self, objective: Objective) -> np.ndarray:
        """What is to be least.

        Raises:
          ValueError: nobody said what a device costs, or draws.
        """
        if objective == "cost" and self.dollars is None:
            raise ValueError(
                f'objective="cost" needs the price of a {self.hardware.name} for an hour, which nobody said: give '
                "price=2.5, or --price 2.5 on the command line."
            )
        if objective == "energy" and self.kwh is None:
            raise ValueError(
                f'objective="energy" needs what a {self.hardware.name} draws, and cjax does not know it: describe the '
                "machine by a cjax.Cluster with its power in watts."
            )
        if objective in ("time", "memory"):
            return self.durations.total if objective == "time" else self.bytes
        values = self.dollars if objective == "cost" else self.kwh
        assert values is not None, "refused above"
        return values

    @functools.cached_property
    def dollars(self) -> np.ndarray | None:
        """For 10^9 tokens."""
        price = self.hardware.price
        return None if price is None else self.durations.total * (price * self._device_hours)

    @functools.cached_property
    def kwh(self) -> np.ndarray | None:
        """For 10^9 tokens: cards at their full power while they compute, and at a part of it while they wait."""
        power = self.hardware.power
        if power is None:
            return None
        busy = sum(getattr(self.durations, part) for part in BUSY)
        watts = power * (IDLE_POWER * self.durations.total + (1 - IDLE_POWER) * busy)
        return watts * (self._device_hours / 1e3)

    @property
    def _device_hours(self) -> float:
        """That a second of a step is, for 10^9 tokens."""
        return self.hardware.num_devices / 3600 * BILLION / self.work.tokens

    def row(self, i: int) -> Scored:
        """One plan in full."""
        facts, durations = self.hardware, self.durations
        peak = facts.matmul_flops(PRECISIONS[int(self.table.precision[i])])
        total = float(durations.total[i])
        return Scored(
            plan_at(self.arrangement, self.table, i),
            facts.num_devices,
            {part: float(sizes[i]) for part, sizes in self.memory.items()},
            facts.memory,
            {part: float(getattr(durations, part)[i]) for part in SECONDS},
            float(durations.low[i]),
            float(durations.high[i]),
            float(durations.bound[i]),
            self.work.tokens,
            {axis: float(received[i]) for axis, received in durations.moved.items()},
            self.work.model_flops / (facts.num_devices * peak * total) if peak and total else None,
            None if self.dollars is None else float(self.dollars[i]),
            None if self.kwh is None else float(self.kwh[i]),
        )


@dataclass(frozen=True)
class Question:
    """What a search asks of: one model and its batch, on devices of one kind.

    Args:
      work: what a step has to do, as an arrangement has it read.
      split: what the tensor and sequence words make of it; raises ValueError with the reason where they can't.
      hardware_at: so many of the devices.
      memory: (work, split, table, hardware) -> bytes by use, as the fields of a dataclass.
      durations: the same -> seconds.
    """

    work: Callable[[Plan], Work]
    split: Callable[[Plan], WorkSplit]
    hardware_at: Callable[[int], Hardware]
    memory: Callable[[Work, WorkSplit, PlanTable, Hardware], Any]
    durations: Callable[[Work, WorkSplit, PlanTable, Hardware], Any]
    _splits: dict[str, WorkSplit | str] = field(default_factory=dict)

    def within(self, memory: int) -> "Question":
        """The same on devices that have so many bytes."""
        return replace(self, hardware_at=lambda num: replace(self.hardware_at(num), memory=memory))

    def split_or_reason(self, arrangement: Plan) -> WorkSplit | str:
        """What the arrangement makes of the work, or why it can't be had; asked for once."""
        key = words_of(arrangement)
        if key not in self._splits:
            try:
                self._splits[key] = self.split(arrangement.resolve(arrangement.model_size * arrangement.expert))
            except ValueError as error:
                self._splits[key] = str(error)
        return self._splits[key]

    def memory_of(self, arrangement: Plan, table: PlanTable, num_devices: int) -> Costs | str:
        """Bytes of all plans of a table, or why the arrangement can't be had."""
        split = self.split_or_reason(arrangement)
        if isinstance(split, str):
            return split
        hardware = self.hardware_at(num_devices)
        work = self.work(arrangement)
        found = self.memory(work, split, table, hardware)
        uses = {use.name: getattr(found, use.name) for use in fields(found)}
        return Costs(arrangement, table, hardware, work, uses)

    def timed(self, costs: Costs, rows: np.ndarray) -> Costs:
        """Some plans of these, with their times."""
        split = self.split_or_reason(costs.arrangement)
        assert isinstance(split, WorkSplit), "costs without a split"
        table = take(costs.table, rows)
        found = self.durations(costs.work, split, table, costs.hardware)
        memory = {use: sizes[rows] for use, sizes in costs.memory.items()}
        return Costs(costs.arrangement, table, costs.hardware, costs.work, memory, found)

    def score(self, plan: Plan) -> Scored | str:
        """One resolved plan, whether or not it fits; or why it can't be had."""
        if plan.walks:
            return WALKS
        arrangement = arrangement_of(plan)
        costs = self.memory_of(arrangement, PlanTable.of([plan]), plan.num_devices)
        return costs if isinstance(costs, str) else self.timed(costs, np.arange(1)).row(0)


def check_objective(objective: Any) -> Objective:
    """Refuses what nobody can search for."""
    known = get_args(Objective)
    if objective not in known:
        raise ValueError(f"objective is one of {', '.join(known)}, not {objective!r}")
    return objective


def of_limit(size: float, limit: float) -> str:
    """What is needed of what there is, in the unit that suits the latter: 41.2 of 77.6 GiB."""
    name, scale = next((unit for unit in _UNITS if limit >= unit[1]), _UNITS[-1])
    return f"{size / scale:,.1f} of {limit / scale:,.1f} {name}"


def size_text(size: float) -> str:
    """Bytes with a unit: 0.9 GiB, 35 MiB."""
    name, scale = next((unit for unit in _UNITS if size >= unit[1]), _UNITS[-1])
    return f"{size / scale:,.3g} {name}"


WALKS = "its step walks over layers, which is not the step of one program that a search predicts"
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def least(values: np.ndarray) -> float:
    return float(values.min()) if len(values) else math.inf
