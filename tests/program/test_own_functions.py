"""What a program gives back goes into the author's own NNX functions: trees and models of the very same structure."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax


class Net(nnx.Module):
    """Parameters, running statistics, random keys, a list, a stack of layers and an axis name."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(8, 8, rngs=rngs)

        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.stacked = stack(rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.fixed = nnx.Param(jnp.ones(8), eager_sharding=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drop(self.norm(self.first(x)))
        x = x @ self.stacked.kernel[...][0] + self.fixed[...]
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


X = np.random.RandomState(0).randn(8, 4).astype("float32")
BUILDS = {
    "builder": lambda: lambda rngs: Net(rngs=rngs),
    "model": lambda: Net(nnx.Rngs(0)),
}


def program_of(build: str) -> cjax.Program:
    return cjax.parallelize(BUILDS[build](), lambda m, x: (m(x) ** 2).mean(), optax.sgd(0.1), X, "data=2 tensor=2",
                            devices=jax.devices()[:4])  # fmt: skip


@pytest.mark.full("builder")
@pytest.mark.parametrize("build", BUILDS)
def test_params_and_models_are_the_authors_own(build: str) -> None:
    program = program_of(build)
    state, _ = program.step(program.init(0), X)
    model, params, calls = Net(nnx.Rngs(0)), program.params(state), []
    trained = program.model(state)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert nnx.graphdef(trained) == nnx.graphdef(model)
    assert jax.tree.structure(nnx.state(trained)) == jax.tree.structure(nnx.state(model))

    @nnx.jit
    def score(model: Net, x: jax.Array) -> jax.Array:
        calls.append("model")
        return model(x).sum()

    @jax.jit
    def far(mine: nnx.State, theirs: nnx.State) -> jax.Array:
        calls.append("params")
        return optax.tree.norm(jax.tree.map(jnp.subtract, mine, theirs))

    own = nnx.state(model, nnx.Param)
    assert float(far(own, own)) == 0
    # On the host: to JAX, what lives on a mesh is of another type.
    assert float(far(jax.tree.map(np.asarray, params), own)) > 0
    model.eval(), trained.eval()
    before = score(model, X)
    numbers = nnx.state(trained, nnx.filterlib.Any(nnx.Param, nnx.BatchStat))
    nnx.update(model, jax.tree.map(np.asarray, numbers))
    after = score(model, X)
    assert calls == ["params", "model"], "traced again"
    np.testing.assert_allclose(after, score(trained, X), rtol=1e-6)
    assert after != before
