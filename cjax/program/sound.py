"""Values that are given for parameters: whether numbers can be made of them, and whether they are ones."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def loses(given: Any, needed: Any) -> bool:
    """Whether values of one dtype can't be had in another: complex ones as real, fractions as integers, texts as
    numbers. Precision alone may be lost."""
    return _rank(given) > max(_rank(needed), 1)


def _rank(dtype: Any) -> int:
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return next((rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


class Sound:
    """What is wrong with the values of one parameter, looked at part by part on their way to the devices.

    Args:
      dtype: of the parameter.
    """

    def __init__(self, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._given: Any = None
        self._counts: dict[str, tuple[int, int]] = {}  # NaN and infinite, by part: devices may share one

    def look(self, index: Any, values: Any) -> Any:
        """`values` of one part in the parameter's dtype. One that is too large for it is infinite."""
        if loses(values.dtype, self._dtype):
            self._given = values.dtype
            return np.zeros(values.shape, self._dtype)
        with np.errstate(over="ignore"):
            values = values.astype(self._dtype)
        if jnp.issubdtype(self._dtype, jnp.inexact):
            of: Any = jnp if isinstance(values, jax.Array) else np
            self._counts[str(index)] = int(of.isnan(values).sum()), int(of.isinf(values).sum())
        return values

    def problems(self, shape: Sequence[int]) -> list[str]:
        """What was found, for a parameter of this shape."""
        if self._given is not None:
            return [f"{self._given} given, {self._dtype} needed"]
        sums = [sum(counts) for counts in zip(*self._counts.values(), strict=True)]
        size = math.prod(shape)
        told = [f"{num:,} of {size:,} are {kind}" for num, kind in zip(sums, ("NaN", "infinite"), strict=False) if num]
        return [f"{' and '.join(told)} (as {self._dtype})"] if told else []
