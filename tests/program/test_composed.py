"""Where the rows of a batch go, and what a plan's precision decides."""

import jax
import numpy as np
import pytest

from cjax.optim import LossScale
from cjax.program.composed import batch_shardings

from .conftest import make


@pytest.mark.parametrize(("num_rows", "each"), [(8, 1), (24, 3), (4, 4), (2, 2), (12, 12)])
def test_rows_are_split_over_all_axes_of_a_batch_or_not_at_all(num_rows: int, each: int) -> None:
    """`zero=1/4` on eight devices has two axes, of two and of four."""
    mesh = make("zero=1/4")._composed.mesh
    assert sorted(mesh.shape[axis] for axis in ("data", "zero")) == [2, 4]
    shape = {"x": jax.ShapeDtypeStruct((num_rows, 5), np.float32), "scale": jax.ShapeDtypeStruct((), np.float32)}
    found = batch_shardings(mesh, shape)
    assert found["x"].shard_shape((num_rows, 5)) == (each, 5)
    assert found["scale"].is_fully_replicated


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_the_loss_is_scaled_under_float16_alone(precision: str) -> None:
    assert make(f"data=8 precision={precision}")._composed.scaling == (LossScale() if precision == "float16" else None)
