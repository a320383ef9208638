"""Weights that a layer gathers, and a gradient that it adds to earlier ones and reduces."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import numbers

from cjax.sharding.place.in_turn import InTurn

WEIGHTS, SUMS, X = numbers(4, 3), numbers(4, 3), numbers(5, 4)
Half = Callable[[jax.Array], jax.Array]


def twice(part: jax.Array) -> jax.Array:
    return jnp.concatenate([part, part])


def half(gradient: jax.Array) -> jax.Array:
    return gradient[:2] + gradient[2:]


@pytest.mark.parametrize("sums", [None, SUMS], ids=["first", "later"])
@pytest.mark.parametrize("gather", [None, twice], ids=["whole", "part"])
@pytest.mark.parametrize("reduce", [None, half], ids=["kept", "reduced"])
def test_a_layer_has_its_weights_and_their_gradient(
    sums: jax.Array | None, gather: Half | None, reduce: Half | None
) -> None:
    weights = WEIGHTS if gather is None else WEIGHTS[:2]
    whole = WEIGHTS if gather is None else twice(WEIGHTS[:2])
    graded = jnp.zeros((2 if reduce else 4, 3))

    def loss(graded: jax.Array) -> jax.Array:
        return jnp.sin(X @ InTurn(graded, weights, sums, gather, reduce).taken()).sum()

    wanted = jax.grad(lambda whole: jnp.sin(X @ whole).sum())(whole)
    wanted = wanted if sums is None else sums + wanted
    value, given = jax.jit(jax.value_and_grad(loss))(graded)
    np.testing.assert_allclose(value, jnp.sin(X @ whole).sum(), rtol=1e-6)
    np.testing.assert_allclose(given, half(wanted) if reduce else wanted, rtol=1e-5)


def test_sums_are_wider_than_gradients() -> None:
    """Of weights in 16 bits too."""
    low = jnp.ones((4, 3), jnp.bfloat16)
    taken = lambda graded, sums: InTurn(graded, low, sums, None, None).taken().astype(jnp.float32)  # noqa: E731
    zeros = jnp.zeros((4, 3))
    given = jax.grad(lambda graded: (taken(graded, jnp.full((4, 3), 256.0))).sum())(zeros)
    assert given.dtype == jnp.float32 and (given == 257).all(), "which bfloat16 has not"
