"""Plans: how many devices each kind of parallelism gets."""

from cjax.plan.auto import Auto, is_auto
from cjax.plan.parts import Pipeline, Remat, Sequence, Tensor, Zero
from cjax.plan.plan import Axes, Plan

__all__ = ["Auto", "Axes", "Pipeline", "Plan", "Remat", "Sequence", "Tensor", "Zero", "is_auto"]
