"""Linen models: streams, statistics, values that are sown, logical names."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captured import KEY, X_SHAPE, Noisy, X, assert_close, noisy_loss, plain, run, specs, stream, trace
from flax import nnx

from cjax.trace.author.capture import capture


def test_streams_statistics_and_sown_values() -> None:
    captured = capture(Noisy(), noisy_loss, X_SHAPE)
    assert list(captured.model_state_shape) == ["batch_stats"]
    trees = captured.init(KEY)
    variables = {"params": nn.unbox(trees[0]), **trees[2]}
    rngs = {"dropout": stream("dropout"), "noise": stream("noise")}
    apply = nn.apply(lambda model: noisy_loss(model, X, True), Noisy(), mutable=["batch_stats", "losses"])
    (total, aux), updated = apply(variables, rngs=rngs)
    # Twice: what was sown in the first step, or at init, must not add up.
    for _ in range(2):
        assert_close(captured.apply(*trees, X, KEY, True), (total, aux, {"batch_stats": updated["batch_stats"]}))
    other = captured.apply(*trees, X, jax.random.key(8), True)
    assert other[0] != total


def test_sow_is_left_as_it_was() -> None:
    sow = nn.Module.sow
    capture(Noisy(), noisy_loss, X_SHAPE)
    assert nn.Module.sow is sow


def test_logical_names_are_read_and_not_applied() -> None:
    captured = capture(Noisy(), noisy_loss, X_SHAPE)
    assert captured.dim_names == {"Dense_0/kernel": ("embed", None)}
    trees = captured.init(KEY)
    assert isinstance(trees[0]["Dense_0"]["kernel"], nn.Partitioned)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):  # it has no axis "embed"
        run(captured, trees, X)
        jax.jit(captured.init)(KEY)


def test_statistics_keep_their_dtype() -> None:
    captured = capture(Noisy(), noisy_loss, X_SHAPE)
    params, frozen, model_state = captured.init(KEY)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), model_state)
    assert specs(captured.apply(params, frozen, half, X, KEY, True)[2]) == specs(half)


def test_state_of_whole_numbers_does_not_become_real() -> None:
    class Averaging(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            mean = self.variable("seen", "mean", lambda: jnp.array(0))
            mean.value = mean.value if self.is_initializing() else 0.9 * mean.value + 0.1 * x.mean()
            return nn.Dense(2)(x)

    captured = capture(Averaging(), lambda model, x: model(x).mean(), X_SHAPE)
    params, frozen, model_state = captured.init(KEY)
    with pytest.raises(ValueError, match="dtype of seen/mean from int32 to float32.*Create it with"):
        captured.apply(params, frozen, {"seen": {"mean": jnp.array(0)}}, X, KEY, True)


def test_logical_names_of_a_scanned_stack() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: None) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "embed2"))
            return nn.Dense(5, kernel_init=init)(x), None

    scan = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )  # fmt: skip
    captured = capture(scan(), lambda model, x: model(x, None)[0].mean(), X_SHAPE)
    assert captured.dim_names == {"Dense_0/kernel": ("layers", "embed", "embed2")}
    trees = captured.init(KEY)
    by_hand = scan().apply({"params": nn.unbox(trees[0])}, X, None)[0].mean()
    assert_close(run(captured, trees, X)[0], by_hand)


def test_bound_model() -> None:
    captured = capture(Noisy(), noisy_loss, X_SHAPE)
    trees = captured.init(KEY)
    by_hand = Noisy().apply({"params": nn.unbox(trees[0]), **trees[2]}, X, False)
    assert_close(captured.rebuild(*trees)(X, False), by_hand)


def test_evaluation_in_training_mode_is_refused() -> None:
    trained = capture(Noisy(), lambda model, x: model(x, True).mean(), X_SHAPE)
    with pytest.raises(ValueError, match="statistics during evaluation.*def loss.model, batch, train."):
        trace(trained, X, train=False)

    class Dropped(nn.Module):
        stream: str

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dropout(0.5, deterministic=False, rng_collection=self.stream)(nn.Dense(3)(x))

    for name in ("dropout", "drop_path", "params"):
        captured = capture(Dropped(name), lambda model, x: model(x).mean(), X_SHAPE)
        trace(captured, X)
        with pytest.raises(ValueError, match=f"random stream '{name}' during evaluation"):
            trace(captured, X, train=False)
    # A stream that is no dropout (a VAE's samples) is part of the score.
    captured = capture(Dropped("sample"), lambda model, x: model(x).mean(), X_SHAPE)
    assert trace(captured, X, train=False)[0].shape == ()


def test_initial_values_from_data() -> None:
    class Centred(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2)(x - self.param("mean", lambda key: x.mean(0)))

    def loss(model: Any, x: Any) -> Any:
        return model(x).mean()

    trees = jax.jit(capture(Centred(), loss, X).init)(KEY)
    np.testing.assert_allclose(trees[0]["mean"], X.mean(0), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="initial values depend on the data"):
        capture(Centred(), loss, X_SHAPE)


def test_keys_of_every_kind() -> None:
    captured = capture(nn.Dense(2), lambda model, x: model(x).mean(), X_SHAPE)
    typed = captured.init(jax.random.key(3))
    assert_close(captured.init(jax.random.PRNGKey(3)), typed)
    other = captured.init(jax.random.key(3, impl="rbg"))
    assert not np.allclose(other[0]["kernel"], typed[0]["kernel"])


def test_a_module_that_is_first_called_within_a_loop() -> None:
    """Its values are those that the author's own `init` makes."""

    class Energy(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(1)(jnp.tanh(nn.Dense(5)(x)))

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        def down(i: int, x: jax.Array) -> jax.Array:
            return x - 0.1 * jax.grad(lambda x: model(x).sum())(x)

        found = jax.lax.fori_loop(0, 3, down, batch)
        return (model(batch) - model(jax.lax.stop_gradient(found))).mean()

    batch, key = jnp.arange(12.0).reshape(4, 3), jax.random.key(0)
    found = capture(Energy(), loss, batch)
    params, *rest = jax.jit(found.init)(key)
    wanted = jax.jit(Energy().init)(key, batch)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    value, *_ = found.apply(params, *rest, batch, key, True)
    assert value == loss(Energy().bind({"params": wanted}), batch)


def test_dropout_of_an_nnx_module_within_a_linen_model_is_refused() -> None:
    class Inner(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nnx.bridge.to_linen(Inner)(nn.Dense(3)(x))

    with pytest.raises(ValueError, match=r"to_linen\) draws from a random stream of its own, 'dropout'"):
        capture(Outer(), plain, X_SHAPE)
