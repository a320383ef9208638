"""Equations computed again."""

import jax
import jax.numpy as jnp
import numpy as np

from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.simplify import simplify

TABLE = np.array([0.5, 0.25], np.float32)


@jax.custom_vjp
def scaled(x: jax.Array, table: jax.Array) -> jax.Array:
    return x * table.sum()


def _gradient(table: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return jax.lax.fori_loop(0, table.shape[0], lambda i, total: total + g * table[i], jnp.zeros_like(g)), None


scaled.defvjp(lambda x, table: (scaled(x, table), table), _gradient)


def test_an_authors_derivative_may_index_a_constant_by_a_traced_number() -> None:
    """Constants of a trace are NumPy's, which can't be indexed like that."""
    (eqn,) = simplify(jax.make_jaxpr(scaled)(jnp.float32(2), TABLE)).jaxpr.eqns
    found = jax.grad(lambda x: bind_as_is(eqn, [x, TABLE])[0])(jnp.float32(2))
    np.testing.assert_allclose(found, TABLE.sum())
