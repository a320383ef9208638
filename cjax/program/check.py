"""One plan against one device, so that nobody need trust us."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cjax.tree import leaf_names

PyTree = Any
TOLERANCE = 1e-5  # float32, up to 12 layers: rounding in another order stays below it, a wrong factor does not


@dataclass(frozen=True)
class Check:
    """How far a plan's loss and gradients are from those of one device.

    Attributes:
      loss: both losses.
      worst: the leaf farthest off.
      error: the distance of its gradients, as a part of their norm.
    """

    plan: str
    loss: tuple[float, float]
    worst: str
    error: float

    @property
    def is_close(self) -> bool:
        """Whether every gradient agrees to float32 rounding."""
        return self.error <= 1

    def __str__(self) -> str:
        verdict = "agrees with one device" if self.is_close else "DIFFERS from one device"
        return (
            f"{self.plan}: {verdict}; loss {self.loss[0]:.7g} against {self.loss[1]:.7g}; "
            f"worst gradient {self.worst}, at {self.error:.2g} of what rounding allows"
        )


def compare_gradients(plan: str, mine: tuple[Any, PyTree], theirs: tuple[Any, PyTree]) -> Check:
    """Compare (loss, gradients) leaf by leaf.

    A leaf may be off by 1e-5 of its norm, and by 1e-7 of the whole gradient's: where the true gradient is zero (the
    bias of an attention key), rounding is all there is.
    """
    names = leaf_names(theirs[1])
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(jax.tree.leaves(mine[1]), jax.tree.leaves(theirs[1]), strict=True)
    ]
    whole = float(np.sqrt(sum(np.sum(b**2) for _, b in pairs)))
    errors = [
        float(np.linalg.norm(a - b)) / (TOLERANCE * float(np.linalg.norm(b)) + 1e-7 * whole + np.finfo(float).tiny)
        for a, b in pairs
    ]
    worst = int(np.argmax(errors))
    return Check(plan, (float(mine[0]), float(theirs[0])), names[worst], errors[worst])
