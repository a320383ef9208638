"""`wrt`: which parameters are trained."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import pytest
from captured import KEY, X_SHAPE, Net, Noisy, X, assert_close, noisy_loss, plain, run
from flax import nnx

from cjax.trace.author.capture import capture
from cjax.trace.author.trained import matcher
from cjax.tree import leaf_names


def test_wrt_linen() -> None:
    for wrt in ("Dense_1/", lambda path, leaf: path.startswith("Dense_1")):
        captured = capture(Noisy(), noisy_loss, X_SHAPE, wrt=wrt)
        assert leaf_names(captured.params_shape) == ("Dense_1/bias", "Dense_1/kernel")
        assert type(captured.params_shape) is dict
        assert leaf_names(captured.frozen_shape) == (
            "BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel",
        )  # fmt: skip
        assert captured.dim_names == {"Dense_0/kernel": ("embed", None)}
        whole = capture(Noisy(), noisy_loss, X_SHAPE)
        assert_close(run(captured, captured.init(KEY), X), run(whole, whole.init(KEY), X))
    biases = capture(Noisy(), noisy_loss, X_SHAPE, wrt=lambda path, leaf: leaf.ndim == 1 and "Dense" in path)
    assert leaf_names(biases.params_shape) == ("Dense_0/bias", "Dense_1/bias")


class Adapter(nnx.Param):
    pass


@pytest.mark.parametrize(
    "wrt",
    [
        "^down",
        lambda path, leaf: path.startswith("down"),
        Adapter,
        nnx.All(Adapter),
        nnx.filterlib.PathContains("down"),
    ],
)
def test_wrt_nnx(wrt: Any) -> None:
    def adapted(rngs: nnx.Rngs) -> Net:
        net = Net(rngs)
        net.down.kernel = Adapter(net.down.kernel.get_value())
        net.down.bias = Adapter(net.down.bias.get_value())
        return net

    captured = capture(adapted, plain, X_SHAPE, wrt=wrt)
    assert leaf_names(captured.params_shape) == ("down/bias", "down/kernel")
    assert set(leaf_names(captured.frozen_shape)) == {"norm/bias", "norm/scale", "up/bias", "up/kernel"}
    assert all(isinstance(v, nnx.Param) for _, v in nnx.to_flat_state(captured.frozen_shape))
    whole = capture(adapted, plain, X_SHAPE)
    assert_close(run(captured, captured.init(KEY), X)[0], run(whole, whole.init(KEY), X)[0])


@pytest.mark.parametrize("model", [nn.Dense(3), lambda rngs: nnx.Linear(5, 3, rngs=rngs)], ids=["linen", "nnx"])
def test_wrt_that_trains_nothing(model: Any) -> None:
    with pytest.raises(ValueError, match="`wrt` = 'nothing' matches no parameter. The parameters are: bias, kernel"):
        capture(model, plain, X_SHAPE, wrt="nothing")
    with pytest.raises(ValueError, match="is not a regular expression"):
        capture(model, plain, X_SHAPE, wrt="(")


def test_wrt_of_another_library() -> None:
    for wrt in (nnx.Param, nnx.All(nnx.Param), 3):
        with pytest.raises(TypeError, match="pass a regex"):
            capture(nn.Dense(3), plain, X_SHAPE, wrt=wrt)


def test_parameters_without_gradient() -> None:
    class Table(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            table = self.param("table", lambda key: jnp.arange(5))
            return nn.Dense(2)(x * table)

    with pytest.raises(ValueError, match="table has dtype int32"):
        capture(Table(), plain, X_SHAPE)
    assert leaf_names(capture(Table(), plain, X_SHAPE, wrt="Dense").frozen_shape) == ("table",)
    with pytest.raises(ValueError, match="no parameters"):
        capture(nn.Dropout(0.5, deterministic=True), plain, X_SHAPE)


def test_a_pattern_may_be_anywhere_in_a_path() -> None:
    is_trained = matcher("_1/ker")
    assert is_trained("Dense_1/kernel", None)
    assert not is_trained("Dense_0/kernel", None)
