"""Both branches, and a choice between their results."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import ClosedJaxpr, jaxpr_as_fun, make_jaxpr
from cjax.trace.jaxpr.simplify import simplify
from cjax.walk.branches import both_branches


def nested(step: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    def inner() -> tuple[jax.Array, jax.Array]:
        return lax.cond(step > 3, lambda: (x + y, y), lambda: (x - y, y * 2))

    return lax.switch(step % 3, [inner, lambda: (x, x), lambda: (jnp.zeros_like(x), y)])


def traced(function: object) -> ClosedJaxpr:
    return simplify(make_jaxpr(function)(jnp.int32(0), jnp.ones(2), jnp.ones(2)))  # type: ignore[arg-type]


def test_gives_the_same_numbers_and_leaves_no_branch() -> None:
    closed = traced(nested)
    both = both_branches(closed, {closed.jaxpr.invars[1]: 1, closed.jaxpr.invars[2]: 2})
    assert not {"cond"} & {eqn.primitive.name for eqn in both.eqns}
    x, y = np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)
    for step in range(7):
        for a, b in zip(jaxpr_as_fun(both)(np.int32(step), x, y), nested(jnp.int32(step), x, y), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_branch_on_one_layer_stays() -> None:
    closed = traced(nested)
    both = both_branches(closed, dict.fromkeys(closed.jaxpr.invars[1:], 1))
    assert [eqn.primitive.name for eqn in both.eqns].count("cond") == 1


def test_a_branch_with_a_loop_that_may_not_end_stays() -> None:
    def doubled(step: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.cond(step > 0, lambda: lax.while_loop(lambda v: v[0] < 9, lambda v: v + x, y), lambda: y)

    closed = traced(doubled)
    both = both_branches(closed, {closed.jaxpr.invars[1]: 1, closed.jaxpr.invars[2]: 2})
    assert "cond" in {eqn.primitive.name for eqn in both.eqns}
