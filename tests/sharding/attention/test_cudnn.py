"""What cuDNN's kernel is asked for, beside the formula; JAX's own equations take the same words and stand in for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from cjax.sharding.attention.kernel import cudnn
from cjax.sharding.place.saved import POLICIES

B, H, D = 2, 2, 4
RANDOM = np.random.default_rng(0)


def formula(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, bias: np.ndarray, causal: bool, window: int | None
) -> np.ndarray:
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * 0.5 + bias
    back = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])  # how far behind its query a key is
    seen = (back >= 0) | (not causal)
    seen &= True if window is None else (back >= 0) & (back < window)
    weights = np.where(seen, np.exp(scores), 0)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


@pytest.mark.parametrize(("queries", "keys", "causal", "window"), [(5, 7, False, None), (5, 5, True, 3)])
def test_what_is_asked_for(
    queries: int, keys: int, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd lengths, which it does not take, are filled up with what nobody attends to."""
    attend, asked = jax.nn.dot_product_attention, list[Any]()

    def instead(*operands: jax.Array, implementation: str, **options: Any) -> jax.Array:
        asked.append((implementation, [x.shape[1] for x in operands]))
        return attend(*operands, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    query, key, value = (RANDOM.normal(size=(B, n, H, D)).astype(np.float32) for n in (queries, keys, keys))
    bias = RANDOM.normal(size=(1, H, queries, keys)).astype(np.float32)
    operands = [jnp.asarray(x) for x in (query, key, value, bias)]
    found = cudnn(*operands, scale=0.5, causal=causal, window=window)
    np.testing.assert_allclose(found, formula(query, key, value, bias, causal, window), atol=1e-5)
    assert asked == [("cudnn", [n + n % 2 for n in (queries, keys, keys)])]


def filled(jaxpr: Any) -> int:
    """How many values are filled up; a pad of less than nothing cuts off."""
    inner = sum(filled(body) for eqn in jaxpr.eqns for body in jaxprs_in_params(eqn.params))
    own = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pad"]
    return inner + sum(eqn.outvars[0].aval.size > eqn.invars[0].aval.size for eqn in own)


@pytest.mark.parametrize(("remat", "wanted"), [("none", 4), ("block", 7)])
def test_what_was_filled_up_is_saved(remat: str, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values are filled up once, and the result's gradient; with recomputed layers once more."""
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *x, implementation, **options: attend(*x, implementation="xla", **options),
    )

    def layer(x: jax.Array, w: list[jax.Array]) -> jax.Array:
        query, key, value = (jnp.einsum("bsi,ihd->bshd", x, each) for each in w)
        return cudnn(query, key, value, None, scale=0.5, causal=False, window=None)

    saving = jax.checkpoint(layer, policy=POLICIES[remat])
    x, w = jnp.ones((B, 5, 3)), [jnp.ones((3, H, D))] * 3
    assert filled(jax.make_jaxpr(jax.grad(lambda x, w: saving(x, w).sum(), (0, 1)))(x, w).jaxpr) == wanted
