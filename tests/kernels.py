"""A kernel for attention in plain JAX, in the operands' own precision, called as cuDNN's is."""

import jax
import jax.numpy as jnp


def plain(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *,
    scale: float, causal: bool, window: int | None,
) -> jax.Array:  # fmt: skip
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    logits = jnp.einsum("bqnh,bknh->bnqk", query, key) * scale
    logits = logits if bias is None else logits + bias
    if causal:
        rows, columns = jnp.indices(logits.shape[2:])
        logits = jnp.where((rows >= columns) & (rows - columns < (window or logits.shape[2])), logits, -jnp.inf)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits), value)
