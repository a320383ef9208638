"""What cuDNN's kernel is asked for, beside the formula; JAX's own equations take the same words and stand in for it."""

from typing import Any

import jax
import numpy as np
import pytest

from cjax.sharding.attention.kernel import cudnn

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
    operands = [jax.numpy.asarray(x) for x in (query, key, value, bias)]
    found = cudnn(*operands, scale=0.5, causal=causal, window=window)
    np.testing.assert_allclose(found, formula(query, key, value, bias, causal, window), atol=1e-5)
    assert asked == [("cudnn", [n + n % 2 for n in (queries, keys, keys)])]
