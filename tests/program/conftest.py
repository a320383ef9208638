"""Small programs that the tests of this folder share: compiling is what costs, so each is compiled once."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import cjax


class Net(nn.Module):
    """Two layers: 5 -> 16 -> 3, named as Linen names them: Dense_1, then Dense_0."""

    width: int = 16

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.relu(nn.Dense(self.width)(x)))


class Words(nn.Module):
    """The next of 24 tokens, from one token alone."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(24)(nn.Embed(24, 8)(x))


def loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def word_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def rows(num_rows: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(num_rows, 5)).astype(np.float32),
        "y": rng.normal(size=(num_rows, 3)).astype(np.float32),
    }


def tokens() -> dict[str, np.ndarray]:
    x = np.arange(32, dtype=np.int32).reshape(8, 4) % 24
    return {"x": x, "y": (x + 1) % 24}


def make(plan: Any = "data=8 zero=1", **changes: Any) -> cjax.Program:
    arguments: dict[str, Any] = dict(model=Net(), loss=loss, optimizer=optax.adam(1e-2), batch=rows())
    return cjax.parallelize(**{**arguments, **changes}, plan=plan)


def assert_same(a: Any, b: Any, tolerance: float = 0) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 100), a, b)


def on_host(tree: Any) -> Any:
    def copied(x: Any) -> np.ndarray:
        return np.array(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(copied, tree)


@pytest.fixture(scope="session")
def program() -> cjax.Program:
    return make()


@pytest.fixture(scope="session")
def other_plan(program: cjax.Program) -> cjax.Program:
    """The same model, laid out in another way."""
    return program.replan("data=2 tensor=4 zero=3")


@pytest.fixture(scope="session")
def evaluator() -> cjax.Program:
    """The same model without an optimizer."""
    return make("data=8", optimizer=None)


@pytest.fixture(scope="session")
def words() -> cjax.Program:
    return make("data=4 tensor=2", model=Words(), loss=word_loss, batch=tokens())


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused must be refused before the step is compiled."""

    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


def refusal(call: Callable[[], Any], error: type[Exception] = ValueError) -> str:
    """The message with which `call` is refused."""
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)
