"""First values, made as they are kept: those that the author's init makes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import cjax
from cjax.mesh import build_mesh
from cjax.sharding.place.born import born
from cjax.sharding.place.model import store_model
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + nn.Dense(8)(nn.LayerNorm()(x))
        return nn.Dense(5)(x)


def test_values_are_the_authors_and_layers_are_born_stacked() -> None:
    batch = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    captured = capture(Net(), lambda model, x: model(x).mean(), batch)
    plan = cjax.Plan.parse("data=1 tensor=2").resolve(2)
    mesh = build_mesh(plan.axis_sizes(), jax.devices()[:2])
    storage = store_model(captured, TraceSource(captured, batch).read(), plan, mesh)
    made: Any = jax.jit(born(captured, storage))
    stored = made(jax.random.key(3))
    wanted = captured.init(jax.random.key(3))
    for shelf, arrays, tree in zip((storage.params, storage.frozen, storage.model_state), stored, wanted, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), shelf.load(arrays), tree)
    assert {slot.stored_shape for slot in storage.params.slots if slot.is_stack} == {(3, 8, 8), (3, 8)}
    traced = jax.make_jaxpr(born(captured, storage))(jax.random.key(3))
    draws = [eqn for eqn in traced.eqns if eqn.primitive.name == "erf_inv"]
    assert len(draws) <= 2, "one for the three layers, one for the last"
