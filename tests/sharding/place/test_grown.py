"""Which weights are larger where they meet examples, whatever their authors call them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import plain_trace

from cjax.sharding.place.grown import grown

ROWS, LENGTH, HEADS = 4, 6, 2
PAIRS = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH))


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    """Looked up outside of a loop, added in a checkpoint within."""
    bias = jnp.moveaxis(w[PAIRS], -1, 0)
    turn = jax.checkpoint(lambda x: jnp.tanh(x + bias))
    return jax.lax.scan(lambda x, _: (turn(x), None), x, length=3)[0]


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], bool]] = {
    "pairs": (lambda w, x: x + jnp.moveaxis(w[PAIRS], -1, 0), (LENGTH, HEADS), True),
    "pairs, of one example": (lambda w, x: x + jnp.moveaxis(w[PAIRS], -1, 0)[None], (LENGTH, HEADS), True),
    "pairs, in a loop": (looped, (LENGTH, HEADS), True),
    "repeated": (lambda w, x: x * jnp.broadcast_to(w[:, None], (HEADS, LENGTH, LENGTH)), (HEADS, LENGTH), True),
    "as large as it is": (lambda w, x: x + w, (HEADS, LENGTH, LENGTH), False),
    "a scale": (lambda w, x: x * w[:, None, None], (HEADS,), False),
    "some rows of it": (lambda w, x: x + w[:LENGTH], (2 * LENGTH, LENGTH), False),
    "multiplied": (lambda w, x: jnp.einsum("bhqk,kl->bhql", x, w), (LENGTH, LENGTH), False),
    "summed first": (lambda w, x: x + w[PAIRS].sum(-1), (LENGTH, HEADS), False),
    "no gradient": (lambda w, x: x + jax.lax.stop_gradient(jnp.moveaxis(w[PAIRS], -1, 0)), (LENGTH, HEADS), False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_weight_has_grown_where_it_meets_examples_larger(name: str) -> None:
    function, shape, wanted = CASES[name]

    def loss(params: Any, frozen: Any, state: Any, batch: Any, key: Any, index: Any) -> Any:
        return jnp.square(function(params["w"], batch["x"])).sum(), {}, {}

    x = jnp.ones((ROWS, HEADS, LENGTH, LENGTH))
    trace = plain_trace(loss, params={"w": jnp.ones(shape)}, batch={"x": x})
    assert grown(trace, trace.batch_class) == ({0} if wanted else set())
    assert grown(trace, None) == set()
