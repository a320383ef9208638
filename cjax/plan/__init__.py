"""Plans: how many devices each kind of parallelism gets."""

from cjax.plan.parts import Pipeline, Remat, Sequence, Tensor, Zero
from cjax.plan.plan import Axes, Plan, require_supported

__all__ = ["Axes", "Pipeline", "Plan", "Remat", "Sequence", "Tensor", "Zero", "require_supported"]
