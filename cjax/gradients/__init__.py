"""The one seam between a model and its training: parameters and a batch in, loss and gradients out."""

from cjax.gradients.accumulated import Evaluated, Graded, Gradients, divisors, mean, reduction
from cjax.gradients.build import Built, build_gradients
from cjax.gradients.choose import Choice, LaidOut, Reason, choose
from cjax.gradients.line import Line, arrange_stages
from cjax.gradients.pipelined import forwarded

__all__ = [
    "Built", "Choice", "Evaluated", "Graded", "Gradients", "LaidOut", "Line", "Reason", "arrange_stages",
    "build_gradients", "choose", "divisors", "forwarded", "mean", "reduction",
]  # fmt: skip
