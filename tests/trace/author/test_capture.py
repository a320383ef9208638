import inspect
import os
import zlib
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from zoo import MODELS

from cjax.trace.author.capture import Capture, Mean, capture
from cjax.tree import leaf_names

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
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


# --- every model of the zoo ---


@pytest.mark.parametrize("name", MODELS)
def test_zoo(name: str) -> None:
    case = MODELS[name]
    model, loss, batch = case.make()
    captured = capture(model, loss, batch)
    assert captured.kind == case.kind
    params, frozen, model_state = jax.eval_shape(captured.init, KEY)
    assert specs(params) == specs(captured.params_shape) and specs(model_state) == specs(captured.model_state_shape)
    assert len(jax.tree.leaves(frozen)) == 0
    assert (captured.initial is not None) == isinstance(model, nnx.Module)
    for train in (True, False):
        total, aux, new_model_state = trace(captured, batch, train)
        assert total.shape == () and total.dtype == jnp.float32
        assert all(leaf.shape == () for leaf in jax.tree.leaves(aux))
        assert jax.tree.structure(new_model_state) == jax.tree.structure(captured.model_state_shape)
        assert specs(new_model_state) == specs(captured.model_state_shape)


def test_linen_is_plain_flax() -> None:
    """Parameters, loss, aux and statistics of a Linen model are those its author would compute by hand."""
    model, loss, batch = MODELS["linen_conv"].make()
    captured = capture(model, loss, batch)
    variables = jax.jit(partial(model.init, train=True))(KEY, batch["images"])
    trees = jax.jit(captured.init)(KEY)
    assert_close(trees, (variables["params"], {}, {"batch_stats": variables["batch_stats"]}))

    def by_hand(train: bool) -> Any:
        def bound_loss(model: Any) -> Any:
            return loss(model, batch, train)

        return jax.jit(nn.apply(bound_loss, model, mutable=["batch_stats"]))(variables)

    total, updated = by_hand(True)
    assert_close(run(captured, trees, batch), (total, {}, updated))
    assert not np.allclose(
        updated["batch_stats"]["BatchNorm_0"]["mean"], trees[2]["batch_stats"]["BatchNorm_0"]["mean"]
    )
    assert_close(run(captured, trees, batch, train=False), (by_hand(False)[0], {}, trees[2]))


def test_linen_dropout_is_plain_flax() -> None:
    model, loss, batch = MODELS["linen_encoder"].make()
    captured = capture(model, loss, batch)
    trees = jax.jit(captured.init)(KEY)

    def by_hand(rngs: dict[str, Any], train: bool) -> Any:
        return jax.jit(nn.apply(lambda model: loss(model, batch, train), model))({"params": trees[0]}, rngs=rngs)

    ours = run(captured, trees, batch)
    assert_close(ours[:2], by_hand({"dropout": stream("dropout")}, True))
    assert_close(run(captured, trees, batch, train=False)[:2], by_hand({}, False))
    assert run(captured, trees, batch, key=jax.random.key(8))[0] != ours[0]


@pytest.mark.parametrize("name", ["nnx_conv", "nnx_scan", *(["nnx_decoder"] if ALL else [])])
def test_nnx_is_plain_flax(name: str) -> None:
    build, loss, batch = MODELS[name].make()
    captured = capture(build, loss, batch)
    trees = jax.jit(captured.init)(KEY)

    @jax.jit
    def by_hand() -> Any:
        model = build(rngs=nnx.Rngs(KEY))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        total = loss(model, batch)
        model_state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        model.eval()
        return params, total, model_state, loss(model, batch)

    params, total, model_state, score = by_hand()
    assert_close(nnx.to_pure_dict(trees[0]), params)
    ours = run(captured, trees, batch)
    assert_close(ours[0], total)
    flat = {k: v for k, v in zip(leaf_names(ours[2]), jax.tree.leaves(ours[2]), strict=True) if not k.endswith("key")}
    theirs = {
        k: v
        for k, v in zip(leaf_names(model_state), jax.tree.leaves(model_state), strict=True)
        if not k.endswith("key")
    }
    assert_close(flat, theirs)
    new_trees = (*trees[:2], ours[2])
    assert_close(run(captured, new_trees, batch, train=False)[0], score)
    if MODELS[name].dropout:  # the model's own streams have advanced
        assert run(captured, new_trees, batch)[0] != ours[0]


@pytest.mark.parametrize("name", ["linen_decoder", "nnx_decoder"])
def test_python_runs_twice_in_all(name: str) -> None:
    """Once for the shapes, once for the trace; `init` replays. (A builder's forward pass runs once.)"""
    model, loss, batch = MODELS[name].make()
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return loss(*args, **kwargs)

    counted.__signature__ = inspect.signature(loss)  # type: ignore[attr-defined]
    captured = capture(model, counted, batch)
    jax.make_jaxpr(captured.init)(KEY)
    trace(captured, batch)
    assert calls == (2 if name.startswith("linen") else 1)


def test_tracing_is_linear_in_depth() -> None:
    """Up to JAX 0.11 a tracer that is asked for its sharding searches the whole trace; NNX asks at every draw."""
    quick: list[bool] = []

    def watch(tracer: Any) -> None:
        quick.append("sharding" in vars(type(tracer)))
        assert getattr(tracer, "sharding", None) is None

    def watched_build(rngs: nnx.Rngs) -> Net:
        watch(rngs.params())
        return Net(rngs)

    def watched_loss(model: Any, x: Any) -> Any:
        watch(x)
        return plain(model, x)

    captured = capture(watched_build, watched_loss, X_SHAPE)
    trace(captured, X)
    assert quick == [jax.__version_info__ < (0, 12)] * 2
    jax.make_jaxpr(watch)(X)
    assert quick[-1] is False  # JAX is left as it was


def test_nothing_is_allocated() -> None:
    """Two terabytes of parameters; a real init would end here."""
    size = 10**6

    def loss(model: Any, x: Any) -> Any:
        return model(x).mean()

    x = jax.ShapeDtypeStruct((16, size), jnp.float32)
    for model in (nn.Dense(size), lambda rngs: nnx.Linear(size, size, rngs=rngs)):
        captured = capture(model, loss, x)
        assert captured.params_shape["kernel"].shape == (size, size)
        assert trace(captured, x)[0].shape == ()


# --- Linen ---


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


# --- NNX ---


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


# --- wrt ---


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


# --- what a loss may be ---


def test_key_and_train_go_by_name() -> None:
    def loss(model: Any, x: Any, *, train: bool, key: Any = None) -> Any:
        return model(x).mean() * 0 + jax.random.normal(key) + train * 100

    captured = capture(nn.Dense(3), loss, X_SHAPE)
    trees = captured.init(KEY)
    np.testing.assert_allclose(captured.apply(*trees, X, KEY, True)[0], jax.random.normal(KEY) + 100, rtol=1e-6)
    np.testing.assert_allclose(captured.apply(*trees, X, KEY, False)[0], jax.random.normal(KEY), rtol=1e-6)


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


# --- what a model may be ---


def test_refused_models() -> None:
    state = TrainState.create(apply_fn=None, params={}, tx=optax.sgd(0.1))
    bound = nn.Dense(3).bind({"params": {}})
    abstract = nnx.eval_shape(lambda: nnx.Linear(5, 3, rngs=nnx.Rngs(0)))

    class Torch:
        __module__ = "torch.nn.modules.linear"

        def __call__(self) -> None: ...

    cases = [
        (Net, r"the class Net.*lambda rngs: Net\(..., rngs=rngs\)"),
        (nn.Dense, r"the class Dense.*Dense\(...\)"),
        (state, "TrainState"),
        (bound, "already bound"),
        (abstract, "shapes, not weights"),
        (Torch(), "PyTorch"),
        (lambda x: x, r"function of \(x\)"),
        (lambda: 0, r"function of \(\)"),
        (3, "is a int"),
        (lambda rngs: nn.Dense(3), "builder returned a Dense"),
    ]
    for model, message in cases:
        with pytest.raises(TypeError, match=message):
            capture(model, plain, X_SHAPE)


def test_logical_names_of_nnx_need_no_mesh() -> None:
    captured = capture(build, plain, X_SHAPE)
    trees = captured.init(KEY)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        run(captured, trees, X)
        jax.jit(captured.init)(KEY)
        capture(build, plain, X_SHAPE)
