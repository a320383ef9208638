"""The one seam between a model and its training: parameters and a batch in, loss and gradients out."""

from cjax.gradients.accumulated import (
    Denominator,
    Evaluated,
    Graded,
    Gradients,
    Loss,
    Reduction,
    divisors,
    locally_accumulated,
    mean,
    micro_batched,
    plain,
    reduction,
    sharing,
)
from cjax.gradients.line import Line, arrange_stages
from cjax.gradients.pipelined import forwarded, pipelined

__all__ = [
    "Denominator",
    "Evaluated",
    "Graded",
    "Gradients",
    "Line",
    "Loss",
    "Reduction",
    "arrange_stages",
    "divisors",
    "forwarded",
    "locally_accumulated",
    "mean",
    "micro_batched",
    "pipelined",
    "plain",
    "reduction",
    "sharing",
]
