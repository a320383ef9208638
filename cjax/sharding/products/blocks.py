"""Rows in groups, each multiplied by its group's weight, in blocks of rows.

XLA multiplies all rows by all groups' weights and masks what is not meant (on CPUs and on GPUs, JAX 0.10.2 and
0.12.0.1): as many times the arithmetic as there are groups, and a masked copy of the rows for each. Here rows are put
in blocks of so many, each of one group, and a block is multiplied by one weight (Gale et al., MegaBlocks, 2023). How
many blocks a group fills is known when rows are there; all together fill at most as many as all rows in a row would,
and one more for each group. What a group's last block has room for besides, and blocks that no group needs, are zeros.

Each block needs a copy of its weight, so that only a few are multiplied at once, one such set of blocks behind another.
Long blocks have more zeros, short ones more copies: for N rows in E groups, blocks of M rows take in all
(1 + E M / N) (1 + C / M) times what the product alone would, of which sqrt(C N / E) is the best M.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cjax.jax_compat.core import Params

TILE = 128  # of a GPU's matmuls: a block is so many rows, or a multiple
# C above. Rows that an H100 multiplies by a weight, at 0.75 of 989 TFLOP/s, in the time that a block takes besides. For
# the product and for the rows' gradient its copy is written, and weight and copy are read, two bytes a number; its own
# gradient is written, read, and added to a sum, four bytes each: 28 bytes at 3.35 TB/s, for six operations a row.
COPY = 1033
AT_ONCE, COPIED = 8, 64 * 2**20  # blocks that are multiplied at once, and bytes of their weights' copies


@functools.cache
def block_length(num_rows: int, num_groups: int) -> int | None:
    """How many rows a block has; None where all rows by all groups take no longer.

    >>> block_length(16384, 8), block_length(16, 8)
    (1408, None)
    """
    length = max(1, round(math.sqrt(COPY * num_rows / num_groups) / TILE)) * TILE
    takes = _num_blocks(num_rows, num_groups, length) * (length + COPY)
    return length if takes <= num_groups * num_rows else None


def rows_multiplied(num_rows: int, num_groups: int) -> int:
    """In how many rows' time a device multiplies so many in groups: in blocks, copies of weights included, or all rows
    by all groups.

    >>> rows_multiplied(16384, 8), rows_multiplied(16, 8)
    (48820, 128)
    """
    length = block_length(num_rows, num_groups)
    return num_groups * num_rows if length is None else _num_blocks(num_rows, num_groups, length) * (length + COPY)


def rows_in_blocks(num_rows: int, num_groups: int) -> int:
    """How many rows the blocks of so many have, zeros included; none where they are in none.

    >>> rows_in_blocks(16384, 8), rows_in_blocks(16, 8)
    (28160, 0)
    """
    length = block_length(num_rows, num_groups)
    return 0 if length is None else _num_blocks(num_rows, num_groups, length) * length


def _num_blocks(num_rows: int, num_groups: int, length: int) -> int:
    return -(-num_rows // length) + num_groups


class _Places(NamedTuple):
    """Where rows are in blocks.

    Args:
      rows: int[sets, blocks, length], which row of all is there; one behind the last where none is.
      groups: int[sets, blocks], of which group each block is.
      back: int[rows], where each row is, counted through all blocks; for those that no group has, where zeros are.
    """

    rows: jax.Array
    groups: jax.Array
    back: jax.Array


@dataclass(frozen=True)
class Blocks:
    """A product of rows in groups: its parameters, and its blocks.

    Args:
      left, right: positions of what is summed over, in the rows and in a group's weight.
      length: of a block, in rows.
      dtype: of the result.
      precision: as `jax.lax.dot_general` takes it.
      at_once: how many blocks are multiplied at once.
      widens: whether operands of 16 bits are made wide to be summed in float32, for which CPUs have no kernels.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    length: int
    dtype: Any
    precision: Any = None
    at_once: int = AT_ONCE
    widens: bool = False

    def multiply(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """The product: [rows, ...]; zeros for rows that no group has.

        Args:
          rows: [rows, ...].
          weights: [groups, ...].
          sizes: int[groups], how many rows each has; those of the first come first.
        """
        call = jax.custom_vjp(self._forward)
        call.defvjp(lambda *operands: (self._forward(*operands), operands), self._backward)
        return call(rows, weights, sizes)

    def _forward(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        # Of both the first dim is now that of the blocks; a block's rows come behind it.
        summed = tuple(d + 1 for d in self.left), tuple(d + 1 for d in self.right)

        def made(blocks: jax.Array, of_blocks: jax.Array) -> jax.Array:
            return self._product(blocks, of_blocks, summed, self.dtype)

        return self._by_block(made, rows, weights, self._places(len(rows), sizes))

    def _backward(
        self, operands: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, None]:
        rows, weights, sizes = operands
        places = self._places(len(rows), sizes)
        free = [d for d in range(weights.ndim - 1) if d not in self.right]
        summed = tuple(range(2, 2 + len(free))), tuple(d + 1 for d in free)
        # The product has what was summed over in the weight's order; the rows have it in theirs.
        lefts = [left for _, left in sorted(zip(self.right, self.left, strict=True))]
        back = sorted(range(len(lefts)), key=lefts.__getitem__)

        def made(blocks: jax.Array, of_blocks: jax.Array) -> jax.Array:
            found = self._product(blocks, of_blocks, summed, rows.dtype)
            return found.transpose(0, 1, *(2 + at for at in back))

        of_rows = self._by_block(made, gradient, weights, places)
        return of_rows, self._of_weights(rows, gradient, weights, places), None

    def _of_weights(self, rows: jax.Array, gradient: jax.Array, weights: jax.Array, places: _Places) -> jax.Array:
        """The gradient of the weights, added up over blocks in float32, or wider."""
        wide = jnp.promote_types(weights.dtype, jnp.float32)
        # The product has what was summed over first, in the rows' order, and what was made behind it.
        found = [right for _, right in sorted(zip(self.left, self.right, strict=True))]
        found += [d for d in range(weights.ndim - 1) if d not in self.right]
        order = [found.index(d) for d in range(weights.ndim - 1)]

        def add(total: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            at, groups = of
            made = self._product(_taken(rows, at), _taken(gradient, at), ((1,), (1,)), wide)
            for group, each in zip(groups, made.transpose(0, *(1 + d for d in order)), strict=True):
                sum_ = lax.dynamic_index_in_dim(total, group, keepdims=False) + each
                total = lax.dynamic_update_index_in_dim(total, sum_, group, 0)
            return total, None

        total, _ = lax.scan(add, jnp.zeros(weights.shape, wide), (places.rows, places.groups))
        return total.astype(weights.dtype)

    def _product(self, left: jax.Array, right: jax.Array, summed: Any, dtype: Any) -> jax.Array:
        if self.widens:
            left, right = left.astype(dtype), right.astype(dtype)
        numbers = (summed, ((0,), (0,)))
        return lax.dot_general(left, right, numbers, precision=self.precision, preferred_element_type=dtype)

    def _by_block(
        self,
        made: Callable[[jax.Array, jax.Array], jax.Array],
        rows: jax.Array,
        weights: jax.Array,
        places: _Places,
    ) -> jax.Array:
        """What is made of blocks of rows and their groups' weights, each row in its place again."""

        def some(_: None, of: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            at, groups = of
            return None, made(_taken(rows, at), weights[groups])

        _, found = lax.scan(some, None, (places.rows, places.groups))
        return _taken(found.reshape(-1, *found.shape[3:]), places.back)

    def _places(self, num_rows: int, sizes: jax.Array) -> _Places:
        length, dtype = self.length, sizes.dtype
        fill = -(-sizes // length)  # blocks that each group fills
        ends, last = jnp.cumsum(sizes), jnp.cumsum(fill)
        num_sets = -(-_num_blocks(num_rows, len(sizes), length) // self.at_once)
        block, row = lax.iota(dtype, num_sets * self.at_once), lax.iota(dtype, num_rows)
        group = jnp.minimum((block[:, None] >= last).sum(1, dtype=dtype), len(sizes) - 1)
        first = (ends - sizes)[group] + (block - (last - fill)[group]) * length
        at = first[:, None] + lax.iota(dtype, length)
        is_there = (at < ends[group][:, None]) & (block < last[-1])[:, None]
        mine = jnp.minimum((row[:, None] >= ends).sum(1, dtype=dtype), len(sizes) - 1)
        back = (last - fill)[mine] * length + row - (ends - sizes)[mine]
        sets = (num_sets, self.at_once)
        return _Places(jnp.where(is_there, at, num_rows).reshape(*sets, length), group.reshape(sets), back)


def _taken(values: jax.Array, at: jax.Array) -> jax.Array:
    """`values` by their first dim, zeros for what is behind the last of them."""
    return values.at[at].get(mode="fill", fill_value=0)


def blocks_of(operands: Sequence[jax.Array], params: Params, widens: bool) -> Blocks | None:
    """How a product of rows in groups is made in blocks; None where it is better made at once, by XLA.

    Args:
      operands: a device's own rows, weights, and how many rows each group has.
      params: of the product, see `cjax.trace.dims.products.is_by_rows`.
      widens: see `Blocks`.
    """
    rows, weights, _ = operands
    ((left, right), _) = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    length = block_length(len(rows), len(weights))
    if length is None or len(left) != rows.ndim - 1 or 0 in (*rows.shape, *weights.shape):
        return None
    dtype = params["preferred_element_type"] or jnp.result_type(rows, weights)
    copied = math.prod(weights.shape[1:]) * weights.dtype.itemsize
    at_once = max(1, min(AT_ONCE, COPIED // copied))
    return Blocks(tuple(left), tuple(d - 1 for d in right), length, dtype, params["precision"], at_once, widens)
