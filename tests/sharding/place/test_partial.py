"""Which products are marked as sums over devices, in steps whose micro-batches run abreast and in no others."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cjax
from cjax.jax_compat.core import make_jaxpr
from cjax.trace.emit.abreast import is_awaited
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import every_equation

ROWS, WIDTH, INNER = 8, 16, 24


class Net(nn.Module):
    """Two layers, of whose four products every second sums over what a tensor axis splits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(INNER)(x)))
        return x


def squares(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"])).mean()


def names_of(plan: str) -> list[str]:
    """The primitives of the forward pass, marks apart from other names."""
    batch = {"x": np.ones((ROWS, WIDTH), np.float32)}
    program = cjax.parallelize(Net(), squares, optax.sgd(0.1), batch, plan, devices=jax.devices()[:4])
    composed, shape = program._composed, program._composed.state_shape
    given = shape._params, shape._frozen, shape._model_state, composed.batch_shape, shape._key, None
    jaxpr = make_jaxpr(composed.gradients)(*given).jaxpr
    return ["mark" if is_awaited(name_of(eqn), eqn.params) else name_of(eqn) for eqn in every_equation(jaxpr)]


@pytest.mark.parametrize(
    ("plan", "marks"),
    [
        # In the loop over both layers, once for each micro-batch.
        ("tensor=4 microbatches=2 overlap=2", 2),
        ("tensor=4 microbatches=4 overlap=4", 4),
        ("tensor=4 microbatches=2", 0),
        ("data=4 microbatches=2 overlap=2", 0),
    ],
)
def test_marks_are_of_sums_over_devices(plan: str, marks: int) -> None:
    found = names_of(plan)
    assert found.count("mark") == marks
    # Where the backward pass makes the layer again, as calls. JAX 0.12 leaves calls in the forward pass as well.
    calls, waits = found.count("custom_jvp_call"), max(0, marks - 1)
    assert calls in (waits, 2 * waits), "each waits for the one before it"
