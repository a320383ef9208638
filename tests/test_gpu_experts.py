"""Experts of sorted tokens on an NVIDIA GPU: kernels for rows in groups against all rows by all groups, in float64; and
a mixture against a CPU. `make test-gpu`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.mixture import Mixture, MixtureConfig, mixture_loss
from jax import lax
from test_gpu import apart

import cjax
from cjax.mesh import compile_lowered
from cjax.sharding.products.tiles import Tiles, tiles_of

pytestmark = pytest.mark.gpu
# Dims of a row and of a group's weight, and which of them are summed over.
FORMS = {
    "a matrix": ((256,), (256, 384), ((1,), (1,))),
    "turned": ((256,), (384, 256), ((1,), (2,))),
    "two parts of one": ((128,), (2, 128, 128), ((1,), (2,))),
    "heads and features": ((2, 64), (64, 256, 2), ((1, 2), (3, 1))),
}
# Rows of each group: even and not; none; one alone; rows left that no group has.
SIZES = {
    "even": (512, [128] * 4),
    "uneven": (768, [1, 313, 127, 327]),
    "empty": (640, [0, 500, 0, 140]),
    "one": (384, [0, 0, 384, 0]),
    "some left": (896, [130, 7, 301, 64]),
    "none": (256, [0, 0, 0, 0]),
}


def gpu() -> Any:
    return jax.devices("gpu")[0]


def tiles(form: str, rows: jax.Array, weights: jax.Array) -> Tiles:
    (left, right) = FORMS[form][2]
    numbers = lax.RaggedDotDimensionNumbers(((left, right), ((), ())), [0], [0])
    params: Any = {"ragged_dot_dimension_numbers": numbers, "preferred_element_type": None}
    found = tiles_of((rows, weights, rows), params, gpu())
    if found is None:
        pytest.skip("no kernels for this card: blocks of rows, which CPUs have too")
    return found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_multiply_rows_by_their_groups_weight(form: str, sizes: str, dtype: Any) -> None:
    """And their gradients, rounded once; rows that no group has are zeros, not what was in memory."""
    (row, weight, (left, right)), (num, each) = FORMS[form], SIZES[sizes]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype, device=gpu()) for shape in ((num, *row), (len(each), *weight)))
    given = jnp.asarray(each, jnp.int32, device=gpu())
    multiply = tiles(form, x, w).multiply
    made, back = jax.vjp(lambda x, w: jax.jit(multiply)(x, w, given), x, w)
    g = jnp.asarray(rng.normal(size=made.shape), dtype, device=gpu())
    of_rows, of_weights = jax.jit(back)(g)

    wide = [np.asarray(array, np.float64) for array in (x, w, g)]
    wanted = [np.zeros(array.shape) for array in (g, x, w)]
    numbers = tuple(d for d in left), tuple(d - 1 for d in right)
    for group, (first, end) in enumerate(zip(np.cumsum([0, *each]), np.cumsum(each), strict=False)):
        rows, of_group = slice(first, end), wide[1][group]
        made_there = np.tensordot(wide[0][rows], of_group, numbers)
        wanted[0][rows] = made_there
        value, mine = jax.vjp(
            lambda x, w: jnp.tensordot(x, w, numbers), *(jnp.asarray(part, jnp.float32) for part in (x[rows], w[group]))
        )
        with jax.default_matmul_precision("float32"):
            wanted[1][rows], wanted[2][group] = mine(jnp.asarray(g[rows], value.dtype))
    for found, there in zip((made, of_rows, of_weights), wanted, strict=True):
        assert found.dtype == dtype and np.isfinite(np.asarray(found, np.float32)).all()
        assert np.abs(np.asarray(found, np.float64) - there).max() <= 2e-2 * max(1.0, np.abs(there).max())
        assert np.linalg.norm(np.asarray(found, np.float64) - there) <= 4e-3 * np.linalg.norm(there)


CONFIG = MixtureConfig(256, 64, 2, 256, 4, 2, 384, 6, 2)


@pytest.mark.parametrize("plan", ["data=1", "remat=block", "microbatches=2 loss=microbatch"])
def test_a_mixture_rounds_no_more_than_on_a_cpu(plan: str) -> None:
    batch = {name: np.random.default_rng(0).integers(0, 256, (4, 64), dtype=np.int32) for name in ("inputs", "targets")}

    def gradients(precision: str, device: Any) -> np.ndarray:
        program = cjax.parallelize(
            lambda rngs: Mixture(CONFIG, rngs=rngs), mixture_loss, optax.adamw(1e-3), batch,
            f"{plan} precision={precision}", devices=[device],
        )  # fmt: skip
        if device.platform == "gpu" and device.compute_capability == "9.0":
            text = compile_lowered(program.lower(), [device]).as_text()
            assert text.count('custom_call_target="mosaic_gpu') >= 9
        _, grads = program.value_and_grad(program.init(0), batch)
        return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads)])

    cpu = jax.devices("cpu")[0]
    wanted, rounded = gradients("float32", cpu), gradients("bfloat16", cpu)
    assert apart(gradients("bfloat16", gpu()), wanted) < 1.5 * apart(rounded, wanted) + 2e-3
