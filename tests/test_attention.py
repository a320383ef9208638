"""cjax.attention beside Flax's and JAX's own."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cjax.attention import attention
from cjax.trace.attention.find import find_attentions
from cjax.trace.jaxpr.simplify import simplify

B, Q, K, H, D, V = 2, 7, 9, 6, 4, 5


@pytest.fixture
def args() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in ((B, Q, H, D), (B, K, H, D), (B, K, H, V))]


def same(have: Any, want: Any) -> None:
    np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)


@pytest.mark.full("True")
@pytest.mark.parametrize("broadcast", [True, False])
def test_flax(args: Any, broadcast: bool) -> None:
    rng = np.random.default_rng(1)
    bias, mask = rng.standard_normal((H, Q, K)), rng.random((B, 1, Q, K)) > 0.4
    options: dict[str, Any] = {"dropout_rng": jax.random.key(1), "dropout_rate": 0.3, "broadcast_dropout": broadcast}
    want = nn.dot_product_attention(*args, bias=bias, mask=mask, deterministic=False, **options)
    same(attention(*args, bias=bias, mask=mask, deterministic=False, **options), want)
    same(attention(*args, bias, mask), nn.dot_product_attention(*args, bias, mask))  # evaluation by default
    same(attention(*args, mask=np.zeros((1, 1))), args[2].mean(1, keepdims=True).repeat(Q, 1))


def test_jax() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((B, K, heads, D))) for heads in (H, 2, 2))
    same(attention(q, k, v, causal=True), jax.nn.dot_product_attention(q, k, v, is_causal=True))
    for window in (3, (4, 1)):
        want = jax.nn.dot_product_attention(q, k, v, local_window_size=window, scale=0.3)
        same(attention(q, k, v, window=window, scale=0.3), want)
    bias = jnp.asarray(rng.standard_normal((1, H, K, K)))
    same(attention(q, k, v, bias=bias), jax.nn.dot_product_attention(q, k, v, bias=bias))
    low = attention(q, k, v, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low, attention(q, k, v), atol=0.05)


def test_segments(args: Any) -> None:
    of_queries, of_keys = np.arange(B * Q).reshape(B, Q) // 3, np.arange(B * K).reshape(B, K) // 4
    mask = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    same(attention(*args, segment_ids=(of_queries, of_keys)), attention(*args, mask=mask))
    q = args[1]
    same(attention(q, *args[1:], segment_ids=of_keys), attention(q, *args[1:], segment_ids=(of_keys, of_keys)))
    same(attention(*(x[0] for x in args), causal=True), attention(*args, causal=True)[0])  # no batch


@pytest.mark.full("True")
@pytest.mark.parametrize("ours", [True, False])
def test_as_attention_fn(ours: bool) -> None:
    fn: dict[str, Any] = {"attention_fn": attention} if ours else {}
    x, mask = jnp.ones((B, Q, 12)), nn.make_causal_mask(jnp.ones((B, Q)))
    linen = nn.MultiHeadDotProductAttention(H, dropout_rate=0.5, deterministic=False, **fn)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    other = nnx.MultiHeadAttention(H, 12, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(3), **fn)

    def both(x: Any) -> Any:
        return linen.init_with_output(rngs, x, mask=mask)[0], other(x, is_causal=True, deterministic=True)

    plain = nn.MultiHeadDotProductAttention(H, dropout_rate=0.5, deterministic=False)
    same(both(x)[0], plain.init_with_output(rngs, x, mask=mask)[0])
    again = nnx.MultiHeadAttention(H, 12, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(3))
    same(both(x)[1], again(x, is_causal=True, deterministic=True))
    jaxpr = simplify(jax.make_jaxpr(both)(x)).jaxpr
    assert len(find_attentions(jaxpr.eqns, jaxpr.outvars)[0]) == 2


def test_always_recognised(args: Any) -> None:
    ids = jnp.zeros((B, Q), int), jnp.zeros((B, K), int)
    few = [args[0], args[1][:, :, :3], args[2][:, :, :3]]
    dropout: dict[str, Any] = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1, "deterministic": False}
    for options in (
        {},
        {"causal": True, "window": 3, "segment_ids": ids},
        {"bias": jnp.ones((H, 1, K)), "mask": jnp.ones((B, 1, 1, K))},
        {"broadcast_dropout": False, **dropout},
        dropout,
        {"dtype": jnp.bfloat16, "scale": 1.0},
    ):
        for given in (args, few):
            jaxpr = simplify(jax.make_jaxpr(lambda *a, o=options: attention(*a, **o))(*given)).jaxpr
            (found,), _ = find_attentions(jaxpr.eqns, jaxpr.outvars)
            assert found.sizes[found.label("query")] == Q and found.sizes[found.label("key")] == K
            assert all(node.var.aval.size <= B * H * K for node in found.leaves)


def test_what_is_refused(args: Any) -> None:
    q, k, v = args
    with pytest.raises(ValueError, match="no module.*sow_weights"):
        attention(q, k, v, module=nn.Dense(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="qk_attn_weights_einsum"):
        attention(q, k, v, qk_attn_weights_einsum=jnp.einsum)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="4 do not divide 6"):
        attention(q, k[:, :, :4], v[:, :, :4])
    with pytest.raises(ValueError, match=r"as many keys as values.*\(2, 8, 6, 5\)"):
        attention(q, k, v[:, 1:])
    with pytest.raises(ValueError, match=r"not query \(6, 4\)"):
        attention(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match=r"mask that broadcasts to \(2, 6, 7, 9\), not \(3, 9\)"):
        attention(q, k, v, mask=np.ones((3, K)))
    with pytest.raises(ValueError, match=r"segment_ids of \(2, 7\).*\(2, 9\)"):
        attention(q, k, v, segment_ids=np.ones((B, Q)))
    with pytest.raises(ValueError, match="dropout_rng"):
        attention(q, k, v, dropout_rate=0.1, deterministic=False)
