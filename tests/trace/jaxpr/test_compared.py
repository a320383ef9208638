"""Largest elements: the derivative is JAX's own, and goes somewhere however often XLA makes the elements again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.extend import core as jex

import cjax
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr import compared
from cjax.trace.jaxpr.simplify import simplify


@pytest.mark.full("reduce_max-axes2")
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
def test_ties_share_the_derivative_as_in_jax(axes: tuple[int, ...], name: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, (3, 4, 5)), jnp.float32)
    plain = jnp.max if name == "reduce_max" else jnp.min

    def graded(function):
        return jax.grad(lambda x: (function(x) ** 2).sum())(x)

    np.testing.assert_array_equal(graded(lambda x: compared.extreme(x, axes, name)), graded(lambda x: plain(x, axes)))


def test_where_none_is_equal_the_first_of_the_largest_counts() -> None:
    x = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 0.0, -1.0]])
    assert compared._first(x, (1,), "reduce_max").tolist() == [[False, True, False], [True, False, False]]
    assert compared._first(x, (0, 1), "reduce_min").tolist() == [[False] * 3, [False, False, True]]


def test_a_largest_that_no_element_equals_passes_its_derivative_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where XLA makes the elements again, and rounds them otherwise."""
    monkeypatch.setattr(compared, "extreme", lambda x, axes, name: x.max(axes) * (1 + 1e-6))
    x, t = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 0.5, 1.0]]), jnp.asarray([[5.0, 7.0, 11.0], [13.0, 17.0, 19.0]])
    _, tangent = compared._extreme_jvp((1,), "reduce_max", (x,), (t,))
    np.testing.assert_array_equal(tangent, [7.0, 13.0])


def by_jax(x: jax.Array, updates: jax.Array, rows: tuple[int, ...], how: str) -> jax.Array:
    return getattr(x.at[jnp.asarray(rows)], how)(updates)


def as_traced(x: jax.Array, updates: jax.Array, rows: tuple[int, ...], how: str) -> jax.Array:
    """The same, its equations evaluated as a trace's are."""
    jaxpr = simplify(jax.make_jaxpr(lambda x, u: by_jax(x, u, rows, how))(x, updates))
    assert any(eqn.primitive.name in compared.SCATTERED for eqn in jaxpr.eqns)
    env = dict(zip((*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars), (*jaxpr.consts, x, updates), strict=True))
    for eqn in jaxpr.eqns:
        ins = [v.val if isinstance(v, jex.Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, ins), strict=True))
    return env[jaxpr.jaxpr.outvars[0]]


@pytest.mark.full("max-ties-infinite", "max-ties-numbers")
@pytest.mark.parametrize("empty", [None, jnp.inf], ids=["numbers", "infinite"])
@pytest.mark.parametrize("rows", [(1, 1, 3), (1, 3, 9)], ids=["ties", "dropped"])  # there are four
@pytest.mark.parametrize("how", ["max", "min"])
def test_scattered_extremes_have_the_derivative_of_jax(how: str, rows: tuple[int, ...], empty: float | None) -> None:
    rng = np.random.default_rng(1)
    operand, updates = (rng.integers(0, 4, (n, 5)).astype(np.float32) for n in (4, 3))
    if empty is not None:  # as of segments that nothing is in, and of updates that are masked
        operand[:3] = updates[0, 2:] = -empty if how == "max" else empty

    def gradients(function):
        def loss(x: jax.Array, updates: jax.Array) -> jax.Array:
            out = function(x, updates, rows, how)
            return (jnp.where(jnp.isfinite(out), out, 0) ** 2 * jnp.arange(1.0, 6)).sum()

        return jax.grad(loss, argnums=(0, 1))(operand, updates)

    found, wanted = gradients(as_traced), gradients(by_jax)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)
    assert all(np.isfinite(x).all() for x in wanted)


class Line(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(x)


@pytest.mark.full("2")
@pytest.mark.parametrize("rows", [2, 4])
def test_elements_that_are_made_twice(rows: int) -> None:
    """One row a device: XLA makes v + v**2 for the largest and for the comparison, in two ways."""

    def loss(model, batch):
        v = jnp.square(model(batch)).mean(-1)
        return (v + v**2).max(1).mean()

    x = np.random.RandomState(0).randn(rows, 3, 5).astype("float32")
    program = cjax.parallelize(Line(), loss, optax.sgd(1.0), x, "data=2", devices=jax.devices()[:2])
    state = program.init(0)
    params = jax.tree.map(np.asarray, program.params(state))
    grads = program.value_and_grad(state, x)[1]
    want = jax.grad(lambda p: loss(Line().bind({"params": p}), x))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, want)
