"""Rows in groups by each's weight, in blocks, against all rows by all groups' weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from cjax.sharding.products.blocks import TILE, Blocks, block_length, blocks_of, rows_in_blocks, rows_multiplied

ROWS, GROUPS = 23, 4
RNG = np.random.default_rng(0)
# Dims of a row and of a group's weight, and which of them are summed over.
FORMS = {
    "a matrix": ((6,), (6, 5), ((1,), (0,))),
    "two parts of one": ((6,), (2, 6, 5), ((1,), (1,))),
    "heads and features": ((3, 2), (2, 5, 3), ((1, 2), (2, 0))),
}


def of_all(left: tuple[int, ...], right: tuple[int, ...]) -> lax.RaggedDotDimensionNumbers:
    summed = left, tuple(d + 1 for d in right)
    return lax.RaggedDotDimensionNumbers((summed, ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])


@functools.cache
def both(form: str, length: int, at_once: int) -> Any:
    row, weight, (left, right) = FORMS[form]
    x, w = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((ROWS, *row), (GROUPS, *weight)))
    blocks, numbers = Blocks(left, right, length, jnp.float32, at_once=at_once), of_all(left, right)

    def results(sizes: jax.Array) -> Any:
        def of(product: Any) -> Any:
            return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(product(x, w, sizes))), (0, 1))(x, w)

        return of(blocks.multiply), of(lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, numbers))

    return jax.jit(results)


@given(
    st.lists(st.integers(0, ROWS), min_size=GROUPS - 1, max_size=GROUPS - 1),
    st.integers(0, 5),
    st.sampled_from(
        [("a matrix", 4, 3), ("a matrix", 30, 8), ("two parts of one", 5, 1), ("heads and features", 7, 2)]
    ),
)
def test_equals_all_rows_by_all_weights(ends: list[int], spare: int, how: tuple[str, int, int]) -> None:
    """Groups that are empty or end anywhere, rows that no group has, blocks longer than all rows."""
    sizes = np.diff([0, *sorted([*ends, ROWS])]).astype(np.int32)
    sizes[-1] = max(0, sizes[-1] - spare)
    mine, theirs = both(*how)(sizes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), mine, theirs)


def test_sums_of_sixteen_bits_are_as_exact_as_xlas() -> None:
    """The gradient of a weight is a sum over all of its rows: over blocks, too, in float32."""
    num, sizes = 8192, jnp.array([4096, 4096], jnp.int32)
    x, w, g = (jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in ((num, 8), (2, 8, 4), (num, 4)))
    blocks = Blocks((1,), (0,), TILE, jnp.bfloat16, widens=True)

    def gradient(product: Any) -> Any:
        return np.asarray(jax.jit(lambda x, w, g: jax.vjp(product, x, w)[1](g)[1])(x, w, g), np.float64)

    halves = [(np.asarray(x, np.float64)[at], np.asarray(g, np.float64)[at]) for at in np.split(np.arange(num), 2)]
    exact = np.stack([of_x.T @ of_g for of_x, of_g in halves])
    mine = np.abs(gradient(lambda x, w: blocks.multiply(x, w, sizes)) - exact).max()
    assert mine <= 1.5 * np.abs(gradient(lambda x, w: lax.ragged_dot(x, w, sizes)) - exact).max()


@pytest.mark.parametrize(("num_rows", "num_groups"), [(16384, 8), (65536, 8), (16384, 64), (4096, 16)])
def test_blocks_take_less_than_all_rows_by_all_groups(num_rows: int, num_groups: int) -> None:
    length = block_length(num_rows, num_groups)
    assert length is not None and length % TILE == 0
    assert num_rows < rows_in_blocks(num_rows, num_groups) < rows_multiplied(num_rows, num_groups)
    assert rows_multiplied(num_rows, num_groups) <= num_groups * num_rows


def test_few_rows_are_multiplied_at_once() -> None:
    """As of a token that is generated: the weights are read once each, and the rest is nothing."""
    operands = jnp.ones((16, 8)), jnp.ones((8, 8, 8)), jnp.full(8, 2)
    params = {"ragged_dot_dimension_numbers": of_all((1,), (0,)), "preferred_element_type": None, "precision": None}
    assert blocks_of(operands, params, widens=True) is None
    assert rows_in_blocks(16, 8) == 0 and rows_multiplied(16, 8) == 128
