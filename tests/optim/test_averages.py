"""Averages of parameters, and finding them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from cjax.optim import find_ema, params_ema
from cjax.tree import PyTree


def params() -> PyTree:
    rng = np.random.default_rng(0)
    return {"kernel": rng.standard_normal((3, 5)), "bias": rng.standard_normal(5)}


@pytest.mark.parametrize("warm_up", [False, True])
def test_averages_the_parameters_after_each_update(warm_up: bool) -> None:
    tx = optax.chain(optax.adam(0.1), params_ema(0.8, warm_up))
    with jax.enable_x64(True):
        now = params()
        state, average = tx.init(now), params()
        for step in range(6):
            grads = jax.tree.map(lambda w, s=step: np.sin(w + s), now)
            updates, state = tx.update(grads, state, now)
            now = optax.apply_updates(now, updates)
            d = min(0.8, (1 + step) / (10 + step)) if warm_up else 0.8
            average = jax.tree.map(lambda a, w, d=d: d * a + (1 - d) * w, average, now)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), find_ema(state), average)


def test_keeps_float32_of_bfloat16() -> None:
    low = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    tx = params_ema(0.999)
    state = tx.init(low)
    for _ in range(3):
        _, state = tx.update({"w": jnp.full((2, 2), 0.0078125, jnp.bfloat16)}, state, low)
    assert find_ema(state)["w"].dtype == jnp.float32
    np.testing.assert_allclose(find_ema(state)["w"], 1 + 0.0078125 * (1 - 0.999**3), rtol=1e-6)


def test_is_found_in_what_flax_makes() -> None:
    tx = optax.chain(optax.masked(optax.sgd(1.0), True), params_ema())
    made = TrainState.create(apply_fn=lambda x: x, params=params(), tx=tx)
    assert jax.tree.structure(find_ema(made)) == jax.tree.structure(params())
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = find_ema(nnx.Optimizer(model, tx, wrt=nnx.Param))
    assert {path[0] for path in nnx.to_flat_state(found).paths} == {"kernel", "bias"}


def test_refuses() -> None:
    with pytest.raises(ValueError, match="decay is 1; an average needs"):
        params_ema(1)
    with pytest.raises(ValueError, match="holds no averages .*params_ema"):
        find_ema(optax.adam(1e-3).init(params()))
    with pytest.raises(ValueError, match="holds 2 averages"):
        find_ema(optax.chain(params_ema(0.5), params_ema(0.9)).init(params()))
    with pytest.raises(ValueError, match="give them"):
        params_ema(0.5).update(params(), params_ema(0.5).init(params()))
