"""Programs that are linear in some of their inputs, and programs that look it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

import cjax
from cjax.trace.jaxpr.linear import linear_results

X = jnp.arange(1.0, 7.0).reshape(2, 3)
LINEAR = {
    "product": lambda x, g: x * g,
    "matmul": lambda x, g: g @ x.T,
    "masked": lambda x, g: jnp.where(x > 2, g, 0),
    "divided": lambda x, g: g / x.sum(),
    "padded": lambda x, g: jnp.pad(g, 1)[1:, ::2],
    "scattered": lambda x, g: jnp.zeros((4, 3)).at[jnp.array([1, 3])].add(g),
    "summed in a loop": lambda x, g: lax.scan(lambda c, r: (c + r, c * 2), jnp.zeros(3), g),
    "in a branch": lambda x, g: lax.cond(x[0, 0] > 0, lambda g: g * 2, lambda g: -g, g),
    "solved": lambda x, g: jnp.linalg.solve(x[:, :2], g),
    "nothing": lambda x, g: (g + 2 * g.sum(0), jnp.zeros_like(x)),
}
OTHERS = {
    "clipped": lambda x, g: jnp.clip(g, -1, 1),
    "square": lambda x, g: g * g,
    "sign": lambda x, g: jnp.sign(g) * x,
    "moved": lambda x, g: g + x,
    "chosen by it": lambda x, g: jnp.where(g > 0, x, 0),
    "or something else": lambda x, g: jnp.where(x > 0, g, x),
    "divided by it": lambda x, g: x / g,
    "normed": lambda x, g: g / jnp.linalg.norm(g),
    "from something on": lambda x, g: lax.scan(lambda c, r: (c + r, None), jnp.ones(3), g)[0],
    "handed on a turn late": lambda x, g: lax.scan(lambda c, r: (r, c), jnp.ones(3), g)[1],
    "beside a count": lambda x, g: lax.scan(lambda c, r: (c + 1, r + c), 0.0, g)[1],
    "solved for it": lambda x, g: jnp.linalg.solve(g[:, :2], x),
    "solved by it": lambda x, g: lax.custom_linear_solve(lambda y: x[:, :2] @ y, g, lambda _, b: b * g, symmetric=True),
    "solved step by step": lambda x, g: lax.custom_linear_solve(
        lambda y: x[:, :2] @ y, g, lambda _, b: jnp.sign(b) * jnp.abs(b), symmetric=True
    ),
    "placed by it": lambda x, g: x[g[0].astype(int)],
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    assert all(linear_results(jax.make_jaxpr(LINEAR[name])(X, X), [False, True]))


@pytest.mark.parametrize("name", OTHERS)
def test_not_linear(name: str) -> None:
    assert not any(linear_results(jax.make_jaxpr(OTHERS[name])(X, X), [False, True]))


def test_what_is_made_of_others_is_told_apart() -> None:
    """It stays as it is, whatever the marked inputs are multiplied with."""
    found = linear_results(jax.make_jaxpr(lambda x, g: (g * x, x, x + 1, x * 0))(X, X), [False, True])
    assert found == [True, False, False, False]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (g.clip(-0.01, 0.01),))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[..., 0]


def test_a_derivative_that_clips_is_refused_in_parts() -> None:
    """It would clip gradients of a micro-batch that are twice as large as those of the batch."""
    batch = {"x": np.ones((8, 3), "float32"), "y": np.zeros((8,), "float32")}
    with pytest.raises(ValueError, match="gradient is its author's own"):
        cjax.parallelize(Net(), lambda m, b: (clipped(m(b["x"])) ** 2).mean(), optax.sgd(1.0), batch, "microbatches=2",
                         devices=jax.devices()[:1])  # fmt: skip


def test_a_derivative_that_holds_itself_is_read_once() -> None:
    """That of log_sigmoid is made of log_sigmoid."""
    batch = {"x": np.ones((8, 3), "float32"), "y": np.zeros((8,), "float32")}
    cjax.parallelize(Net(), lambda m, b: optax.sigmoid_binary_cross_entropy(m(b["x"]), b["y"]).mean(), optax.sgd(1.0),
                     batch, "microbatches=2", devices=jax.devices()[:1])  # fmt: skip
