"""What loops and branches do with their operands, and the jaxprs that equations hold."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.jaxpr.view import bodies, cond_of, is_scan, open_bodies, scan_of, while_of


def the_scan(function: Any, *args: Any) -> Any:
    (eqn,) = [eqn for eqn in simplify(jax.make_jaxpr(function)(*args)).eqns if is_scan(eqn)]
    return eqn


def test_operands_and_results_of_a_scan() -> None:
    def function(x: jax.Array, rows: jax.Array) -> Any:
        def turn(c: Any, row: jax.Array) -> Any:
            return (c[0] * x.sum(), c[1] + 1), (c[1] + row, 2 * row)

        return jax.lax.scan(turn, (x, x), rows, reverse=True)

    eqn = the_scan(function, jnp.ones(2), jnp.ones((3, 2)))
    loop = scan_of(eqn)
    assert (loop.num_consts, loop.num_carry, loop.first_x, loop.length, loop.reverse) == (1, 2, 3, 3, True)
    assert [*loop.consts(eqn.invars), *loop.carries(eqn.invars), *loop.xs(eqn.invars)] == list(eqn.invars)
    assert [*loop.last(eqn.outvars), *loop.ys(eqn.outvars)] == list(eqn.outvars)
    assert [v.aval.shape for v in loop.xs(eqn.invars)] == [(3, 2)]
    assert [v.aval.shape for v in loop.xs(loop.body.invars)] == [(2,)]
    assert len(loop.ys(loop.body.outvars)) == 2


def test_operands_of_a_loop_that_ends_by_its_condition() -> None:
    def function(limit: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.while_loop(lambda c: c[1] < limit, lambda c: (c[0] * w, c[1] + 1), (x, 0))

    (eqn,) = jax.make_jaxpr(function)(9, jnp.ones(2), jnp.ones(2)).eqns
    loop = while_of(eqn)
    assert [*loop.asked(eqn.invars), *loop.consts(eqn.invars), *loop.carries(eqn.invars)] == list(eqn.invars)
    assert len(loop.asked(eqn.invars)) == 1 and len(loop.carries(eqn.invars)) == 2
    assert len(loop.body.invars) == 3 and len(loop.condition.jaxpr.invars) == 3
    with pytest.raises(AssertionError):
        cond_of(eqn)


def test_operands_of_branches() -> None:
    eqn = jax.make_jaxpr(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x))(1, jnp.ones(2)).eqns[-1]
    view = cond_of(eqn)
    assert [view.which(eqn.invars), *view.given(eqn.invars)] == list(eqn.invars)
    assert [branch.jaxpr.eqns[0].primitive.name for branch in view.branches] == ["sin", "cos", "tan"]


def test_bodies_of_calls_loops_and_branches() -> None:
    def function(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0, jnp.sin, jax.checkpoint(lambda x: x * 2), x)

    (cond,) = [eqn for eqn in jax.make_jaxpr(function)(jnp.ones(2)).eqns if eqn.primitive.name == "cond"]
    assert len(list(bodies(cond))) == 2 and all(isinstance(body, ClosedJaxpr) for body in bodies(cond))
    assert all(isinstance(body, Jaxpr) for body in open_bodies(cond))
    assert not list(bodies(jax.make_jaxpr(jnp.sin)(1.0).eqns[0]))
