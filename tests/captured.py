"""Small models of Linen and of NNX, and what tests of their capture do with them."""

import zlib
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cjax.trace.author.capture import Capture

KEY = jax.random.key(7)
X = np.random.default_rng(0).standard_normal((16, 5), dtype=np.float32)
X_SHAPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def run(captured: Capture, trees: Any, batch: Any, train: bool = True, key: Any = KEY) -> Any:
    return jax.jit(partial(captured.apply, train=train))(*trees, batch, key)


def trace(captured: Capture, batch: Any, train: bool = True) -> Any:
    shapes = captured.params_shape, captured.frozen_shape, captured.model_state_shape
    return jax.eval_shape(partial(captured.apply, train=train), *shapes, batch, KEY)


def stream(name: str) -> jax.Array:
    return jax.random.fold_in(KEY, zlib.crc32(name.encode()))


def assert_close(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7), ours, theirs)


def specs(tree: Any) -> list[tuple[Any, Any]]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


class Noisy(nn.Module):
    """Statistics, three random streams, values sown with and without a sum, logical names."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        x = nn.Dense(8, kernel_init=init)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        self.sow("losses", "norm", jnp.square(x).mean(), reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
        self.sow("intermediates", "x", x)
        if train:
            x = nn.Dropout(0.5, deterministic=False)(x)
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(3)(x)


def noisy_loss(model: Any, x: Any, train: bool) -> Any:
    out = model(x, train)
    return jnp.square(out).mean(), {"norm": model.variables["losses"]["norm"]}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "ffn"))
        self.up = nnx.Linear(5, 8, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(self.norm(self.up(x))))


def build(rngs: nnx.Rngs) -> Net:
    return Net(rngs)


def plain(model: Any, x: Any) -> Any:
    return jnp.square(model(x)).mean()
