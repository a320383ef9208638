"""Weights gathered ahead of a pass: in which dtype each comes, and where it then is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax
from cjax.sharding.place.ahead import gather_ahead, read_again

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
    ahead = gather_ahead(composed.trace, storage, composed.plan, composed.mesh)
    made = jax.eval_shape(ahead, storage.params.shape())
    dtypes = {leaves[slot.leaves[0]].name: str(x.dtype) for slot, x in zip(storage.params.slots, made, strict=True)}
    for name, dtype in dtypes.items():
        wanted = "bfloat16" if "kernel" in name and "common" not in name else "float32"
        assert dtype == wanted, name
    assert all(not axes for slot in storage.given.slots for axes in slot.spec)


def test_frozen_weights_stay_whole() -> None:
    """They have no optimizer, and what is read in every micro-batch would be gathered in each."""
    storage = program("zero=2 microbatches=2 precision=bfloat16", "layers")._composed.storage
    assert all(not axes for slot in storage.frozen.slots for axes in slot.spec) and storage.frozen.slots
    assert any(axes for slot in storage.params.slots for axes in slot.spec)


def test_under_float32_nothing_is_ahead() -> None:
    composed = program("zero=1")._composed
    given: Any = composed.storage.params.shape()
    assert gather_ahead(composed.trace, composed.storage, composed.plan, composed.mesh)(given) is given


@pytest.mark.parametrize("plan", ["zero=1 precision=bfloat16", "zero=2 microbatches=2 precision=bfloat16"])
def test_gradients_and_steps_are_those_of_whole_weights(plan: str) -> None:
    """Of the layers, of what they share, and of the head; to what reducing in another order makes of bfloat16."""
    plain = program(plan.replace("zero=1", "data=8").replace("zero=2", "data=8"))
    parts = program(plan)
    one, two = plain.init(0), parts.init(0)
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
