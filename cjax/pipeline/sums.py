"""Gradients added up over micro-batches, in float32 where they were made in less."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def sum_like(x: Any) -> jax.Array:
    """Room for a sum of gradients: of rounded values in float32, or adding up would round at every micro-batch."""
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def added(sums: Sequence[jax.Array], more: Sequence[jax.Array]) -> list[jax.Array]:
    """`sums` and what is added to each, in the sums' dtypes."""
    return [total + x.astype(total.dtype) for total, x in zip(sums, more, strict=True)]
