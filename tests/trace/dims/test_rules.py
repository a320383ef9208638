"""Slices of a dim: which of them are parts of equal size, side by side."""

import jax
import jax.numpy as jnp
import pytest

from cjax.trace.dims.find import find_dims


@pytest.mark.parametrize(
    ("start", "stop", "stride", "parts"),
    [
        (0, 8, 1, 3),
        (8, 16, 1, 3),
        (16, 24, 1, 3),
        (4, 12, 1, 0),  # across two of them
        (6, 18, 1, 0),
        (0, 10, 1, 0),  # does not divide
        (0, 24, 3, 0),  # every third
    ],
)
def test_a_slice_is_one_of_so_many_parts(start: int, stop: int, stride: int, parts: int) -> None:
    closed = jax.make_jaxpr(lambda x: jax.lax.slice_in_dim(x, start, stop, stride))(jnp.ones(24))
    dims = find_dims(closed)
    assert [cut.parts for cut in dims.cuts] == [parts]
    assert list(dims.packed.values()) == ([parts] if parts else [])
