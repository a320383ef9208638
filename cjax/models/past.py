"""The keys and values of tokens already seen, so that a decoder computes each of them once."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Past:
    """What one attention layer remembers. `add` changes it in place, so it must not outlive the trace it is used in.

    Attributes:
        keys: [batch, room, heads, head_dim], zero from `length` on.
        values: the same.
        length: int32, how many tokens have been seen.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, batch: int, room: int, heads: int, head_dim: int, dtype: jnp.dtype) -> "Past":
        zeros = jnp.zeros([batch, room, heads, head_dim], dtype)
        return cls(zeros, zeros, jnp.zeros([], jnp.int32))

    def add(self, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Remembers more tokens; returns the mask [1, 1, new, room] of what each of them may look at."""
        new = self.length + jnp.arange(keys.shape[1])
        self.keys = jax.lax.dynamic_update_slice_in_dim(self.keys, keys.astype(self.keys.dtype), self.length, axis=1)
        self.values = jax.lax.dynamic_update_slice_in_dim(
            self.values, values.astype(self.values.dtype), self.length, axis=1
        )
        self.length = self.length + keys.shape[1]
        return (jnp.arange(self.keys.shape[1]) <= new[:, None])[None, None]


def attend_causally(query: jax.Array, key: jax.Array, value: jax.Array, past: Past | None) -> jax.Array:
    """Each position looks at itself and at those before it, in `past` too.

    Args:
        query: [batch, sequence, heads, head_dim].
        key: [batch, sequence, heads or a divisor of them, head_dim].
        value: like key.
        past: what came before `sequence`; gets the new keys and values.
    """
    if past is None:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)
    mask = past.add(key, value)
    return jax.nn.dot_product_attention(query, past.keys, past.values, mask=mask)


def positions_of(length: int, past: list[Past] | None) -> jax.Array:
    """int32[length]: where in the text the new tokens stand."""
    return jnp.arange(length) + (past[0].length if past else 0)
