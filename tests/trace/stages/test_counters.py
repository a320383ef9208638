"""What is carried without looking at examples is found, and sliced out of loops."""

import jax
import jax.numpy as jnp
import numpy as np

from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.stages.counters import depends, narrowed, run


def model(weights: jax.Array, x: jax.Array, counts: jax.Array, total: jax.Array) -> tuple[jax.Array, ...]:
    def layer(carry: tuple[jax.Array, ...], of: tuple[jax.Array, jax.Array]) -> tuple:
        (x, seen, power), (w, count) = carry, of
        return (jnp.tanh(x @ w + count), seen + power * count, 2 * power), (count + 1, x.sum())

    (x, seen, _), (counts, sums) = jax.lax.scan(layer, (x, total, jnp.float32(1)), (weights, counts))
    return x.sum(), counts, seen * 2, sums


ARGS = np.ones((3, 4, 4), np.float32), np.ones((2, 4), np.float32), np.arange(3.0), np.float32(7)
CLOSED = simplify(jax.make_jaxpr(model)(*ARGS))


def test_results_of_a_loop_depend_on_different_things() -> None:
    on = dict(zip(CLOSED.jaxpr.invars, map(frozenset, (["w"], ["x"], ["count"], ["total"])), strict=True))
    depends(CLOSED.jaxpr.eqns, on, lambda eqn, kinds: kinds)
    loss, counts, seen, sums = (on[var] for var in CLOSED.jaxpr.outvars)
    assert loss == sums == {"w", "x", "count"}
    assert counts == {"count"} and seen == {"count", "total"}


def test_a_loop_is_run_for_what_is_asked_of_it() -> None:
    targets = CLOSED.jaxpr.outvars[1:3]
    env = dict(zip(CLOSED.jaxpr.invars[2:], ARGS[2:], strict=True))  # neither weights nor examples are there
    items = narrowed(CLOSED.jaxpr.eqns, targets)
    run(items, env.__getitem__, env.update)
    np.testing.assert_array_equal(env[targets[0]], [1, 2, 3])
    assert env[targets[1]] == 2 * (7 + 1 * 0 + 2 * 1 + 4 * 2)


def test_a_loop_that_runs_backwards_stays_one() -> None:
    """Its carry begins with the last, and its results stand where they stood."""

    def backwards(counts: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(seen: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
            return 2 * seen + count, seen

        return jax.lax.scan(turn, total, counts, reverse=True)

    closed = simplify(jax.make_jaxpr(backwards)(*ARGS[2:]))
    env = dict(zip(closed.jaxpr.invars, ARGS[2:], strict=True))
    items = narrowed(closed.jaxpr.eqns, closed.jaxpr.outvars)
    run(items, env.__getitem__, env.update)
    seen, each = (env[var] for var in closed.jaxpr.outvars)
    assert seen == 2 * (2 * (2 * 7 + 2) + 1) + 0
    np.testing.assert_array_equal(each, [2 * (2 * 7 + 2) + 1, 2 * 7 + 2, 7])
