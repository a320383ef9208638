"""Weights rounded, and gathered, ahead of a pass: in which dtype each comes, and where it then is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from starts import begin

import cjax
from cjax.audit import audit
from cjax.gradients import build
from cjax.mesh import compile_lowered
from cjax.sharding.place import model
from cjax.sharding.place.ahead import make_ahead
from cjax.sharding.place.stacked import read_again

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype("float32")}


class Shared(nnx.Module):
    """Four layers of weights of their own that have another in common."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.common = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + self.common(jnp.tanh(layer(x)))
        return self.head(x)


def loss(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


def program(plan: str, wrt: str | None = None) -> cjax.Program:
    return cjax.parallelize(lambda rngs: Shared(rngs), loss, optax.adam(1e-2), BATCH, plan, wrt=wrt)


def by_path(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def test_what_is_multiplied_is_rounded_and_what_loops_share_is_raised_again() -> None:
    composed = program("zero=1 precision=bfloat16")._composed
    storage, leaves = composed.storage, composed.trace.leaves
    again = {leaves[i].name for i in read_again(composed.trace)}
    assert [name for name in again if "common" in name] and not [name for name in again if "head" in name]
    ahead = make_ahead(composed.trace, storage, composed.plan, composed.mesh)
    made = jax.eval_shape(ahead, storage.params.shape())
    dtypes = {leaves[slot.leaves[0]].name: str(x.dtype) for slot, x in zip(storage.params.slots, made, strict=True)}
    for name, dtype in dtypes.items():
        wanted = "bfloat16" if "kernel" in name and "common" not in name else "float32"
        assert dtype == wanted, name
    split = {leaves[slot.leaves[0]].name for slot in storage.given.slots if any(slot.spec)}
    assert len(split) == 2 and all("layers" in name and name.endswith(("kernel", "bias")) for name in split)


class Layer(nn.Module):
    """One turn of an author's loop."""

    @nn.compact
    def __call__(self, x: jax.Array, common: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(nn.Dense(8, name="own")(x)) @ common, None


class Scanned(nn.Module):
    """Layers that their author loops over, and a weight that all turns of the loop share."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        common = self.param("common", nn.initializers.lecun_normal(), (8, 8))
        looped = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=4
        )
        return nn.Dense(8, name="head")(looped(name="layers")(x, common)[0])


STACKED = {"layers": lambda rngs: Shared(rngs), "loop": Scanned()}


@pytest.mark.parametrize("kind", STACKED)
def test_whole_weights_are_rounded_where_they_are_stacked(kind: str) -> None:
    """One alone is rounded where it is used as often as here; what turns of a loop share would be summed rounded."""
    composed = cjax.parallelize(STACKED[kind], loss, optax.sgd(0.1), BATCH, "data=8 precision=bfloat16")._composed
    storage, leaves = composed.storage, composed.trace.leaves
    ahead = make_ahead(composed.trace, storage, composed.plan, composed.mesh)
    made = jax.eval_shape(ahead, storage.params.shape())
    dtypes = {leaves[slot.leaves[0]].name: str(x.dtype) for slot, x in zip(storage.params.slots, made, strict=True)}
    lower = {name for name, dtype in dtypes.items() if dtype == "bfloat16"}
    assert len(lower) == 1 and len(dtypes) == 5 and "kernel" in "".join(lower) and "head" not in "".join(lower)
    unread = jax.eval_shape(
        make_ahead(composed.trace, storage, composed.plan, composed.mesh, is_graded=False), storage.params.shape()
    )
    assert [x.dtype for x in unread] == [x.dtype for x in storage.params.shape()]
    for plan in ("zero=3 precision=bfloat16", "data=8"):
        other = cjax.parallelize(STACKED[kind], loss, optax.sgd(0.1), BATCH, plan)._composed
        given: Any = other.storage.params.shape()
        assert make_ahead(other.trace, other.storage, other.plan, other.mesh)(given) is given


def test_what_is_read_beside_the_loop_too_is_added_up_in_float32() -> None:
    def decayed(model: Any, batch: Any) -> jax.Array:
        return loss(model, batch) + 0.1 * sum((layer.kernel[...] ** 2).sum() for layer in model.layers)

    plan = "data=8 precision=bfloat16"
    composed = cjax.parallelize(STACKED["layers"], decayed, optax.sgd(0.1), BATCH, plan)._composed
    shape: Any = composed.storage.params.shape()
    made = jax.eval_shape(make_ahead(composed.trace, composed.storage, composed.plan, composed.mesh), shape)
    assert [x.dtype for x in made] == [x.dtype for x in shape] and composed.trace.runs


@pytest.mark.full("layers-data=2 pipeline=1f1b:4 microbatches=4", "loop-tensor=2 microbatches=2")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("layers", "data=8"), ("loop", "tensor=2 microbatches=2"), ("layers", "data=2 pipeline=1f1b:4 microbatches=4")],
)
def test_rounded_ahead_they_have_the_gradients_of_those_rounded_in_their_turn(
    kind: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, but for what a fused sum rounds otherwise."""
    found = []
    for name in ("ahead", "in turn"):
        if name == "in turn":
            monkeypatch.setattr(build, "make_ahead", lambda *_, **__: lambda params: params)
        run = cjax.parallelize(STACKED[kind], loss, optax.adam(1e-2), BATCH, f"{plan} precision=bfloat16")
        found.append(by_path(run.value_and_grad(begin(run), BATCH)[1]))
    for path, gradient in found[1].items():
        assert found[0][path].dtype == gradient.dtype == jnp.float32
        np.testing.assert_allclose(found[0][path], gradient, atol=4e-3 * np.abs(gradient).max(), err_msg=path)


def test_frozen_weights_stay_whole() -> None:
    """They have no optimizer, and what is read in every micro-batch would be gathered in each."""
    storage = program("zero=2 microbatches=2 precision=bfloat16", "layers")._composed.storage
    assert all(not axes for slot in storage.frozen.slots for axes in slot.spec) and storage.frozen.slots
    assert any(axes for slot in storage.params.slots for axes in slot.spec)


def test_under_float32_nothing_is_ahead() -> None:
    composed = program("zero=1")._composed
    given: Any = composed.storage.params.shape()
    assert make_ahead(composed.trace, composed.storage, composed.plan, composed.mesh)(given) is given


@pytest.mark.full
@pytest.mark.parametrize("plan", ["zero=1 precision=bfloat16", "zero=2 microbatches=2 precision=bfloat16"])
def test_gradients_and_steps_are_those_of_whole_weights(plan: str) -> None:
    """Of the layers, of what they share, and of the head; to what reducing in another order makes of bfloat16."""
    plain = program(plan.replace("zero=1", "data=8").replace("zero=2", "data=8"))
    parts = program(plan)
    one, two = begin(plain), begin(parts)
    wanted, found = (by_path(p.value_and_grad(s, BATCH)[1]) for p, s in ((plain, one), (parts, two)))
    for path, gradient in wanted.items():
        assert found[path].dtype == gradient.dtype == jnp.float32
        np.testing.assert_allclose(found[path], gradient, atol=0.01 * np.abs(gradient).max(), err_msg=path)
    two, metrics = parts.step(two, BATCH)
    assert float(metrics["loss"]) == pytest.approx(float(plain.step(one, BATCH)[1]["loss"]), rel=1e-6)
    assert np.isfinite(float(parts.evaluate(two, BATCH)["loss"]))
    # A device's part of each kernel, in full precision.
    held = [x for x in jax.tree.leaves(two._params) if x.ndim >= 2 and x.shape[-1] == 8 and x.shape[-2] == 8]
    assert held and all(x.dtype == jnp.float32 and 8 * x.addressable_shards[0].data.size == x.size for x in held)


class Standardized(nn.Module):
    """Layers that make something else of a weight before they multiply by it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self.param("weights", nn.initializers.lecun_normal(), (4, 8, 8))

        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ (weight / jnp.linalg.norm(weight, axis=0))), None

        return nn.Dense(8, name="head")(jax.lax.scan(layer, x, weights)[0])


class Penalized(Standardized):
    """Layers that read a weight for what they hand on, and for a penalty beside it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self.param("weights", nn.initializers.lecun_normal(), (4, 8, 8))

        def layer(carry: tuple[jax.Array, jax.Array], weight: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, penalty = carry
            return (x + jnp.tanh(x @ weight), penalty + jnp.sum(weight**2)), None

        (x, penalty), _ = jax.lax.scan(layer, (x, jnp.float32(0)), weights)
        return nn.Dense(8, name="head")(x) + 0.1 * penalty


class Remade(Scanned):
    """The same loop, each turn of which its author makes again for the backward pass."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        common = self.param("common", nn.initializers.lecun_normal(), (8, 8))
        looped = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=4
        )
        return nn.Dense(8, name="head")(looped(name="layers")(x, common)[0])


IN_TURN = {**STACKED, "remade": Remade(), "standardized": Standardized(), "penalized": Penalized()}


def received(run: cjax.Program, kind: str) -> float:
    """Bytes that a device gets in a step by collectives of this kind."""
    compiled = compile_lowered(run.lower(), list(run.mesh.devices.flat))
    return sum(each.total_bytes for each in audit(compiled, run.mesh).collectives if each.kind == kind)


@pytest.mark.full("layers-zero=1", "penalized-zero=2", "remade-data=4 tensor=2 zero=1")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("layers", "zero=1"),
        ("layers", "data=4 tensor=2 zero=2 remat=block"),
        ("loop", "zero=1/4 remat=dots"),
        ("remade", "data=4 tensor=2 zero=1"),
        ("standardized", "zero=1"),
        ("penalized", "zero=2"),
    ],
)
def test_layers_that_gather_in_turn_have_the_gradients_of_those_gathered_ahead(
    kind: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and no more is gathered: what a layer has gathered is saved for its backward pass, remat or not. Nor
    is what it makes of that gathered again."""
    found, bytes_received = [], []
    for ahead in (False, True):
        if ahead:
            monkeypatch.setattr(model, "stacked_leaves", lambda trace: set[int]())
        run = cjax.parallelize(IN_TURN[kind], loss, optax.adam(1e-2), BATCH, f"{plan} precision=bfloat16")
        assert bool(run._composed.storage.in_turn) != ahead
        found.append(by_path(run.value_and_grad(begin(run), BATCH)[1]))
        bytes_received.append(received(run, "all-gather"))
    for path, gradient in found[1].items():
        np.testing.assert_array_equal(found[0][path], gradient, err_msg=path)
    assert 0 < bytes_received[0] <= 1.001 * bytes_received[1]


def test_layers_of_which_some_are_frozen_gather_in_the_precision_of_the_plan() -> None:
    """Rounded in parts, which stay parts: XLA would round what it has gathered."""
    plans = ["zero=1 precision=float16", "zero=1 precision=float32"]
    low, high = (
        received(
            cjax.parallelize(lambda rngs: Shared(rngs), loss, optax.adam(1e-2), BATCH, plan, wrt="layers/[23]|head"),
            "all-gather",
        )
        for plan in plans
    )
    assert 0 < low < 0.75 * high
