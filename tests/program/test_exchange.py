"""Programs of one model that hand each other what they train, and losses inside losses of the user's own."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax

from .conftest import assert_same, loss, make, on_host, refusal, rows


class Tower(nn.Module):
    """Layers that are stacked in storage, behind BatchNorm."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(x)
        for _ in range(2):
            x = x + nn.Dense(5)(nn.relu(x))
        return nn.Dense(3)(x)


def tower_loss(model: Any, batch: Any, train: bool) -> jax.Array:
    return jnp.square(model(batch["x"], train) - batch["y"]).mean()


@pytest.fixture(scope="module")
def pair() -> tuple[cjax.Program, cjax.Program]:
    """One trains the first layers, one the last: each holds frozen what the other trains."""
    first = make("data=2 tensor=4", model=Tower(), loss=tower_loss, wrt="Dense_[01]|Norm")
    return first, make("data=8 zero=3", model=Tower(), loss=tower_loss, wrt="Dense_[12]")


@pytest.mark.full
def test_two_programs_of_one_model_exchange_what_they_train(pair: tuple[cjax.Program, cjax.Program]) -> None:
    first, second = pair
    a, b = first.init(0), second.init(0)
    a, _ = first.step(a, rows())
    trained, statistics = on_host(first.params(a)), on_host(first.to_arrays(a)["carried"])
    other = second.adopt(b, a)
    arrays = second.to_arrays(other)
    assert_same(arrays["frozen"]["Dense_0"], trained["Dense_0"])
    assert_same(arrays["params"]["Dense_1"], trained["Dense_1"])  # both train it
    assert_same(arrays["carried"], statistics)
    assert_same(arrays["params"]["Dense_2"], on_host(second.params(second.init(0)))["Dense_2"])
    other, _ = second.step(other, rows())  # and goes on; what was taken is left as it was
    assert int(other.step) == 1 and int(a.step) == 1
    assert_same(first.params(a), trained)


def test_parameters_by_name_trained_or_frozen(pair: tuple[cjax.Program, cjax.Program]) -> None:
    first, _ = pair
    state = first.adopt(first.init(0), {"Dense_2/bias": np.ones(3, np.float32), "Dense_0/bias": np.full(5, 2.0, "f")})
    arrays = first.to_arrays(state)
    assert_same(arrays["frozen"]["Dense_2"]["bias"], np.ones(3))
    assert_same(arrays["params"]["Dense_0"]["bias"], np.full(5, 2.0))
    whole = first.adopt(first.init(0), first.params(first.init(1)))
    assert_same(first.params(whole), first.params(first.init(1)))


def test_what_is_no_parameter_of_this_model_is_refused(pair: tuple[cjax.Program, cjax.Program]) -> None:
    state = pair[0].init(0)
    message = refusal(lambda: pair[0].adopt(state, {"Dense_9/bias": np.ones(3)}))
    assert "no parameter Dense_9/bias" in message and "Dense_0/bias" in message
    message = refusal(lambda: pair[0].adopt(state, {"Dense_2/bias": np.ones(4, np.float32)}))
    assert "Dense_2/bias: float32[4] given, float32[3] needed" in message
    assert "empty tree" in refusal(lambda: pair[0].adopt(state, {}))
    stranger = make("data=8")
    assert "of another model" in refusal(lambda: pair[0].adopt(state, stranger.init(0)))


def test_a_loss_of_cjax_is_a_term_of_another() -> None:
    """Under a plan, and in an NNX model's tree, which is no dict."""

    def program(plan: str) -> cjax.Program:
        return make(plan, model=lambda rngs: nnx.Linear(5, 3, rngs=rngs), loss=loss, optimizer=optax.sgd(0.1))

    split = program("data=4 tensor=2")
    state, batch = split.init(0), rows()

    def penalised(params: Any) -> jax.Array:
        return 2 * split.loss(state, batch, params) + optax.tree.norm(params)

    def by_hand(params: Any) -> jax.Array:
        kernel, bias = params["kernel"].get_value(), params["bias"].get_value()
        return 2 * ((batch["x"] @ kernel + bias - batch["y"]) ** 2).mean() + optax.tree.norm(params)

    here = split.params(state)
    there = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), here)
    given, wanted = jax.value_and_grad(penalised)(here), jax.value_and_grad(by_hand)(there)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), given, wanted)
    assert split.loss(state, batch) == pytest.approx(float(split.value_and_grad(state, batch)[0]))
    split.update(state, given[1])
