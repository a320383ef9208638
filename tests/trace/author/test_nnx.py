"""NNX models: builders and instances, streams, statistics, modes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from captured import KEY, X_SHAPE, Net, X, assert_close, build, plain, run, trace
from flax import nnx
from zoo import MODELS

from cjax.trace.author.capture import capture
from cjax.trace.reading import trace_part


def make_net() -> Net:
    with nnx.use_eager_sharding(False):
        return Net(nnx.Rngs(0))


def test_instance_keeps_its_weights() -> None:
    model = make_net()
    captured = capture(model, plain, X)
    assert captured.initial is not None
    assert captured.initial[0]["up"]["kernel"].get_value() is model.up.kernel.get_value()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    _, _, model_state = captured.apply(*captured.initial, X, KEY, True)
    assert model_state["dropout"]["rngs"]["count"].get_value() == 1
    assert not np.allclose(model_state["norm"]["mean"].get_value(), 0)
    # Neither the user's model nor the trees given have changed.
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))), before)
    assert captured.initial[2]["dropout"]["rngs"]["count"].get_value() == 0
    rebuilt = captured.rebuild(*captured.initial)
    assert isinstance(rebuilt, Net) and rebuilt is not model
    nnx.update(model, captured.init(KEY)[0])


def test_instance_and_builder_agree() -> None:
    built = capture(build, plain, X_SHAPE)
    held = capture(make_net(), plain, X_SHAPE)
    assert built.dim_names == held.dim_names == {"up/kernel": ("embed", "ffn")}
    assert held.initial is not None
    assert_close(run(built, built.init(jax.random.key(0)), X)[0], run(held, held.initial, X)[0])


def test_micro_batches_draw_other_numbers() -> None:
    captured = capture(build, plain, X_SHAPE)
    params, frozen, model_state = captured.init(KEY)
    losses = set()
    for index in range(3):
        folded = jax.jit(captured.fold_model_state)(model_state, index)
        total, _, new = run(captured, (params, frozen, folded), X)
        losses.add(float(total))
        restored = captured.unfold(new, model_state)
        key, old = (tree["dropout"]["rngs"]["key"].get_value() for tree in (restored, model_state))
        assert (jax.random.key_data(key) == jax.random.key_data(old)).all()
        assert restored["dropout"]["rngs"]["count"].get_value() == 1
        assert_close(restored["norm"]["mean"].get_value(), new["norm"]["mean"].get_value())
    assert len(losses) == 3


def test_keys_of_a_scanned_stack_fold_one_by_one() -> None:
    captured = capture(*MODELS["nnx_scan"].make())
    model_state = captured.init(KEY)[2]
    keys = [leaf for leaf in jax.tree.leaves(model_state) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    folded = [
        leaf
        for leaf in jax.tree.leaves(captured.fold_model_state(model_state, 5))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert keys and keys[0].shape == (4,)
    for old, new in zip(keys, folded, strict=True):
        expected = [jax.random.key_data(jax.random.fold_in(key, 5)) for key in old]
        np.testing.assert_array_equal(jax.random.key_data(new), np.stack(expected))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_values_are_read_then_dropped() -> None:
    class Sower(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.linear(x)
            self.sow(nnx.Intermediate, "norm", jnp.square(x).mean())
            return x

    def loss(model: Any, x: Any) -> Any:
        total = model(x).mean()
        (norm,) = model.norm.get_value()
        return total, {"norm": norm}

    model = Sower(nnx.Rngs(0))
    model(X)  # its author has tried it: what was sown then is no state
    captured = capture(model, loss, X)
    assert captured.initial is not None and len(jax.tree.leaves(captured.model_state_shape)) == 0
    for train in (True, False):
        _, aux, model_state = captured.apply(*captured.initial, X, KEY, train)
        np.testing.assert_allclose(aux["norm"], jnp.square(model.linear(X)).mean(), rtol=1e-5)
        assert not jax.tree.leaves(model_state)
    assert len(model.norm.get_value()) == 1


def test_state_must_keep_its_structure() -> None:
    def adds(model: Any, x: Any) -> Any:
        model.extra = nnx.BatchStat(x.mean())
        return plain(model, x)

    def grows(model: Any, x: Any) -> Any:
        model.norm.mean.set_value(jnp.zeros(9))
        return model.down(model.up(x)).mean()

    def removes(model: Any, x: Any) -> Any:
        del model.norm
        return model.down(model.up(x)).mean()

    for loss, message in (
        (adds, "added extra"),
        (grows, r"norm/mean from \(8,\) to \(9,\)"),
        (removes, "removed norm/mean"),
    ):
        with pytest.raises(ValueError, match=message):
            trace(capture(build, loss, X_SHAPE), X)


def test_nnx_evaluation_in_training_mode_is_refused() -> None:
    def draws(model: Any, x: Any) -> Any:
        model.train()
        return model.down(model.dropout(model.up(x))).mean()

    def updates(model: Any, x: Any) -> Any:
        return model.down(model.norm(model.up(x), use_running_average=False)).mean()

    for loss, message in (
        (draws, "random numbers.*from dropout/rngs/key"),
        (updates, "updates statistics .a BatchStat. during evaluation"),
    ):
        captured = capture(build, loss, X_SHAPE)
        trace(captured, X)
        with pytest.raises(ValueError, match=message):
            trace(captured, X, train=False)

    def draws_in_scan(model: Any, tokens: Any) -> Any:
        model.train()
        return model(tokens).mean()

    scanned, _, batch = MODELS["nnx_scan"].make()
    captured = capture(scanned, draws_in_scan, batch["tokens"][:, :12])
    with pytest.raises(ValueError, match="random numbers.*from blocks"):
        trace(captured, batch["tokens"][:, :12], train=False)


def test_drawing_keys_without_using_them_is_no_dropout() -> None:
    """`nnx.split_rngs` draws from the model's streams before the call and puts them back after it."""

    class PerExample(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(5, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.split_rngs(splits=len(x))
            @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
            def one(self: Any, row: Any) -> Any:
                return self.dropout(self.linear(row))

            return one(self, x)

    captured = capture(lambda rngs: PerExample(rngs), plain, X_SHAPE)
    trees = captured.init(KEY)
    assert run(captured, trees, X, train=False)[0] != run(captured, trees, X)[0]


def test_open_mode_is_training() -> None:
    """`nnx.MultiHeadAttention` leaves its mode open, and a builder has no moment to call `.train()`."""

    def attention(rngs: nnx.Rngs) -> Any:
        return nnx.MultiHeadAttention(2, 8, dropout_rate=0.5, decode=False, rngs=rngs)

    x = np.ones((2, 3, 8), np.float32)
    captured = capture(attention, plain, x)
    trees = captured.init(KEY)
    total, _, model_state = run(captured, trees, x)
    assert run(captured, (*trees[:2], model_state), x)[0] != total
    assert run(captured, trees, x, train=False)[0] == run(captured, (*trees[:2], model_state), x, train=False)[0]


def test_a_mode_that_was_chosen_stays() -> None:
    """Training opens no dropout that its author closed; the loss says so where it wants one open."""

    def closed(rngs: nnx.Rngs) -> Net:
        net = Net(rngs)
        net.dropout.deterministic = True
        return net

    def opened(model: Any, x: Any) -> Any:
        model.train()
        return plain(model, x)

    with nnx.use_eager_sharding(False):
        by_hand = closed(nnx.Rngs(KEY))
        wanted = plain(by_hand, X)
    captured = capture(closed, plain, X_SHAPE)
    trees = captured.init(KEY)
    total, _, model_state = run(captured, trees, X)
    assert_close(total, wanted)
    assert model_state["dropout"]["rngs"]["count"].get_value() == 0
    assert run(capture(closed, opened, X_SHAPE), trees, X)[0] != total


class Writes(nnx.Module):
    """A layer that does something to its parameters, or to what it made of them."""

    def __init__(self, rngs: nnx.Rngs, how: str):
        self.linear, self.how = nnx.Linear(5, 5, rngs=rngs), how

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.linear.kernel
        match self.how:
            case "clips":
                kernel[...] = jnp.clip(kernel[...], -0.1, 0.1)
            case "updates":
                nnx.update(self, jax.tree.map(lambda leaf: leaf * 2, nnx.state(self, nnx.Param)))
            case "replaces":
                self.linear.kernel = nnx.Param(kernel[...] * 2)
            case "in jit":

                def doubled(layer: nnx.Linear, x: jax.Array) -> jax.Array:
                    layer.kernel[...] = layer.kernel[...] * 2
                    return layer(x)

                return nnx.jit(doubled)(self.linear, x)
            case "puts back":
                before = kernel[...]
                kernel[...] = before * 2
                y = self.linear(x)
                kernel[...] = before
                return y
            case "remat":
                return nnx.remat(lambda layer, x: layer(x))(self.linear, x)
        return self.linear(x)


@pytest.mark.parametrize("how", ["clips", "updates", "replaces", "in jit"])
def test_parameters_that_a_model_writes_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match="writes the parameters .*linear/kernel.* only the optimizer changes"):
        trace_part(capture(lambda rngs: Writes(rngs, how), plain, X_SHAPE), X_SHAPE, 1, True)


@pytest.mark.parametrize("how", ["puts back", "remat", "reads"])
def test_parameters_that_are_what_they_were_are_not(how: str) -> None:
    trace_part(capture(lambda rngs: Writes(rngs, how), plain, X_SHAPE), X_SHAPE, 1, True)


def test_what_flax_normalises_is_not_refused() -> None:
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.WeightNorm(nnx.Linear(5, 5, rngs=rngs), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    trace_part(capture(lambda rngs: Normed(rngs), plain, X_SHAPE), X_SHAPE, 1, True)
