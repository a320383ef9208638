"""Products of one tensor with several that an axis splits: their parts of its gradient are one sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered

ROWS, WIDTH, INNER = 16, 32, 64


class PostNorm(nn.Module):
    """Three products of a norm's result, which the residual reads too; written as an author may, each with a cast."""

    casts: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.LayerNorm()(x)
            read = [x.astype(jnp.bfloat16) if self.casts else x for _ in range(3)]
            a, b, c = (nn.Dense(INNER, dtype=each.dtype)(each) for each in read)
            x = x + nn.Dense(WIDTH)(jax.nn.relu(a) * b + jnp.tanh(c))
        return x


def reduced(net: nn.Module, plan: str) -> list[Any]:
    """What a step reduces over the tensor axis, of the size of the stream or larger."""
    batch = {"x": np.ones((ROWS, WIDTH), np.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2)

    program = cjax.parallelize(net, loss, optax.sgd(0.1), batch, plan, devices="h100:4")
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    found = audit(compiled, program.mesh).select("all-reduce", ["tensor"])
    return [c for c in found if sum(int(np.prod(s.dims)) for s in c.shapes) >= ROWS * WIDTH]


@pytest.mark.aot
@pytest.mark.parametrize("casts", [False, True])
def test_a_residual_behind_a_norm_costs_no_reduction(casts: bool) -> None:
    """One a layer each way, however its author rounds what products read; six without."""
    found = reduced(PostNorm(casts), "tensor=4")
    assert sum(c.count * sum(int(np.prod(s.dims)) for s in c.shapes) for c in found) == 4 * ROWS * WIDTH
