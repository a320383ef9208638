"""Models as functions: every model of the zoo, as its author would run it; what a model may be."""

import inspect
import os
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from captured import KEY, X_SHAPE, Net, X, assert_close, build, plain, run, specs, stream, trace
from flax import nnx
from flax.training.train_state import TrainState
from zoo import MODELS

from cjax.trace.author.capture import capture
from cjax.tree import leaf_names

ALL = os.environ.get("CJAX_TEST_ALL") == "1"


# --- every model of the zoo ---


@pytest.mark.full("linen_encoder_decoder", "linen_remat", "nnx_encoder")
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


@pytest.mark.full
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


@pytest.mark.full("nnx_scan")
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
        (3, "is an int"),
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
