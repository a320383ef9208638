"""Plans that walk over layers, by arithmetic alone: homes of what a device can't hold, and the time of a step.

What a program for such a plan needs, its own compiled pieces say. Here it is what the same plan needs without a walk,
each layer made again in the backward pass, one layer at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cjax.plan import Plan
from cjax.planner.choice.homes import choose_homes
from cjax.planner.choice.scored import Question
from cjax.planner.choice.space import Space, arrangement_of, plan_at
from cjax.planner.costs.duration import PARTS
from cjax.planner.costs.memory import PartMemory, part_memory
from cjax.planner.costs.walk import WalkCost, WalkRates, rates_of, reading_again, walk_cost
from cjax.planner.hardware import Hardware
from cjax.planner.homes import Homes, Kind, Occupied, Peaks, Phase, RowBytes, RowSizes, occupied
from cjax.planner.table import REMATS, PlanTable
from cjax.planner.work import Work, WorkSplit

# Forward, of what both passes are counted together in: the backward pass has two matmuls for each.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Updates:
    """What an optimizer's update needs of layers, whatever the plan.

    Args:
      alone: by stack, whether that of a layer needs nothing of others.
      again: how often passes before the last read rows of a kind.
      record: bytes that a process keeps on disk of what belongs to no layer, if it keeps any layers there.
    """

    alone: tuple[bool, ...]
    again: Mapping[Kind, int] = field(default_factory=dict)
    record: int = 0

    def are_alone(self, num_stacks: int) -> list[bool]:
        """By stack, of so many: where arithmetic finds others than a walk has, all of them or none."""
        return list(self.alone) if len(self.alone) == num_stacks else [all(self.alone)] * num_stacks


@dataclass(frozen=True)
class ScoredWalk:
    """One plan that walks over layers, and what is predicted of it.

    Args:
      plan: resolved, with its budget.
      sizes, peaks: of its rows and beside them.
      homes: of its rows.
      rates: that the time goes by.
      cost: of a step.
      tokens: of a step.
      mfu: the model's own arithmetic as a share of what the devices could do; None where their peak is unknown.
      record: bytes that a process has on disk beside rows.
    """

    plan: Plan
    sizes: RowSizes
    peaks: Peaks
    homes: Homes
    rates: WalkRates
    cost: WalkCost
    tokens: int
    mfu: float | None
    record: int = 0

    @property
    def occupied(self) -> Occupied:
        return occupied(self.sizes, self.peaks, self.homes)


def walks_in(space: Space, num_devices: int) -> list[Plan]:
    """The plans of a space without stages, grids and experts apart, with ZeRO 3 over all copies unless it is fixed."""
    found = []
    for arrangement in space.arrangements(num_devices):
        table = space.table(arrangement, num_devices)
        # A walk makes each layer again anyway: `remat` says only what of it is kept while its gradient is made.
        fits = (table.pipeline == 1) & (table.overlap == 1)
        fits &= table.remat == REMATS.index(space.fixed.get("remat", "none"))
        if "zero" not in space.fixed:
            fits &= (table.zero == table.zero.max(initial=0)) & (table.zero_group == table.data)
        if arrangement.tensor.mode == "1d" and arrangement.expert == 1:
            found += [plan_at(arrangement, table, int(row)) for row in np.nonzero(fits)[0]]
    return found


def score_walk(question: Question, plan: Plan, updates: Updates | None = None) -> ScoredWalk:
    """What is predicted of a resolved plan with a budget.

    Args:
      question: the model, its batch and the devices.
      plan: the plan.
      updates: of the optimizer; None: all are made in a pass of their own, and the disk has nothing but rows.

    Raises:
      TooLittle: it does not fit; with what would.
      ValueError: the layout can't split the model so.
    """
    arrangement = arrangement_of(plan)
    split = question.split_or_reason(arrangement)
    if isinstance(split, str):
        raise ValueError(split)
    work, hardware = question.work(arrangement), question.hardware_at(plan.num_devices)
    sizes, peaks = row_sizes(work, split, plan, hardware)
    rates, compute = rates_of(hardware), _compute(question, work, split, plan, hardware)

    def cost_of(homes: Homes) -> WalkCost:
        return walk_cost(sizes, homes, rates, compute, work.tokens, reading_again(updates.again if updates else {}))

    is_timed = rates.link is not None and compute is not None
    record = updates.record if updates else 0
    homes = choose_homes(
        sizes, peaks, plan.budget, plan.host, plan.disk, plan.offload, record,
        seconds=(lambda homes: cost_of(homes).total or 0.0) if is_timed else None,
        alone=updates.are_alone(max(map(len, sizes.values()), default=0)) if updates else (),
        defers=updates is not None,
    )  # fmt: skip
    cost = cost_of(homes)
    peak = hardware.matmul_flops(plan.precision)
    mfu = work.model_flops / (plan.num_devices * peak * cost.total) if peak and cost.total else None
    record = record if homes.is_durable(sizes) else 0
    return ScoredWalk(plan, sizes, peaks, homes, rates, cost, work.tokens, mfu, record)


def row_sizes(work: Work, split: WorkSplit, plan: Plan, hardware: Hardware) -> tuple[RowSizes, Peaks]:
    """Rows of a resolved plan, and what a device needs beside them; one process for the devices of each host."""
    parts = part_memory(work, split, plan, hardware)
    stacks = [part for part in parts if part.repeats > 1]
    local = min(hardware.devices_per_host, plan.num_devices)

    def row(kind: Kind, size: float) -> RowBytes:
        # Each device has its own copy in host memory; on disk equal ones are one. What layers are handed is whole on
        # all devices that share a matmul.
        if kind == "inputs":
            parts = plan.data * plan.sequence.size
        else:
            shares = plan.zero_stage >= (3 if kind in ("params", "frozen") else 1)
            parts = plan.tensor.size * (plan.zero_group * plan.sequence.size if shares else 1)
        return RowBytes(round(size), round(size) * local, round(size) * min(local, parts))

    of: dict[Kind, list[float]] = {
        "params": [part.params for part in stacks],
        "frozen": [part.frozen for part in stacks],
        "opt": [part.optimizer for part in stacks],
        "grads": [part.grads for part in stacks],
        "inputs": [plan.microbatches * part.handed for part in stacks],
    }
    sizes: RowSizes = {
        kind: tuple((row(kind, size),) * part.repeats for size, part in zip(rows, stacks, strict=True))
        for kind, rows in of.items()
        if any(rows)
    }
    return sizes, _peaks(work, parts, plan)


def _peaks(work: Work, parts: list[PartMemory], plan: Plan) -> Peaks:
    at = [place for place, part in enumerate(parts) if part.repeats > 1]
    stacks, num = [parts[place] for place in at], plan.microbatches
    rest = [part for part in parts if part.repeats == 1]
    behind = max(at, default=-1) + 1
    outside = sum(part.params + part.frozen + part.grads + part.optimizer for part in rest)
    outside += work.batch_bytes / plan.data
    # What each stack is given beside its layers' stream is there until its backward pass is over, and what each but the
    # last hands on.
    outside += num * (sum(part.passing for part in stacks) + sum(part.handed for part in stacks[:-1]))
    # What goes from layer to layer, of all micro-batches: the one that a layer is given, and the one that it gives.
    stream = num * max((part.handed for part in stacks), default=0.0)
    streams = 2 * stream
    learned = num * max((part.passing for part in stacks), default=0.0)
    layer = max((part.working for part in stacks), default=0.0)
    before = max((part.working for part in parts[:behind] if part.repeats == 1), default=0.0)
    ends = max((part.working for part in parts[behind:]), default=before)
    # The optimizer's own values, were none of them in the place of another, are one more set of parameters.
    update = max((part.params for part in parts), default=0.0)
    # What a layer's gradients are added up in, before they are a row.
    sums = max((part.grads for part in stacks), default=0.0)
    return Peaks(
        round(outside), round(streams + max(layer, before)), round(streams + learned + ends),
        round(streams + learned + max(layer + sums, before)), round(update),
        birth=round(max((part.params for part in stacks), default=0.0)),
        # One of these there is beside an update on the way: what a layer is given, or the gradient of that, with its
        # own before they are a row.
        fused=round(stream + learned + sums + update), deferred=round(stream + update),
    )  # fmt: skip


def _compute(
    question: Question, work: Work, split: WorkSplit, plan: Plan, hardware: Hardware
) -> dict[Phase, float] | None:
    """Seconds of each pass, transfers between devices with them, as the same plan has them without a walk; None where
    the devices' rates are unknown."""
    if hardware.matmul_flops(plan.precision) is None:
        return None
    table = PlanTable.of([replace(plan, remat="block")])
    found = question.durations(work, split, table, hardware)
    of = {name: float(getattr(found, name)[0]) for name in PARTS}
    both = sum(of[name] for name in ("matmul", "attention", "elementwise", "tensor", "sequence"))
    # Parameters are gathered for each of the two passes.
    return {
        "forward": FORWARD * both + of["gather"] / 2,
        "backward": (1 - FORWARD) * both + of["recompute"] + of["data"] + of["gather"] / 2,
        "update": of["optimizer"] + of["overhead"],
    }
