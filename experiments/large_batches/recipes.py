"""The optimizers of `large_batch.py` and how their rates follow the batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import optax

from cjax import optim
from cjax.optim.schedules import scale_rate, warmup_polynomial

TUNED_AT = 512  # the batch at which every rate was tuned


@dataclass(frozen=True)
class Recipe:
    """One optimizer's rule for every batch.

    Attributes:
      make: the optimizer of a schedule and a batch size.
      rate: the peak rate at batch 512.
      rule: how it grows with the batch.
      most: what it grows to at most.
    """

    make: Callable[[optax.Schedule, int], optax.GradientTransformation]
    rate: float
    rule: Literal["linear", "sqrt"]
    most: float = math.inf

    def rate_at(self, batch: int) -> float:
        return min(scale_rate(self.rate, batch, TUNED_AT, self.rule), self.most)


def _b2(batch: int) -> float:
    """LAMB's b2: its squares are averaged over as many examples at every batch, as with 0.999 at 512; at least 0.9.

    1 - b2 in proportion to the batch belongs to the square-root rule: Malladi et al., "On the SDEs and Scaling Rules
    for Adaptive Gradient Algorithms", 2022. MLPerf's BERT runs also go from 0.999 at batch 256 to 0.9 at 16,384.
    """
    return max(1 - 0.001 * batch / TUNED_AT, 0.9)


# SGD and Adam follow their usual rules without a limit, as they would be used. LARS has a trust coefficient of 1
# instead of 0.001: its rate is then the part of a layer that a step moves, and of the size that norms and biases,
# which take the rate as it is, bear too.
RECIPES = {
    "sgd": Recipe(lambda rate, batch: optax.sgd(rate, momentum=0.9), 0.4, "linear"),
    "adam": Recipe(lambda rate, batch: optax.adam(rate), 0.012, "sqrt"),
    "lars": Recipe(lambda rate, batch: optim.lars(rate, trust_coefficient=1.0), 0.012, "linear", most=0.05),
    "lamb": Recipe(lambda rate, batch: optim.lamb(rate, b2=_b2(batch)), 0.015, "sqrt", most=0.04),
}


def warmup_share(batch: int) -> float:
    """Of the steps: 1/80 at batch 512 and in proportion to it, as You et al. have it, up to a tenth."""
    return min(batch / TUNED_AT / 80, 0.1)


def schedule(rate: float, batch: int, num_steps: int) -> optax.Schedule:
    """Linear warm-up, then linear decay to 0."""
    return warmup_polynomial(rate, num_steps, warmup_share(batch))
