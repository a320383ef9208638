"""A model, devices and costs that are easily told, for what searches and explains."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from cjax.plan import Auto, Plan
from cjax.planner.choice.scored import SECONDS, Question
from cjax.planner.choice.space import Space
from cjax.planner.hardware import Hardware
from cjax.planner.table import PlanTable
from cjax.planner.work import Part, Work, WorkSplit

GIB = 2**30
WORK = Work((Part("layers", repeats=8),), num_rows=64, tokens=64 * 1024)


def hardware(num_devices: int, memory: float = 40, **facts: Any) -> Hardware:
    known: dict[str, Any] = {"bf16_flops": 1e14, "f32_flops": 5e13, "price": 3.6, "power": 1000.0} | facts
    return Hardware("toy", num_devices, 8, int(memory * GIB), **known)


def split(plan: Plan) -> WorkSplit:
    if plan.tensor.mode == "3d":
        raise ValueError("no cubes here")
    return WorkSplit({}, plan.axis_sizes(), ((),), (0,))


@dataclass
class Bytes:
    params: np.ndarray
    activations: np.ndarray


def memory(work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware) -> Bytes:
    """60 GiB of parameters and as much of activations, each divided by what divides it."""
    zero = np.where(table.zero > 0, table.zero_group, 1)
    state = 60 * GIB / (split.num_devices * table.pipeline) / zero
    kept = np.asarray([1.0, 0.5, 0.1])[table.remat]
    activations = 60 * GIB * kept / (table.data * split.num_devices * np.maximum(table.microbatches, table.pipeline))
    return Bytes(state, activations)


def durations(work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware) -> Any:
    """8 seconds of arithmetic on one device; transfers grow with what shares a matmul, bubbles with stages."""
    devices = table.data * table.pipeline * split.num_devices
    matmul = 8 / devices * (1 + 0.01 * table.microbatches)
    parts = dict.fromkeys(SECONDS, np.zeros(len(table)))
    parts |= {
        "matmul": matmul,
        "recompute": matmul * np.asarray([0.0, 0.1, 1 / 3])[table.remat],
        "tensor": np.full(len(table), 0.1 * (split.num_devices > 1)),
        "data": np.where(table.data > 1, 0.02, 0.0) + 0.01 * (table.zero == 3),
        "bubble": matmul * (table.pipeline - 1) / table.microbatches,
    }
    total = sum(parts.values())
    return SimpleNamespace(**parts, total=total, low=0.9 * total, high=1.2 * total, bound=0.5 * total, moved={})


def question(memory_gib: float = 40, split: Callable[[Plan], WorkSplit] = split, **facts: Any) -> Question:
    return Question(lambda plan: WORK, split, lambda num: hardware(num, memory_gib, **facts), memory, durations)


def space(auto: str = "auto", **facts: Any) -> Space:
    known = {"num_rows": (64,), "stacks": (8,), "heads": ((8, 8),), "lengths": (1024,)} | facts
    return Space(**known, auto=Auto.parse(auto))
