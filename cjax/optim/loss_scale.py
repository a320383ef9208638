"""Dynamic loss scaling: gradients of float16 kept above what float16 loses, and below what it can hold."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossScaleState(NamedTuple):
    """What `LossScale` knows of the steps so far; part of every state, whatever its precision.

    Attributes:
      scale: float32[], the factor on the next loss.
      good_steps: int32[], finite steps in a row since the factor last changed.
      overflows: int32[], steps that were not finite since the factor last grew.
      num_skipped: int32[], steps of the whole run that changed nothing, whatever the precision.

    >>> int(LossScale().init().num_skipped)
    0
    """

    scale: jax.Array
    good_steps: jax.Array
    overflows: jax.Array
    num_skipped: jax.Array


@dataclass(frozen=True)
class LossScale:
    """How the factor on the loss follows the gradients.

    A step whose gradients are not finite is skipped everywhere. From the `hysteresis`-th overflow since the last growth
    on, each multiplies the factor by `backoff`; `growth_interval` finite steps in a row multiply it by `growth`.

    Args:
      initial: the first factor. Powers of two round nothing.
      growth: at least 1.
      backoff: above 0 and at most 1. With both 1 the factor is fixed.
      growth_interval: steps.
      hysteresis: overflows that it takes, at least 1.
      minimum, maximum: of the factor. At the minimum, an overflow is the model's own.

    Raises:
      ValueError: a number out of these bounds.

    >>> scaling = LossScale(initial=8.0)
    >>> state = scaling.adjust(scaling.init(), jnp.array(False))
    >>> float(state.scale), int(state.num_skipped)
    (4.0, 1)

    Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740; hysteresis as in Megatron-LM.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 1
    minimum: float = 1.0
    maximum: float = 2.0**32

    def __post_init__(self) -> None:
        bounds = {
            "initial": (self.minimum, self.maximum),
            "growth": (1, float("inf")),
            "growth_interval": (1, float("inf")),
            "hysteresis": (1, float("inf")),
            "minimum": (2.0**-24, self.maximum),
        }
        for field in fields(self):
            value, (low, high) = getattr(self, field.name), bounds.get(field.name, (0, float("inf")))
            if not low <= value <= high:
                raise ValueError(f"LossScale: {field.name} is {value}; it must be from {low:g} to {high:g}")
        if not 0 < self.backoff <= 1:
            raise ValueError(f"LossScale: backoff is {self.backoff}; it must be above 0 and at most 1, such as 0.5")

    def init(self) -> LossScaleState:
        """The state before the first step: the factor is `initial`, and nothing is counted yet."""
        zero = jnp.zeros((), jnp.int32)
        return LossScaleState(jnp.float32(self.initial), zero, zero, zero)

    def adjust(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step whose gradients were `finite`, or not."""
        overflows = jnp.where(finite, state.overflows, state.overflows + 1)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grows = finite & (good_steps >= self.growth_interval)
        shrinks = ~finite & (overflows >= self.hysteresis)
        factor = jnp.where(grows, self.growth, jnp.where(shrinks, self.backoff, 1.0))
        return LossScaleState(
            jnp.clip(state.scale * factor, self.minimum, self.maximum).astype(jnp.float32),
            jnp.where(grows, 0, good_steps),
            jnp.where(grows, 0, overflows),
            count_skipped(state, finite).num_skipped,
        )


def count_skipped(state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """The state after a step of a precision that needs no factor: it counts what was skipped, and nothing else.

    Args:
      state: before the step.
      finite: bool[], whether loss and gradients were.

    >>> int(count_skipped(LossScale().init(), jnp.array(False)).num_skipped)
    1
    """
    return state._replace(num_skipped=state.num_skipped + (1 - finite.astype(jnp.int32)))
