"""Blocks with loops, conditions, derivatives of their own, complex numbers, random numbers, state and integers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from search.registry import SIZES, YES_NO, act, block


# -- loops and conditions ---------------------------------------------------------------------------------------------
@block(hidden=SIZES, reverse=YES_NO, unroll=(1, 2), how=("simple", "gru", "remat"))
def recurrent(m: Any, x: jax.Array, hidden: int, reverse: bool, unroll: int, how: str) -> jax.Array:
    width = x.shape[-1]
    w, u = m.param("input", (width, hidden)), m.param("hidden", (hidden, hidden))
    g = m.param("gate", (width, hidden)) if how == "gru" else None

    def turn(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.tanh(row @ w + h @ u)
        new = new if g is None else h + jax.nn.sigmoid(row @ g) * (new - h)
        return new, new

    first = jnp.zeros((x.shape[0], hidden), x.dtype)
    body = jax.checkpoint(turn) if how == "remat" else turn
    _, out = lax.scan(body, first, jnp.swapaxes(x, 0, 1), reverse=reverse, unroll=unroll)
    return jnp.swapaxes(out, 0, 1) @ m.param("down", (hidden, width))


@block(kind=("lstm", "gru"), hidden=(2, 3, 8), packs=True)
def flax_recurrent(m: Any, x: jax.Array, kind: str, hidden: int) -> jax.Array:
    return m.layer("down", "dense", m.layer("cell", kind, x, features=hidden), features=x.shape[-1])


@block(how=("fori", "while", "scan params", "map", "map rows", "associative", "cumulative scan"))
def loop(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    w = m.param("kernel", (width, width))
    if how == "fori":
        return lax.fori_loop(0, 3, lambda i, y: act(y @ w) + 0.1 * i, x)
    if how == "while":  # no gradient goes through: it counts

        def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (carry[0] < 4) & (jnp.abs(carry[1]).max() < 100)

        count, _ = lax.while_loop(more, lambda c: (c[0] + 1, 1.5 * c[1]), (jnp.int32(0), lax.stop_gradient(w)))
        return (x @ w) * (1 + 0.1 * count.astype(x.dtype))
    if how == "scan params":
        stacked = m.param("stacked", (3, width, width))
        return lax.scan(lambda y, k: (act(y @ k), None), x @ w, stacked)[0]
    if how == "map":
        return jnp.moveaxis(lax.map(lambda part: act(part @ w), jnp.moveaxis(x, 1, 0)), 0, 1)
    if how == "map rows":
        return lax.map(lambda row: act(row @ w), x)
    decay = jax.nn.sigmoid(x @ w)
    if how == "associative":

        def join(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        return lax.associative_scan(join, (decay, x), axis=1)[1]
    return lax.associative_scan(jnp.maximum, decay, axis=1, reverse=True)


@block(how=("cond param", "cond data", "switch", "select rows", "cond state free"))
def condition(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    w, v = m.param("kernel", (width, width)), m.param("other", (width, width))
    if how == "cond param":
        return lax.cond(w[0, 0] > 0, lambda y: act(y @ w), lambda y: y @ v, x)
    if how == "cond data":
        return jax.vmap(lambda row: lax.cond(row[0, 0] > 0, lambda y: act(y @ w), lambda y: y @ v, row))(x)
    if how == "switch":
        branches = [lambda y: y @ w, lambda y: act(y @ v), lambda y: y]
        return lax.switch((jnp.abs(w[0, 0]) * 10).astype(jnp.int32) % 3, branches, x)
    if how == "select rows":
        return jnp.where((m.ids[:, :1] % 2 == 0)[..., None], x @ w, x @ v)
    return lax.cond(jnp.linalg.norm(v) > 1.0, lambda: x @ w, lambda: jnp.sin(x @ v))


@block(policy=("nothing", "dots", "everything"))
def remat(m: Any, x: jax.Array, policy: str) -> jax.Array:
    policies = jax.checkpoint_policies
    chosen = {"nothing": policies.nothing_saveable, "dots": policies.dots_saveable, "everything": None}[policy]
    w, v = m.param("up", (x.shape[-1], 5)), m.param("down", (5, x.shape[-1]))
    return jax.checkpoint(lambda x, w, v: act(jnp.sin(x @ w)) @ v, policy=chosen)(x, w, v)


# -- custom derivatives -----------------------------------------------------------------------------------------------
@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.3 * g,))


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(2 * x) / 2


straight_through.defvjp(lambda x: (straight_through(x), x), lambda x, g: (g * (jnp.abs(x) < 1),))


@jax.custom_vjp
def own_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _own_back(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g @ saved[1].T, 1.5 * jnp.einsum("bsd,bse->de", saved[0], g)


own_matmul.defvjp(lambda x, w: (x @ w, (x, w)), _own_back)


@jax.custom_jvp
def own_softplus(x: jax.Array) -> jax.Array:
    return jnp.logaddexp(x, 0.0)


own_softplus.defjvp(lambda primals, tangents: (own_softplus(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped_gradient(x: jax.Array, limit: float) -> jax.Array:
    return x


clipped_gradient.defvjp(lambda x, limit: (x, None), lambda limit, _, g: (jnp.clip(g, -limit, limit),))


@jax.custom_batching.custom_vmap
def own_batching(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@own_batching.def_vmap
def _own_batching(size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return jnp.sin(x), True


@block(how=tuple("reversed straight matmul jvp clipped implicit batching composite name linear".split()))
def custom(m: Any, x: jax.Array, how: str) -> jax.Array:
    w = m.param("kernel", (x.shape[-1],) * 2)
    if how == "matmul":
        return own_matmul(x, w)
    y = x @ w
    if how == "implicit":
        shape = jnp.tanh(w) * 0.3 + 2 * jnp.eye(x.shape[-1], dtype=x.dtype)
        return lax.custom_linear_solve(
            lambda v: v @ shape, y, lambda _, b: jnp.linalg.solve(shape.T, b.reshape(-1, b.shape[-1]).T).T.reshape(
                b.shape), lambda _, b: jnp.linalg.solve(shape, b.reshape(-1, b.shape[-1]).T).T.reshape(b.shape),
        )  # fmt: skip
    if how == "clipped":
        return clipped_gradient(y, 0.01)
    if how == "batching":
        return y + jax.vmap(own_batching)(lax.stop_gradient(x))
    if how == "composite":
        return y * lax.composite(jnp.sin, "own.sine")(lax.stop_gradient(x))
    if how == "name":
        named = jax.checkpoint_policies.save_only_these_names("kept")
        return jax.checkpoint(lambda v: jnp.sin(checkpoint_name(jnp.tanh(v), "kept")), policy=named)(y)
    if how == "linear":  # JAX differentiates it by what it is linear in alone
        scale = lax.stop_gradient(w[0])
        return jax.custom_derivatives.linear_call(lambda scale, v: v * scale, lambda scale, v: v * scale, scale, y)
    return {"reversed": reversed_gradient, "straight": straight_through, "jvp": own_softplus}[how](y)


# -- complex numbers --------------------------------------------------------------------------------------------------
@block(states=(2, 3, 4, 5), how=("scan", "associative", "kernel"))
def complex_ssm(m: Any, x: jax.Array, states: int, how: str) -> jax.Array:
    width, length = x.shape[-1], x.shape[1]
    rate = lax.complex(-0.2 - jax.nn.softplus(m.param("decay", (states,))), 2 * m.param("turn", (states,)))
    step = jnp.exp(rate)
    b = lax.complex(m.param("b_real", (width, states)), m.param("b_imag", (width, states)))
    c = lax.complex(m.param("c_real", (states, width)), m.param("c_imag", (states, width)))
    if how == "kernel":
        powers = step[:, None] ** jnp.arange(length)
        kernel = jnp.einsum("dn,nl,ne->lde", b, powers, c).real
        gaps = np.arange(length)[:, None] - np.arange(length)
        return jnp.einsum("qkde,bkd->bqe", jnp.where((gaps >= 0)[..., None, None], kernel[np.abs(gaps)], 0), x)
    u = x.astype(c.dtype) @ b
    if how == "associative":
        steps = jnp.broadcast_to(step, u.shape)
        h = lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (steps, u), axis=1)[1]
    else:
        first = jnp.zeros((x.shape[0], states), c.dtype)
        h = lax.scan(lambda h, v: (step * h + v,) * 2, first, jnp.moveaxis(u, 1, 0))[1]
        h = jnp.moveaxis(h, 0, 1)
    return (h @ c).real


@block(how=("magnitude", "angle", "product", "polar", "parameter"))
def complex_dense(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    if how == "parameter":
        z = x.astype(jnp.complex128) @ m.param("kernel", (width, width), dtype="complex128")
    else:
        z = x @ lax.complex(m.param("real", (width, width)), m.param("imag", (width, width)))
    if how == "magnitude":
        return jnp.abs(z + 2)
    if how == "angle":
        return jnp.angle(z + 3)
    if how == "polar":
        return (jnp.exp(1j * z.real) * z).imag
    return (z * z.conj() + 1j * jnp.tanh(z.imag)).real


# -- random, state, integers ------------------------------------------------------------------------------------------
NOISE = ("dropout", "normal", "bernoulli", "gumbel", "uniform", "gamma", "permutation", "flax", "flax broadcast")


@block(how=NOISE, random=True)
def noise(m: Any, x: jax.Array, how: str) -> jax.Array:
    x = x @ m.param("kernel", (x.shape[-1],) * 2)
    if how.startswith("flax"):
        return m.layer("drop", "dropout", x, rate=0.3, broadcast=how == "flax broadcast")
    key = m.key()
    if key is None:
        return x
    if how == "normal":
        key = jax.random.wrap_key_data(jax.random.key_data(key))
        return x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
    if how == "gumbel":
        return jax.nn.softmax(x + jax.random.gumbel(key, x.shape, x.dtype))
    if how == "gamma":
        return x + 0.1 * jax.random.gamma(key, 1 + jnp.abs(x), dtype=x.dtype)
    if how == "permutation":
        first, second = jax.random.split(key)
        return jax.random.permutation(first, x, 2) + 0.1 * jax.random.normal(second, x.shape, x.dtype)
    if how == "uniform":
        return x * jax.random.uniform(key, x.shape, x.dtype)
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape if how == "dropout" else x.shape[:2] + (1,)), x / 0.7, 0)


@block(how=("ema", "counter kept"), couples=True, state=True)
def remembered(m: Any, x: jax.Array, how: str) -> jax.Array:
    """State that training keeps and does not read."""
    y = x @ m.param("kernel", (x.shape[-1],) * 2)
    if how == "ema":
        m.keep("mean", (x.shape[-1],), lambda old: 0.9 * old + 0.1 * lax.stop_gradient(y).mean((0, 1)))
    else:
        m.keep("largest", (), lambda old: jnp.maximum(old, lax.stop_gradient(y).max()))
    return y


@block(integer=True)
def integer_permutation(m: Any, x: jax.Array) -> jax.Array:
    """A frozen permutation among the parameters."""
    return jnp.take(x, m.integers("index", x.shape[-1]), axis=-1) @ m.param("kernel", (x.shape[-1],) * 2)
