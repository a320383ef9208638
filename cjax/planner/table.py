"""Plans as columns: a NumPy array for each word, so that a cost is computed for a hundred thousand plans at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cjax.plan import Plan

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
REMATS = ("none", "dots", "block")
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class PlanTable:
    """Resolved plans that share their tensor, sequence and expert words, a column for each other word.

    Args:
      data, pipeline, chunks, microbatches, zero, zero_group: int64[plans]; `data` counts the devices with the same
        experts, all where every device has all; the group is `data` where none is named.
      schedule, remat, precision: int64[plans], places in `SCHEDULES`, `REMATS` and `PRECISIONS`.
      overlap: int64[plans], micro-batches that are computed at a time.
    """

    data: np.ndarray
    pipeline: np.ndarray
    schedule: np.ndarray
    chunks: np.ndarray
    microbatches: np.ndarray
    zero: np.ndarray
    zero_group: np.ndarray
    remat: np.ndarray
    precision: np.ndarray
    overlap: np.ndarray

    @property
    def turns(self) -> np.ndarray:
        """How often each device computes: as often as there are micro-batches, or groups of such."""
        return self.microbatches // self.overlap

    def __len__(self) -> int:
        return len(self.data)

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> "PlanTable":
        """The columns of resolved plans of one arrangement: of tensor, sequence and expert words.

        >>> PlanTable.of([Plan.parse("data=8 zero=1"), Plan.parse("data=8 remat=block")]).remat.tolist()
        [0, 2]
        """
        assert len({(plan.tensor, plan.sequence, plan.expert) for plan in plans}) <= 1, "a table has one arrangement"
        rows = [
            (
                plan.data // plan.expert,
                plan.pipeline.size,
                SCHEDULES.index(plan.pipeline.schedule),
                plan.pipeline.chunks,
                plan.microbatches,
                plan.zero_stage,
                plan.zero_group // plan.expert,
                REMATS.index(plan.remat),
                PRECISIONS.index(plan.precision),
                plan.overlap,
            )
            for plan in plans
        ]
        return cls(*np.asarray(rows, np.int64).reshape(len(rows), 10).T)
