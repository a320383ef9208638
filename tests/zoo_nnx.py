"""The NNX models of the zoo. Sizes as in zoo_linen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from zoo_linen import CLASSES, EMBED, FFN, HEADS, SEQ, VOCAB


class NNXBlock(nnx.Module):
    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, EMBED, dropout_rate=rate, deterministic=False, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, FFN, rngs=rngs)
        self.down = nnx.Linear(FFN, EMBED, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class NNXDecoder(nnx.Module):
    def __init__(self, num_layers: int = 4, rate: float = 0.1, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, param_dtype=param_dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal((SEQ, EMBED)))
        self.blocks = nnx.List([NNXBlock(rate, rngs=rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class NNXScanDecoder(nnx.Module):
    def __init__(self, num_layers: int = 4, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def create(rngs: nnx.Rngs) -> NNXBlock:
            return NNXBlock(0.1, rngs=rngs)

        self.embed = nnx.Embed(VOCAB, EMBED, param_dtype=param_dtype, rngs=rngs)
        self.blocks = create(rngs)
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(ids)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: NNXBlock) -> jax.Array:
            return block(x, mask)

        return self.embed.attend(self.norm(forward(self.embed(ids), self.blocks)))


class NNXEncoder(nnx.Module):
    def __init__(self, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, param_dtype=param_dtype, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(0.1, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(EMBED, CLASSES, rngs=rngs)

    def __call__(self, ids: jax.Array, present: jax.Array) -> jax.Array:
        x = self.embed(ids)
        mask = nnx.make_attention_mask(present, present)
        for block in self.blocks:
            x = block(x, mask)
        return self.head((x * present[..., None]).sum(1) / present.sum(1, keepdims=True))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 100.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class LlamaBlock(nnx.Module):
    """Grouped-query attention by hand (8 query heads, 2 key-value heads of 6), rotary, SwiGLU, RMSNorm."""

    def __init__(self, embed: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.norm1 = nnx.RMSNorm(embed, rngs=rngs)
        self.query = nnx.Param(init(rngs.params(), (embed, HEADS * 6)).reshape(embed, HEADS, 6))
        self.key = nnx.Param(init(rngs.params(), (embed, 2 * 6)).reshape(embed, 2, 6))
        self.value = nnx.Param(init(rngs.params(), (embed, 2 * 6)).reshape(embed, 2, 6))
        self.out = nnx.Param(init(rngs.params(), (HEADS * 6, embed)).reshape(HEADS, 6, embed))
        self.norm2 = nnx.RMSNorm(embed, rngs=rngs)
        self.gate = nnx.Linear(embed, FFN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(embed, FFN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(FFN, embed, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        q = rotate(jnp.einsum("bsd,dhk->bshk", h, self.query[...]))
        k = rotate(jnp.einsum("bsd,dgk->bsgk", h, self.key[...]))
        v = jnp.einsum("bsd,dgk->bsgk", h, self.value[...])
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])  # [batch, seq, group, head in group, head_dim]
        scores = jnp.einsum("bqgnk,bsgk->bgnqs", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bgnqs,bsgk->bqgnk", self.weigh(scores), v).reshape(*x.shape[:2], HEADS, -1)
        x = x + jnp.einsum("bshk,hkd->bsd", mixed, self.out[...])
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))

    def weigh(self, scores: jax.Array) -> jax.Array:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(causal, scores, -1e9))


class SinkBlock(LlamaBlock):
    """As gpt-oss: each head has a learned sink, and of two layers one sees a window alone."""

    def __init__(self, embed: int, window: int, *, rngs: nnx.Rngs):
        super().__init__(embed, rngs=rngs)
        self.sinks, self.window = nnx.Param(rngs.params.normal((2, HEADS // 2))), window

    def weigh(self, scores: jax.Array) -> jax.Array:
        i, j = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[-2:], dim) for dim in (0, 1))
        scores = jnp.where((i >= j) & (i - j < self.window), scores, -jnp.inf)
        sinks = jnp.broadcast_to(self.sinks[...][:, :, None, None].astype(scores.dtype), (*scores.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]


class Llama(nnx.Module):
    def __init__(self, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, param_dtype=param_dtype, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(EMBED, rngs=rngs) for _ in range(4)])
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SinkLlama(Llama):
    def __init__(self, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs):
        super().__init__(param_dtype=param_dtype, rngs=rngs)
        self.blocks = nnx.List([SinkBlock(EMBED, (4, SEQ)[number % 2], rngs=rngs) for number in range(4)])


class NNXConvNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(3, 24, (3, 3), strides=2, rngs=rngs)
        self.norm1 = nnx.BatchNorm(24, rngs=rngs)
        self.conv2 = nnx.Conv(24, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((1, 2)))


class MLP(nnx.Module):
    def __init__(self, widths: tuple[int, ...] = (10, 64, 32, 1), *, rngs: nnx.Rngs):
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.tanh(layer(x))
        return self.layers[-1](x)
