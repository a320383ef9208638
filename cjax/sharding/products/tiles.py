"""Rows in groups, each multiplied by its group's weight, by kernels for NVIDIA's Hopper cards.

A kernel goes over the tiles of the result, and a tile in which one group ends and another begins is made for each of
both. So there are at most as many tiles of rows more as there are groups, and no weight is copied: 2.5 to 4 times as
fast on an H200 as blocks of rows (`blocks.py`), which other cards have (docs/gpu.md). The gradient of the weights is
summed in float32 over all rows of a group, and rounded once.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Params
from cjax.jax_compat.kernels import TILE, by_group, is_hopper, of_groups

# A row's time in them, of that in a matmul of cuBLAS: 0.58 and 0.66 of the peak rate in two mixtures on an H200.
SLOWER = 1.2


def suits(*dims: float | Sequence[float] | np.ndarray) -> np.ndarray:
    """Whether the kernels multiply so many rows, from and to these numbers of features; of arrays each.

    >>> suits([4096, 4096, 16], [1024, 1000, 1024], 3584).tolist()
    [True, False, False]
    """
    return functools.reduce(operator.and_, [(np.asarray(num) > 0) & (np.asarray(num) % TILE == 0) for num in dims])


def rows_in_tiles(num_rows: Any, num_groups: int) -> Any:
    """In how many rows' time of a matmul the kernels multiply so many in groups.

    >>> rows_in_tiles(16384, 8)
    20736.0
    """
    return SLOWER * (num_rows + (num_groups - 1) * TILE)


@dataclass(frozen=True)
class Tiles:
    """A product of rows in groups, by a kernel.

    Args:
      order: a weight's dims, those summed over first, in the order in which rows have them.
      num_summed: how many these are.
      device: for which it is compiled.
    """

    order: tuple[int, ...]
    num_summed: int
    device: Any

    @property
    def is_turned(self) -> bool:
        """Whether a weight has its dims that are summed over behind the others: the kernel takes it so."""
        summed, made = self.order[: self.num_summed], self.order[self.num_summed :]
        return bool(made) and (*made, *summed) == tuple(range(len(self.order)))

    def multiply(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """The product: [rows, ...]; zeros for rows that no group has.

        Args:
          rows: [rows, ...], what is summed over behind the rows.
          weights: [groups, ...].
          sizes: int32[groups], how many rows each has; those of the first come first.
        """
        made = [weights.shape[1 + d] for d in self.order[self.num_summed :]]
        inner, outer = math.prod(rows.shape[1:]), math.prod(made)
        if self.is_turned:
            weights = weights.reshape(-1, outer, inner)
        else:
            weights = weights.transpose(0, *(1 + d for d in self.order)).reshape(-1, inner, outer)
        call = jax.custom_vjp(self._forward)
        call.defvjp(lambda *operands: (self._forward(*operands), operands), self._backward)
        return call(rows.reshape(len(rows), inner), weights, sizes).reshape(len(rows), *made)

    def _forward(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return _of_groups_alone(by_group(rows, weights, sizes, self.is_turned), sizes)

    def _backward(
        self, operands: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, None]:
        rows, weights, sizes = operands
        of_rows = _of_groups_alone(by_group(gradient, weights, sizes, not self.is_turned), sizes)
        sides = (gradient, rows) if self.is_turned else (rows, gradient)
        return of_rows, of_groups(*sides, sizes, self.device), None


def _of_groups_alone(made: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeros for rows that no group has, where a kernel leaves what was in memory before."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, made.shape, 0) < sizes.sum(), made, 0)


def tiles_of(operands: Sequence[jax.Array], params: Params, device: Any) -> Tiles | None:
    """How a product of rows in groups is made by kernels; None where none of them does it.

    Args:
      operands: a device's own rows, weights, and how many rows each group has.
      params: of the product, see `cjax.trace.dims.products.is_by_rows`.
      device: that has these.
    """
    rows, weights, _ = operands
    ((left, right), _) = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    dtypes = {rows.dtype, weights.dtype, jnp.dtype(params["preferred_element_type"] or rows.dtype)}
    if not is_hopper(device) or len(dtypes) > 1 or rows.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    if sorted(left) != list(range(1, rows.ndim)):
        return None
    summed = [right - 1 for _, right in sorted(zip(left, right, strict=True))]
    made = [d for d in range(weights.ndim - 1) if d not in summed]
    features = math.prod(rows.shape[1:]), math.prod(weights.shape[1 + d] for d in made)
    return Tiles((*summed, *made), len(summed), device) if suits(len(rows), *features) else None
