import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from cjax.trace.dims.refine import refine
from cjax.trace.dims.refine_rules import expand, whole
from cjax.trace.jaxpr.simplify import simplify


def names(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        inner = eqn.params.get("jaxpr")
        found += names(getattr(inner, "jaxpr", inner)) if inner is not None else []
    return found


def check(function, args, forms, out_forms=None):
    """The refined trace computes the same; returns the names of its primitives."""
    closed = simplify(jax.make_jaxpr(function)(*args))
    outs = [whole(atom.aval.shape) for atom in closed.jaxpr.outvars] if out_forms is None else out_forms
    new = refine(closed, forms, outs)
    given = [jnp.reshape(x, expand(x.shape, form)) for x, form in zip(args, forms, strict=True)]
    for got, want, form in zip(jaxpr_as_fun(new)(*given), jaxpr_as_fun(closed)(*args), outs, strict=True):
        assert got.shape == expand(want.shape, form)
        np.testing.assert_allclose(np.reshape(got, want.shape), want, rtol=1e-6)
    return names(new.jaxpr)


def array(*shape):
    return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


X, W, B = array(2, 5, 4), array(4, 18), array(18)
PACKED = [whole(X.shape), (1, 3), (3,)]


def split(x, w, b):
    return tuple(jnp.split(x @ w + b, 3, axis=-1))


def slices(x, w, b):
    y = jnp.tanh(x @ w + b) * 2
    return y[..., :6], y[..., 12:]


def indexed(x, w, b):
    y = (x @ w + b[None, None]).reshape(2, 5, 3, 2, 3)
    return y[:, :, 0], y.transpose(2, 0, 3, 1, 4)[2]


def looped(x, w, b):
    def turn(carry, _):
        gate, value, _ = jnp.split(carry @ w + b, 3, axis=-1)
        return carry + (gate * value)[..., :4], gate

    return jax.lax.scan(jax.checkpoint(turn), x, None, length=3)


@pytest.mark.parametrize("function", [split, slices, indexed, looped])
def test_cuts_of_a_packed_matmul_merge_nothing(function):
    closed = simplify(jax.make_jaxpr(function)(X, W, B))
    check(function, [X, W, B], PACKED)
    new = refine(closed, PACKED, [whole(atom.aval.shape) for atom in closed.jaxpr.outvars])

    def shapes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (var.aval.shape for var in eqn.outvars)
            inner = eqn.params.get("jaxpr")
            yield from shapes(getattr(inner, "jaxpr", inner)) if inner is not None else ()

    assert not any(18 in shape for shape in shapes(new.jaxpr)), new


@pytest.mark.parametrize(
    "function",
    [
        lambda w: jnp.sort(w, axis=1),  # no rule
        lambda w: jnp.cumsum(w, axis=1),
        lambda w: w[:, 1:7],  # across parts
        lambda w: w[:, ::2],
        lambda w: w.argmax(1),
        lambda w: jnp.concatenate([w, w], axis=1),
        lambda w: jnp.split(w, [3], axis=1)[1],
        lambda w: jnp.linalg.norm(w.reshape(6, 12), axis=0),
        lambda w: jax.lax.fori_loop(0, 3, lambda i, v: v * 2 + i, w),
        lambda w: jax.lax.cond(w[0, 0] > 0, lambda v: v + 1, lambda v: v - 1, w),
    ],
)
def test_what_needs_the_dim_whole_gets_it_whole(function):
    check(function, [W], [(1, 3)])


def test_sums_products_and_masks_work_on_parts():
    def function(w, v):
        masked = jnp.where(w > 0, w, 0.0) + jnp.cumsum(v, axis=0)
        return (masked**2).sum(), masked.max(0), jnp.einsum("ep,fp->ef", w, v), jnp.clip(w, -1, 1).T

    found = check(function, [W, W * 2], [(1, 3)] * 2, [(), (3,), (1, 1), (3, 1)])
    assert "reshape" not in found


def test_random_weights_are_born_in_parts():
    def init(key):
        return jax.random.normal(key, (4, 18)), jnp.zeros(18)

    found = check(init, [jax.random.key(0)], [()], [(1, 3), (3,)])
    assert "reshape" not in found


def test_a_constant_comes_out_in_parts():
    """A weight that its init does not draw."""
    check(lambda x: (jnp.asarray(np.asarray(W)), x + 1), [X], [whole(X.shape)], [(1, 3), whole(X.shape)])


def test_a_trace_without_parts_is_left_alone():
    closed = simplify(jax.make_jaxpr(split)(X, W, B))
    assert refine(closed, [whole(x.shape) for x in (X, W, B)], [whole(X.shape)] * 3) is closed


def test_weights_of_a_loop_keep_the_dim_of_its_turns():
    def function(ws, x):
        def turn(x, w):
            a, b, c = jnp.split(x @ w, 3, axis=-1)
            return x + jnp.tanh(a) * b, c

        return jax.lax.scan(turn, x, ws)

    found = check(function, [array(2, 4, 12), array(5, 4)], [(1, 1, 3), whole((5, 4))])
    assert found.count("scan") == 1 and found.count("dot_general") == 1
