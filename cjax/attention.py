"""Dot-product attention in plain JAX, written so that it can be split over a sequence axis whatever its arguments."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = True,
    deterministic: bool = True,
    dtype: Any = None,
    precision: Any = None,
    force_fp32_for_softmax: bool = True,
    is_causal: bool = False,
    module: None = None,
    qk_attn_weights_einsum: None = None,
    attn_weights_value_einsum: None = None,
) -> jax.Array:
    """Attention that cjax recognises: use it directly, or as `attention_fn=cjax.attention` of Flax's attention layers.

    Masks by position (`causal`, `window`) are never made at full size, and blocks that they leave empty are skipped.
    Softmax is computed in float32, or float64 for operands of float64.

    Args:
      query: [batch..., query length, heads, head_dim].
      key: [batch..., key length, key heads, head_dim]; key heads divide heads (grouped-query attention).
      value: [batch..., key length, key heads, value_dim].
      bias: added to the logits; broadcasts to [batch..., heads, query length, key length].
      mask: where False (or 0), a key is not seen; broadcasts likewise.
      causal, is_causal: whether query i sees keys up to i only; the second is Flax's name for it.
      window: how many keys to the left and to the right of its own position a query sees; one number for both.
      segment_ids: [batch..., length], or a pair for queries and keys: who has another number is not seen.
      scale: of the logits; 1 / sqrt(head_dim) by default.
      dropout_rate: share of the weights that are dropped, unless `deterministic`.
      deterministic: drops nothing, whatever the rate.
      dropout_rng: key for dropout.
      broadcast_dropout: whether all examples and heads drop the same weights.
      dtype: to compute in; that of the operands by default.
      precision: of the matmuls.
      force_fp32_for_softmax, module, qk_attn_weights_einsum, attn_weights_value_einsum: Flax's; softmax always is in
        float32, and of the others only None is taken.

    Returns:
      [batch..., query length, heads, value_dim].

    Raises:
      ValueError: for shapes that do not fit, dropout without a key, and options of Flax's that have no meaning here.

    >>> mixed = jax.jit(lambda x: attention(x, x[:, :, :2], x[:, :, :2], causal=True, window=3))
    >>> mixed(jnp.ones((2, 6, 4, 8))).shape
    (2, 6, 4, 8)
    """
    del force_fp32_for_softmax
    refused = {"module": module, "qk_attn_weights_einsum": qk_attn_weights_einsum}
    refused |= {"attn_weights_value_einsum": attn_weights_value_einsum}
    for name, given in refused.items():
        if given is not None:
            raise ValueError(
                f"cjax.attention takes no {name}: the weights are never there as a whole. Leave out sow_weights and "
                "einsum classes, or use Flax's own dot_product_attention."
            )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    _check(query, key, value)
    batch, (num_queries, heads, depth), key_heads = query.shape[:-3], query.shape[-3:], key.shape[-2]
    shape = (*batch, heads, num_queries, key.shape[-3])
    sums = jnp.promote_types(dtype, jnp.float32)

    def grouped(x: jax.Array) -> jax.Array:
        """Heads, third from the end, as key heads and their groups."""
        groups = (key_heads, heads // key_heads) if x.shape[-3] == heads else (1, 1)
        return x.reshape(*x.shape[:-3], *groups, *x.shape[-2:])

    query = query.reshape(*batch, num_queries, key_heads, heads // key_heads, depth)
    logits = jnp.einsum("...qhgd,...khd->...hgqk", query, key, precision=precision, preferred_element_type=sums)
    logits = logits * (1 / math.sqrt(depth) if scale is None else scale)
    if bias is not None:
        logits = logits + grouped(_as_wide("bias", bias, shape)).astype(sums)
    for seen in _masks(shape, mask, causal or is_causal, window, segment_ids):
        logits = jnp.where(grouped(seen), logits, jnp.finfo(sums).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
    if dropout_rate > 0 and not deterministic:
        if dropout_rng is None:
            raise ValueError("cjax.attention needs a dropout_rng for a dropout_rate above 0, or deterministic=True.")
        drawn = (*[1] * (len(shape) - 2), *shape[-2:]) if broadcast_dropout else shape
        keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, drawn)
        weights = weights * (grouped(keep).astype(dtype) / jnp.asarray(1 - dropout_rate, dtype))
    out = jnp.einsum("...hgqk,...khd->...qhgd", weights, value, precision=precision)
    return out.reshape(*batch, num_queries, heads, value.shape[-1])


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(f"cjax.attention takes [batch..., length, heads, head_dim], not {shapes}.")
    same = query.shape[:-3] == key.shape[:-3] == value.shape[:-3] and key.shape[:-1] == value.shape[:-1]
    if not same or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "cjax.attention needs one batch, as many keys as values, and one head_dim of queries and keys, not "
            f"{shapes}."
        )
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"cjax.attention needs key heads that divide the query's: {key.shape[-2]} do not divide {query.shape[-2]}."
        )


def _as_wide(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """With as many dims as the logits; those that it lacks are of size 1."""
    x = jnp.asarray(x)
    fits = x.ndim <= len(shape) and all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"cjax.attention needs a {name} that broadcasts to {shape}, not {x.shape}.")
    return x.reshape(*[1] * (len(shape) - x.ndim), *x.shape)


def _masks(
    shape: tuple[int, ...], mask: Any, causal: bool, window: int | tuple[int, int] | None, segment_ids: Any
) -> list[jax.Array]:
    """All that hides keys, each with as many dims as `shape` has."""
    found = []
    if mask is not None:
        found.append(_as_wide("mask", mask, shape).astype(bool))
    at = (*[1] * (len(shape) - 2), *shape[-2:])
    queries, keys = (lax.broadcasted_iota(jnp.int32, at, len(shape) - end) for end in (2, 1))
    if causal:
        found.append(queries >= keys)
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        found.append((keys >= queries - left) & (keys <= queries + right))
    if segment_ids is not None:
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        lengths = (of_queries.shape, of_keys.shape)
        if lengths != ((*shape[:-3], shape[-2]), (*shape[:-3], shape[-1])):
            raise ValueError(
                f"cjax.attention needs segment_ids of {(*shape[:-3], shape[-2])} for queries and "
                f"{(*shape[:-3], shape[-1])} for keys, not {lengths[0]} and {lengths[1]}."
            )
        found.append(of_queries[..., None, :, None] == of_keys[..., None, None, :])
    return found
