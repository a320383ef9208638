"""Layers that several of the models have alike."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

NORMAL = nnx.initializers.normal(0.02)


class Heads(nnx.Module):
    """The projections of a self-attention. They keep heads as a dimension of their own: [embed, heads, head_dim]."""

    def __init__(
        self, embed_dim: int, num_heads: int, *, init: nnx.Initializer = NORMAL,
        out_init: nnx.Initializer | None = None, rngs: nnx.Rngs,
    ):  # fmt: skip
        heads = (num_heads, embed_dim // num_heads)
        self.query = nnx.LinearGeneral(embed_dim, heads, kernel_init=init, rngs=rngs)
        self.key = nnx.LinearGeneral(embed_dim, heads, kernel_init=init, rngs=rngs)
        self.value = nnx.LinearGeneral(embed_dim, heads, kernel_init=init, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, embed_dim, axis=(-2, -1), kernel_init=out_init or init, rngs=rngs)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [batch, sequence, heads, head_dim] of x [batch, sequence, embed]."""
        return self.query(x), self.key(x), self.value(x)


class MLP(nnx.Module):
    """Two linear layers with GELU between them: the exact one, or its tanh form if `approximate`."""

    def __init__(
        self, embed_dim: int, mlp_dim: int, *, approximate: bool = False, init: nnx.Initializer = NORMAL,
        out_init: nnx.Initializer | None = None, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.approximate = approximate
        self.up = nnx.Linear(embed_dim, mlp_dim, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(mlp_dim, embed_dim, kernel_init=out_init or init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=self.approximate))


def linear(
    inputs: int | tuple[int, ...], outputs: int | tuple[int, ...], rngs: nnx.Rngs, init: nnx.Initializer = NORMAL
) -> nnx.LinearGeneral:
    """A matrix without a bias, of which either side may be several dimensions."""
    axis = tuple(range(-len(inputs), 0)) if isinstance(inputs, tuple) else -1
    return nnx.LinearGeneral(inputs, outputs, axis=axis, use_bias=False, kernel_init=init, rngs=rngs)


def tied_scores(embed: nnx.Embed, hidden: jax.Array) -> jax.Array:
    """Logits [..., vocab] of hidden states [..., embed] by the table of tokens; in float32 also where that is not."""
    table = embed.embedding[...]
    if table.dtype.itemsize > 2:  # float64 too stays what it is
        return embed.attend(hidden)
    return jnp.einsum("...e,ve->...v", hidden.astype(table.dtype), table, preferred_element_type=jnp.float32)


def layer_norm(config: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Over the width of the residual stream, with the epsilon of the model's sizes."""
    return nnx.LayerNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)


def rms_norm(config: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The same without means and biases."""
    return nnx.RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)


def dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    # Without a stream the model has no random state to carry, and its loss is a plain function.
    return nnx.Dropout(rate, rngs=rngs if rate else None)
