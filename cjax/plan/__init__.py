"""Plans: how many devices each kind of parallelism gets."""

from cjax.plan.parts import Pipeline, Remat, Sequence, Tensor, Zero
from cjax.plan.plan import Axes, Plan

__all__ = ["Axes", "Pipeline", "Plan", "Remat", "Sequence", "Tensor", "Zero"]
