"""What is handed to kernels for rows in groups, and what becomes of what they give; the kernels themselves are tried by
`tests/test_gpu_experts.py` where a card is, and compiled for absent ones here."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from cjax.sharding.products import tiles
from cjax.sharding.products.tiles import Tiles, rows_in_tiles, suits, tiles_of

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
AMPERE = types.SimpleNamespace(platform="gpu", compute_capability="8.0", core_count=108)
GROUPS, ROWS = 4, 256
# Dims of a row and of a group's weight, and which of them are summed over.
FORMS = {
    "a matrix": ((128,), (128, 256), ((1,), (1,))),
    "turned": ((128,), (256, 128), ((1,), (2,))),
    "two parts of one": ((128,), (2, 128, 64), ((1,), (2,))),
    "heads and features": ((2, 64), (64, 128, 2), ((1, 2), (3, 1))),
    "all of a weight": ((2, 64), (64, 2), ((2, 1), (1, 2))),
}


def operands(form: str, dtype: Any = jnp.bfloat16, rows: int = ROWS) -> tuple[jax.Array, jax.Array, Any]:
    row, weight, summed = FORMS[form]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, *row), (GROUPS, *weight)))
    numbers = lax.RaggedDotDimensionNumbers((summed, ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    return x, w, {"ragged_dot_dimension_numbers": numbers, "preferred_element_type": None}


def found(form: str, device: Any = HOPPER, **of: Any) -> Tiles | None:
    x, w, params = operands(form, **of)
    return tiles_of((x, w, x), params, device)


def by_group(rows: jax.Array, weights: jax.Array, sizes: jax.Array, turned: bool) -> jax.Array:
    """What a kernel gives: where no group is, anything."""
    made = lax.ragged_dot(rows, weights.swapaxes(1, 2) if turned else weights, sizes)
    return jnp.where(jnp.arange(len(rows))[:, None] < sizes.sum(), made, jnp.nan)


def of_groups(left: jax.Array, right: jax.Array, sizes: jax.Array, device: Any) -> jax.Array:
    assert device is HOPPER
    ends = jnp.cumsum(sizes)
    mine = jnp.arange(len(left)) >= jnp.stack([ends - sizes, ends])[..., None]
    return jnp.einsum("gr,rl,rm->glm", (mine[0] & ~mine[1]).astype(left.dtype), left, right)


@pytest.mark.parametrize("form", [name for name in FORMS if name != "all of a weight"])
@given(ends=st.lists(st.integers(0, ROWS), min_size=GROUPS - 1, max_size=GROUPS - 1), spare=st.integers(0, 9))
def test_operands_are_put_as_kernels_take_them(form: str, ends: list[int], spare: int) -> None:
    """In float32 here, for the sake of what they are compared with."""
    sizes = np.diff([0, *sorted([*ends, ROWS])]).astype(np.int32)
    sizes[-1] = max(0, sizes[-1] - spare)
    tile = found(form)
    assert tile is not None
    x, w, params = operands(form, jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "by_group", by_group)
        patch.setattr(tiles, "of_groups", of_groups)

        def of(product: Any) -> Any:
            return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(product(x, w, sizes))), (0, 1))(x, w)

        mine = of(tile.multiply)
    theirs = of(lambda x, w, n: lax.ragged_dot_general(x, w, n, params["ragged_dot_dimension_numbers"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), mine, theirs)


def test_kernels_are_for_hopper_cards_16_bits_and_whole_tiles() -> None:
    assert found("a matrix") and found("turned", dtype=jnp.float16)
    assert found("a matrix", AMPERE) is None and found("a matrix", jax.devices("cpu")[0]) is None
    assert found("a matrix", dtype=jnp.float32) is None
    assert found("all of a weight") is None and found("a matrix", rows=200) is None
    x, w, params = operands("a matrix")
    assert tiles_of((x, w, x), params | {"preferred_element_type": jnp.float32}, HOPPER) is None
    assert suits([4096, 4096, 4096, 64], [1024, 96, 0, 128]).tolist() == [True, False, False, False]


def test_a_weight_that_lies_as_a_kernel_takes_it_is_not_transposed() -> None:
    assert [form for form in FORMS if form != "all of a weight" and found(form).is_turned] == ["turned"]


def test_a_tile_more_for_each_group_but_one() -> None:
    assert rows_in_tiles(1024, 1) < rows_in_tiles(1024, 9) == rows_in_tiles(2048, 1)
