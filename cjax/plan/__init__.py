"""Plans: how many devices each kind of parallelism gets."""

from cjax.plan.parts import Pipeline, Sequence, Tensor, Zero
from cjax.plan.plan import Plan, require_supported

__all__ = ["Pipeline", "Plan", "Sequence", "Tensor", "Zero", "require_supported"]
