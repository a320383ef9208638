"""Rows added to others of which devices have a stretch each, against all of them on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.sharding.products.addition import add_to_rows, added_to_dim

NUM, ROWS, WIDTH = 8, 24, 5
MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "zero", "tensor"))
RNG = np.random.default_rng(0)
X, NEW = (RNG.normal(size=(n, WIDTH)).astype(np.float32) for n in (NUM, ROWS))
PLACES = RNG.integers(-2, NUM + 2, ROWS)  # some are none of theirs


def plain(x: jax.Array, rows: jax.Array, mode: str) -> jax.Array:
    return x.at[jnp.asarray(PLACES)].add(rows, mode=mode, wrap_negative_indices=False)


def apart(x: jax.Array, rows: jax.Array, mode: str, axes: Any, low: Any = None) -> jax.Array:
    closed = jax.make_jaxpr(lambda x, rows: plain(x, rows, mode))(x, rows)
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if added_to_dim(eqn) == 0]
    specs = [PartitionSpec(axes), PartitionSpec(axes), PartitionSpec(axes)]
    return add_to_rows(eqn, [x, jnp.asarray(PLACES, jnp.int32)[:, None], rows], specs, MESH, low)


def results(function: Any, *args: Any) -> Any:
    return jax.jit(
        lambda x, rows: jax.value_and_grad(lambda *read: jnp.sin(function(*read, *args)).sum(), (0, 1))(x, rows)
    )


@pytest.mark.parametrize("axes", [("data", "zero"), ("data",), None])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_the_same_numbers_and_gradients(mode: str, axes: Any) -> None:
    mine, theirs = results(apart, mode, axes)(X, NEW), results(plain, mode)(X, NEW)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), mine, theirs)


def test_rows_of_few_bits_are_added_up_in_float32() -> None:
    """Of more ones than a bfloat16 counts."""
    ones, places = jnp.ones((64 * ROWS, WIDTH), jnp.bfloat16), jnp.zeros(64 * ROWS, int)
    closed = jax.make_jaxpr(lambda x, rows: x.at[places].add(rows))(jnp.zeros((NUM, WIDTH)), 1.0 * ones)
    assert added_to_dim(closed.jaxpr.eqns[-1]) == 0

    def add(x: jax.Array, rows: jax.Array) -> jax.Array:
        specs = [PartitionSpec("data")] * 3
        return add_to_rows(closed.jaxpr.eqns[-1], [x, jnp.zeros((len(rows), 1), jnp.int32), rows], specs, MESH)

    found = jax.jit(add)(jnp.zeros((NUM, WIDTH), jnp.bfloat16), ones)
    assert found.dtype == jnp.bfloat16 and float(found[0, 0]) == len(ones)


def test_sums_are_sent_in_fewer_bits_where_they_are_asked_for() -> None:
    text = jax.jit(lambda x, rows: apart(x, rows, "drop", ("data",), jnp.bfloat16)).lower(X, NEW).as_text()
    wide = jax.jit(lambda x, rows: apart(x, rows, "drop", ("data",))).lower(X, NEW).as_text()
    assert "bf16" in text and "bf16" not in wide


def test_other_forms_are_none() -> None:
    """A number alone, what is put in place of others, parts of slices, and slices of places that are two numbers."""
    two, slices = jnp.array([1, 0]), lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def forms(x: jax.Array, rows: jax.Array) -> Any:
        parts = lax.scatter_add(x, two[:, None], rows[:2, :3], slices)
        return x.at[two, two].add(1.0), x.at[two].set(rows[:2]), parts, x.at[two, :2].add(rows[:2, :2])

    def dims(function: Any) -> list[int | None]:
        jaxpr = jax.make_jaxpr(function)(X, NEW).jaxpr
        return [added_to_dim(eqn) for eqn in jaxpr.eqns if "scatter" in eqn.primitive.name]

    assert dims(forms) == [None] * 4
    assert dims(lambda x, rows: x.at[:, two].add(rows[:NUM, :2])) == [1]
