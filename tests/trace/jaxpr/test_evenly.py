"""Lookups that find every row equally often, and those that only seem to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cjax.sharding.products.lookup import look_up_whole
from cjax.trace.jaxpr.evenly import MOST, found_evenly
from cjax.trace.jaxpr.simplify import simplify

ROWS, TOP = 6, 3


def order(key: jax.Array) -> jax.Array:
    return jnp.argsort(key)


# Rows and scores of each, one of a token's for each expert; how often every row is found.
EVEN: dict[str, tuple[Callable[..., jax.Array], int]] = {
    "once": (lambda x, k: x[order(k[:ROWS])], 1),
    "in descending order": (lambda x, k: x[jnp.argsort(-k[:ROWS], descending=True)], 1),
    "what numbers are sorted to": (lambda x, k: x[lax.sort((jnp.arange(ROWS), k[:ROWS]), num_keys=2)[0]], 1),
    "and back": (lambda x, k: x[order(order(k[:ROWS]))], 1),
    "for each expert": (lambda x, k: x[order(k) // TOP], TOP),
    "experts behind one another": (lambda x, k: x[order(k) % ROWS], TOP),
    "by taking": (lambda x, k: jnp.take(x, lax.div(order(k), jnp.int32(TOP)), axis=0), TOP),
    "as a table": (lambda x, k: x[(order(k) // TOP).reshape(ROWS, TOP)].reshape(ROWS * TOP, -1), TOP),
    "from behind": (lambda x, k: x[-1 - order(k) // TOP], TOP),
    "in a loop": (lambda x, k: lax.scan(lambda c, _: (c[order(c[:, 0])] * 2, None), x, None, length=2)[0], 1),
}
PART = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
UNEVEN: dict[str, Callable[..., jax.Array]] = {
    "places of the batch": lambda x, k: x[(k[:ROWS] * 5).astype(int)],
    "half of them": lambda x, k: x[order(k[:ROWS]) // 2],
    "sorted numbers": lambda x, k: x[jnp.sort((k[:ROWS] * 5).astype(int))],
    "the best": lambda x, k: x[lax.top_k(k[:ROWS], ROWS)[1] // 2],
    "two orders": lambda x, k: x[jnp.minimum(order(k[:ROWS]), order(-k[:ROWS]))],
    "with others": lambda x, k: x[jnp.where(k[:ROWS] > 0.5, order(k[:ROWS]), 0)],
    "shifted": lambda x, k: x[jnp.roll(order(k[:ROWS]), 1) + jnp.arange(ROWS) // ROWS],
    "what lay beside": lambda x, k: x[lax.sort((k[:ROWS], (k[:ROWS] * 5).astype(int)), num_keys=1)[1]],
    "of a part": lambda x, k: lax.gather(x, order(k[:ROWS])[:, None], PART, (1, ROWS - 1)),
    "of columns": lambda x, k: x[:, order(k[:ROWS]) // 2],
}


def traced(function: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array, dict[int, int]]:
    rng = np.random.default_rng(0)
    x, k = (jnp.asarray(rng.random(shape), jnp.float32) for shape in ((ROWS, ROWS), (ROWS * TOP,)))
    closed = simplify(jax.make_jaxpr(function)(x, k))
    return x, k, found_evenly(closed.jaxpr)


@pytest.mark.parametrize("name", EVEN)
def test_every_row_is_found_equally_often(name: str) -> None:
    function, times = EVEN[name]
    assert list(traced(function)[2].values()) == [times]


@pytest.mark.parametrize("name", UNEVEN)
def test_of_others_nothing_is_said(name: str) -> None:
    assert not traced(UNEVEN[name])[2]


def test_too_many_rows_are_not_counted() -> None:
    rows = jax.ShapeDtypeStruct((MOST + 1, 1), jnp.float32)
    closed = jax.make_jaxpr(lambda x: x[jnp.argsort(x[:, 0])])(rows)
    assert not found_evenly(simplify(closed).jaxpr)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["once", "for each expert", "as a table", "from behind"])
def test_their_gradients_are_looked_up_in_turn(name: str, dtype: jnp.dtype) -> None:
    """And summed in float32, where XLA would scatter them into zeros."""
    function, times = EVEN[name]
    x, k, _ = traced(function)
    closed = simplify(jax.make_jaxpr(function)(x.astype(dtype), k))
    gather = next(eqn for eqn in closed.jaxpr.eqns if str(eqn.primitive) == "gather")
    places = np.asarray(jax.core.eval_jaxpr(closed.jaxpr.replace(outvars=[gather.invars[1]]), closed.consts, x, k)[0])
    weights = jnp.asarray(np.random.default_rng(1).random(gather.outvars[0].aval.shape), dtype)

    def of(times: int | None) -> Callable[[jax.Array], jax.Array]:
        return jax.grad(lambda x: (look_up_whole(gather, (x, places), gather.params, times)[0] * weights).sum())

    mine, theirs = of(times), of(None)
    np.testing.assert_allclose(*(np.asarray(f(x.astype(dtype)), np.float32) for f in (mine, theirs)), rtol=1e-6)
    names = [str(eqn.primitive) for eqn in jax.make_jaxpr(mine)(x.astype(dtype)).jaxpr.eqns]
    assert "scatter-add" not in names and "gather" in names
