"""The one seam between a model and its training: parameters and a batch in, loss and gradients out."""

from cjax.gradients.accumulated import (
    Denominator,
    Evaluated,
    Graded,
    Gradients,
    Scale,
    averaged,
    cut_rows,
    divisor_of,
    divisors,
    mean,
)
from cjax.gradients.build import Built, build_gradients, divide_by, total_of
from cjax.gradients.choose import Choice, LaidOut, Reason, choose
from cjax.gradients.line import Line, arrange_stages
from cjax.gradients.pipelined import forwarded
from cjax.gradients.reduced import reduction
from cjax.gradients.scaled import check_scaled

__all__ = [
    "Built", "Choice", "Denominator", "Evaluated", "Graded", "Gradients", "LaidOut", "Line", "Reason", "Scale",
    "arrange_stages", "averaged", "build_gradients", "check_scaled", "choose", "cut_rows", "divide_by", "divisor_of",
    "divisors", "forwarded", "mean", "reduction", "total_of",
]  # fmt: skip
