"""A mixture of experts as its users write one, in Flax alone: Llama's layers, with experts in the place of the MLP that
tokens are sorted for, so that none is ever full (Gale et al., MegaBlocks, 2023; Muennighoff et al., OLMoE, 2024)."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """Sizes; `mlp_dim` is that of one expert, `top` how many experts a token is sent to."""

    vocab_size: int
    context: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    num_experts: int
    top: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0
    # Wavelengths are not stretched, which Llama's are by these names.
    rope_factor, rope_low, rope_high, rope_context = 1.0, 1.0, 4.0, 8192
    tied = False

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def num_params(self) -> int:
        return self._num_params(self.num_experts)

    @property
    def num_active(self) -> int:
        """Of the parameters, those that a token is multiplied by."""
        return self._num_params(self.top)

    def _num_params(self, num_experts: int) -> int:
        width, heads = self.embed_dim, 2 * self.num_heads + 2 * self.num_kv_heads
        layer = width * (self.head_dim * heads + self.num_experts + 2 + 3 * num_experts * self.mlp_dim)
        return self.num_layers * layer + width * (2 * self.vocab_size + 1)


def turned(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions of [batch, length, heads, depth]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: MixtureConfig, rngs: nnx.Rngs):
        width, depth, self.theta = config.embed_dim, config.head_dim, config.rope_theta

        def heads(num: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(width, (num, depth), use_bias=False, rngs=rngs)

        self.query, self.key, self.value = (
            heads(config.num_heads),
            heads(config.num_kv_heads),
            heads(config.num_kv_heads),
        )
        self.out = nnx.LinearGeneral((config.num_heads, depth), width, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = turned(self.query(x), self.theta), turned(self.key(x), self.theta)
        return self.out(jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True))


class Experts(nnx.Module):
    def __init__(self, config: MixtureConfig, rngs: nnx.Rngs):
        num, width, inner = config.num_experts, config.embed_dim, config.mlp_dim
        self.num, self.top = num, config.top
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(width, num, use_bias=False, rngs=rngs)
        self.gate, self.up = (nnx.Param(init(rngs.params(), (num, width, inner))) for _ in range(2))
        self.down = nnx.Param(init(rngs.params(), (num, inner, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        weights, which = lax.top_k(jax.nn.softmax(self.router(tokens).astype(jnp.float32)), self.top)
        expert = which.reshape(-1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=self.num)
        given = tokens[order // self.top]
        inner = nnx.silu(lax.ragged_dot(given, self.gate[...], sizes)) * lax.ragged_dot(given, self.up[...], sizes)
        made = lax.ragged_dot(inner, self.down[...], sizes)[jnp.argsort(order)]
        made = made.reshape(-1, self.top, x.shape[-1]) * weights[..., None].astype(x.dtype)
        return made.sum(1).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, config: MixtureConfig, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = (
            nnx.RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs) for _ in range(2)
        )
        self.attention, self.mlp = Attention(config, rngs), Experts(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Mixture(nnx.Module):
    def __init__(self, config: MixtureConfig, *, rngs: nnx.Rngs):
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.head = nnx.Linear(config.embed_dim, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token_embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mixture_loss(model: Mixture, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
