"""What Flax does on its own is seen or undone, and afterwards Flax is what it was."""

import threading
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.errors import InvalidRngError

from cjax.jax_compat.modules import (
    forget_eager_sharding,
    missing_stream,
    sown_collections,
    without_eager_sharding,
)

SOW = nn.Module.sow


class Sows(nn.Module):
    name_of: str = "losses"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        self.sow(self.name_of, "x", x)
        return x


def sow(name: str) -> None:
    Sows(name).apply({}, jnp.ones(1), mutable=[name])


def test_one_inside_another_and_one_that_goes_first() -> None:
    first, second = sown_collections(), sown_collections()
    found = first.__enter__()
    sow("a")
    more = second.__enter__()
    sow("b")
    first.__exit__(None, None, None)
    sow("c")
    second.__exit__(None, None, None)
    sow("d")
    assert (found, more) == ({"intermediates", "a", "b"}, {"intermediates", "b", "c"})
    assert nn.Module.sow is SOW


def test_threads_watch_their_own() -> None:
    both, found = threading.Barrier(2, timeout=30), {}

    def watch(name: str) -> None:
        with sown_collections() as sown:
            both.wait()
            sow(name)
            both.wait()
        found[name] = sown

    threads = [threading.Thread(target=watch, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: {"intermediates", name} for name in ("a", "b")}
    assert nn.Module.sow is SOW


def test_an_error_inside_and_anothers_patch_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), sown_collections():
        raise KeyError
    assert nn.Module.sow is SOW
    seen: list[str] = []
    with sown_collections():
        watched: Any = nn.Module.sow
        monkeypatch.setattr(nn.Module, "sow", lambda self, col, *more: seen.append(col) or watched(self, col, *more))
    with sown_collections() as sown:
        sow("a")
    sow("b")
    assert seen == ["a", "b"] and sown == {"intermediates", "a"}
    monkeypatch.undo()
    with sown_collections():
        pass
    assert nn.Module.sow is SOW


def test_flax_s_own_interceptors_see_no_sow() -> None:
    """If they did, there would be no need for a watch."""
    seen: list[str] = []

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append(context.method_name)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        sow("a")
    assert "__call__" in seen and "sow" not in seen


class Drops(nn.Module):
    stream: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jax.random.uniform(self.make_rng(self.stream))


def test_the_stream_that_is_missing_is_read_off_the_error() -> None:
    with pytest.raises(InvalidRngError) as error:
        Drops("noise").apply({}, jnp.ones(1))
    assert missing_stream(error.value) == "noise"
    with pytest.raises(InvalidRngError) as error:
        nn.Dense(2).init({}, jnp.ones((1, 2)))
    assert missing_stream(error.value) == "params"
    assert missing_stream(InvalidRngError("First argument passed to an init function should be a PRNGKey.")) is None
    assert missing_stream(InvalidRngError('the stream "noise" is given twice')) is None


class Split(nnx.Module):
    def __init__(self, axes: Any = None):
        self.weight = nnx.Param(jnp.ones((2, 4)), out_sharding=axes)
        self.scale = nnx.Param(jnp.ones(4))


def test_names_of_axes_are_noted_and_not_applied() -> None:
    """No mesh here has an axis `model`."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    with jax.set_mesh(mesh), nnx.use_eager_sharding(True), pytest.raises(ValueError, match="model"):
        Split(("model", None))
    with jax.set_mesh(mesh), nnx.use_eager_sharding(True), without_eager_sharding():
        model = Split(("model", None))
    assert model.weight.get_metadata()["out_sharding"] == ("model", None)


@pytest.mark.parametrize("own", [True, False])
def test_a_model_is_as_if_it_had_been_made_plainly(own: bool) -> None:
    with nnx.use_eager_sharding(own):
        plain = Split()
        with without_eager_sharding():
            model = Split()
        assert jax.tree.structure(nnx.state(model)) != jax.tree.structure(nnx.state(plain)) or not own
        forget_eager_sharding(model)
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(plain))
    assert nnx.graphdef(model) == nnx.graphdef(plain)


def test_what_an_author_switched_off_stays_off() -> None:
    with nnx.use_eager_sharding(True):
        with without_eager_sharding():
            model = Split()
            with nnx.use_eager_sharding(False):
                model.scale = nnx.Param(jnp.ones(4))
        forget_eager_sharding(model)
    assert model.scale.get_metadata()["eager_sharding"] is False
    assert model.weight.get_metadata()["eager_sharding"] is True
