"""A loss on a part of its rows beside the loss on all of them: what may differ, and how results grow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import plain_trace

from cjax.jax_compat.core import ClosedJaxpr
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.microbatches.mirror import Mirror, Unlike

ROWS, WIDTH, TIMES = 8, 3, 4
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of a weight, examples and their labels
KEY = jax.random.key(0)


def mirrored(loss: Loss) -> Mirror:
    def whole(params: Any, frozen: Any, state: Any, batch: Any, key: Any, index: Any) -> Any:
        return loss(params["w"], batch["x"], batch["y"]), {}, {}

    def batch(rows: int) -> dict[str, np.ndarray]:
        return {"x": np.ones((rows, WIDTH), np.float32), "y": np.zeros(rows, np.int32)}

    params = {"w": np.ones(WIDTH, np.float32)}
    trace = plain_trace(whole, params=params, batch=batch(ROWS))
    made = jax.make_jaxpr(lambda *trees: whole(*trees)[0])(params, {}, {}, batch(ROWS // TIMES), KEY, jnp.int32(0))
    part: ClosedJaxpr = simplify(made)
    return Mirror(trace, part, TIMES)


@pytest.mark.parametrize(
    ("growth", "loss"),
    [
        (1, lambda w, x, y: (x * w).sum()),
        (0, lambda w, x, y: (x * w).mean()),
        (0, lambda w, x, y: (x * w).sum() / (x[:, 0] ** 2).sum()),
        (1, lambda w, x, y: (x * w).sum() / (x[:, 0] ** 2).mean()),
        (None, lambda w, x, y: (w**2).sum()),
        (0, lambda w, x, y: (x * w)[jnp.arange(len(x)), y].mean()),  # numbers of rows as indices
    ],
)
def test_how_a_result_grows_with_the_rows(growth: int | None, loss: Loss) -> None:
    assert mirrored(loss).growth(0) == growth


@pytest.mark.parametrize(
    ("why", "loss"),
    [
        ("computes with the numbers of rows", lambda w, x, y: (x * w * jnp.arange(len(x))[:, None]).mean()),
        ("computes with the numbers of rows", lambda w, x, y: jnp.sin(jnp.arange(len(x)) / 2) @ (x @ w)),
        ("computes with the number of rows", lambda w, x, y: jnp.tanh((x * w).sum() - len(x))),
        ("is not there for fewer rows", lambda w, x, y: (x * w).sum() if len(x) < ROWS else jnp.sin(x * w).sum()),
        ("is there for fewer rows alone", lambda w, x, y: (x * w).sum() if len(x) == ROWS else -(x * w).sum()),
        ("a constant array", lambda w, x, y: (x * w * np.arange(len(x), dtype=np.float32)[:, None]).sum()),
        ("not known to be the batch.s", lambda w, x, y: (jax.random.poisson(KEY, x**2) @ w).mean()),
    ],
)
def test_what_a_part_does_otherwise_is_said(why: str, loss: Loss) -> None:
    with pytest.raises(Unlike, match=why):
        mirrored(loss)
