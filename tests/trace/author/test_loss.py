"""What a loss may be, and what it may give."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captured import KEY, X_SHAPE, X, run, trace
from flax import nnx

from cjax.trace.author.capture import Mean, capture


def test_key_and_train_go_by_name() -> None:
    def loss(model: Any, x: Any, *, train: bool, key: Any = None) -> Any:
        return model(x).mean() * 0 + jax.random.normal(key) + train * 100

    captured = capture(nn.Dense(3), loss, X_SHAPE)
    trees = captured.init(KEY)
    np.testing.assert_allclose(captured.apply(*trees, X, KEY, True)[0], jax.random.normal(KEY) + 100, rtol=1e-6)
    np.testing.assert_allclose(captured.apply(*trees, X, KEY, False)[0], jax.random.normal(KEY), rtol=1e-6)


def test_what_an_author_has_fixed_stays() -> None:
    def loss(model: Any, x: Any, *, train: bool = True, key: Any = None) -> Any:
        return model(x).mean() * 0 + jax.random.normal(key) + train * 100

    captured = capture(nn.Dense(3), functools.partial(loss, train=False, key=jax.random.key(7)), X_SHAPE)
    value = captured.apply(*captured.init(KEY), X, KEY, True)[0]
    np.testing.assert_allclose(value, jax.random.normal(jax.random.key(7)), rtol=1e-6)


def test_mean_and_aux() -> None:
    def loss(model: Any, x: Any) -> Any:
        out = model(x)
        return Mean(out.sum(), out.size), {"seen": Mean(x.sum(), 16), "max": out.max()}

    captured = capture(nn.Dense(3), loss, X_SHAPE)
    mean, aux, model_state = run(captured, captured.init(KEY), X)
    assert isinstance(mean, Mean) and mean.weight == 48 and isinstance(aux["seen"], Mean) and model_state == {}
    np.testing.assert_allclose(aux["seen"].total, X.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda out: out, r"shape \(16, 3\).*jnp.mean"),
        (lambda out: (out.mean(), {"row": out[0]}), r"'row' has shape \(3,\)"),
        (lambda out: out.argmax(), "dtype int32"),
        (lambda out: None, "is a NoneType"),
        (lambda out: {"loss": out.mean()}, "is a dict"),
        (lambda out: (out.mean(), 1.0, 2.0), "is a tuple"),
        (lambda out: Mean(out, 3.0), r"The total of the loss has shape \(16, 3\)"),
        (lambda out: Mean(out.sum(), jnp.ones(3)), r"The weight of the loss has shape \(3,\)"),
    ],
)
def test_refused_results(result: Any, message: str) -> None:
    captured = None
    with pytest.raises(ValueError, match=message):
        captured = capture(lambda rngs: nnx.Linear(5, 3, rngs=rngs), lambda model, x: result(model(x)), X_SHAPE)
        trace(captured, X)
    assert captured is not None


@pytest.mark.parametrize("loss", [None, lambda model: 0.0, lambda model, x, rng: 0.0, lambda *, model, batch: 0.0])
def test_refused_losses(loss: Any) -> None:
    with pytest.raises(TypeError, match="def loss.model, batch."):
        capture(nn.Dense(3), loss, X_SHAPE)


def test_a_loss_of_parameters_is_told_where_they_are() -> None:
    def loss(params: Any, batch: Any, targets: Any) -> Any:
        return params

    with pytest.raises(TypeError, match=r"`loss` takes \(params.*def loss\(model, batch\).*call it as model\(batch"):
        capture(nn.Dense(3), loss, X_SHAPE)


def test_named_axes_are_not_needed() -> None:
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=False, axis_name="batch")(x)

    def averaged(model: Any, x: Any) -> Any:
        return jax.lax.pmean(model(x).mean(), "data")

    for model, loss in ((Norm(), lambda model, x: model(x).mean()), (nn.Dense(3), averaged)):
        with pytest.raises(ValueError, match=r"unbound axis name: (batch|data).*leave out BatchNorm\(axis_name=...\)"):
            captured = capture(model, loss, X_SHAPE)
            captured.apply(*captured.init(KEY), X, KEY, True)

    def misspelt(model: Any, x: Any) -> Any:
        return model(x).mean() + nothing  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    with pytest.raises(NameError, match="nothing"):
        capture(nn.Dense(3), misspelt, X_SHAPE)
