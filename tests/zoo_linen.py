"""The Linen models of the zoo."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

SEQ, EMBED, HEADS, FFN, VOCAB, CLASSES = 12, 40, 8, 64, 101, 7


# --- Linen transformers ---


class Block(nn.Module):
    """Pre-norm transformer layer; `ffn` wide MLP."""

    deterministic: bool = True
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None, context: jax.Array | None = None) -> jax.Array:
        drop = partial(nn.Dropout, self.rate, deterministic=self.deterministic)
        attention = partial(
            nn.MultiHeadDotProductAttention, HEADS, dropout_rate=self.rate, deterministic=self.deterministic
        )
        x = x + drop()(attention()(nn.LayerNorm()(x), mask=mask))
        if context is not None:
            x = x + attention(name="cross")(nn.LayerNorm()(x), context)
        h = nn.gelu(nn.Dense(FFN)(nn.LayerNorm()(x)))
        return x + drop()(nn.Dense(x.shape[-1])(h))


class LinenDecoder(nn.Module):
    num_layers: int = 4
    rate: float = 0.1
    remat: bool = False
    tied: bool = False

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        embed = nn.Embed(VOCAB, EMBED)
        x = embed(ids) + nn.Embed(SEQ, EMBED, name="positions")(jnp.arange(ids.shape[1]))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        mask = nn.make_causal_mask(ids)
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.num_layers):
            x = block(not train, self.rate, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, use_bias=False)(x)


class ScanBody(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        return Block(self.deterministic, 0.1)(x, mask), None


class LinenScanDecoder(nn.Module):
    num_layers: int = 4

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(ids)
        stack = nn.scan(
            ScanBody,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.num_layers,
        )
        x, _ = stack(not train)(x, nn.make_causal_mask(ids))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class LinenEncoder(nn.Module):
    num_layers: int = 3

    @nn.compact
    def __call__(self, ids: jax.Array, present: jax.Array, train: bool) -> jax.Array:
        x = nn.LayerNorm()(nn.Embed(VOCAB, EMBED)(ids))
        mask = nn.make_attention_mask(present, present)
        for _ in range(self.num_layers):
            x = Block(not train, 0.1)(x, mask)
        pooled = (x * present[..., None]).sum(1) / present.sum(1, keepdims=True)
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(EMBED)(pooled)))


class PackedDecoder(nn.Module):
    """One matmul for queries, keys and values, as GPT-2 has it."""

    num_layers: int = 4

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(ids)
        batch, seq = ids.shape
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        for i in range(self.num_layers):
            packed = nn.Dense(3 * EMBED, name=f"qkv_{i}")(nn.LayerNorm(name=f"norm1_{i}")(x))
            q, k, v = (t.reshape(batch, seq, HEADS, -1) for t in jnp.split(packed, 3, axis=-1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
            weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, EMBED)
            x = x + nn.Dense(EMBED, name=f"proj_{i}")(mixed)
            h = nn.gelu(nn.Dense(FFN, name=f"up_{i}")(nn.LayerNorm(name=f"norm2_{i}")(x)))
            x = x + nn.Dense(EMBED, name=f"down_{i}")(h)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(source)
        for i in range(3):
            x = Block(not train, 0.1, name=f"encoder_{i}")(x)
        context = nn.LayerNorm()(x)
        y = nn.Embed(83, EMBED)(target)
        mask = nn.make_causal_mask(target)
        for i in range(4):
            y = Block(not train, 0.1, name=f"decoder_{i}")(y, mask, context)
        return nn.Dense(83)(nn.LayerNorm()(y))


class MixtureOfExperts(nn.Module):
    """`top` = 0 mixes all experts; else each token goes to `top` experts that have room for `capacity` tokens each."""

    num_experts: int = 4
    top: int = 0
    capacity: int = 88

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, embed = x.shape
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.num_experts, embed, FFN))
        down = self.param("down", init, (self.num_experts, FFN, embed))
        gates = jax.nn.softmax(nn.Dense(self.num_experts, use_bias=False, name="router")(x))
        if not self.top:
            h = nn.relu(jnp.einsum("bsd,edf->ebsf", x, up))
            return jnp.einsum("ebsf,efd,bse->bsd", h, down, gates)
        gates = gates.reshape(batch * seq, -1)
        best, expert = jax.lax.top_k(gates, self.top)
        chosen = jax.nn.one_hot(expert, self.num_experts, dtype=jnp.int32)  # [token, top, expert]
        seat = jnp.cumsum(chosen.reshape(-1, self.num_experts), 0).reshape(chosen.shape) - 1
        seats = jax.nn.one_hot(seat, self.capacity, dtype=x.dtype)  # no seat left: a row of zeros
        chosen = chosen.astype(x.dtype)
        dispatch = jnp.einsum("nke,nkec->nec", chosen, seats)
        combine = jnp.einsum("nk,nke,nkec->nec", best, chosen, seats)
        slots = jnp.einsum("nec,nd->ecd", dispatch, x.reshape(batch * seq, embed))
        h = nn.relu(jnp.einsum("ecd,edf->ecf", slots, up))
        out = jnp.einsum("ecf,efd->ecd", h, down)
        return jnp.einsum("nec,ecd->nd", combine, out).reshape(x.shape)


class MoEDecoder(nn.Module):
    top: int = 0
    mixture: Any = None  # another than the one above

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(ids)
        mask = nn.make_causal_mask(ids)
        for _ in range(3):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            mixture = MixtureOfExperts(top=self.top) if self.mixture is None else self.mixture()
            x = x + mixture(nn.LayerNorm()(x))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


# --- Linen vision and recurrence ---


class LinenConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (24, 32):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.max_pool(nn.Conv(48, (3, 3))(x), (2, 2), strides=(2, 2), padding="SAME")
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class VisionTransformer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(EMBED, (4, 4), strides=(4, 4), padding="VALID", name="patches")(images)
        x = x.reshape(x.shape[0], -1, EMBED)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], EMBED))
        for _ in range(4):
            x = Block(not train, 0.1)(x)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(1))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(EMBED, (4, 4), strides=(4, 4), name="patches")(images)
        x = x.reshape(x.shape[0], -1, EMBED)
        for _ in range(4):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(24)(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            x = x + nn.Dense(EMBED)(nn.gelu(nn.Dense(FFN)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(1))


class LinenLSTM(nn.Module):
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, 24)(ids)
        for features in (32, 48):
            x = nn.RNN(nn.OptimizedLSTMCell(features, param_dtype=self.param_dtype))(x)
        return nn.Dense(VOCAB)(x)


class Layered(nn.Module):
    """Layers of few equations, for what is a matter of schedules or of leaves alone."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(24)(x)
        for _ in range(self.layers):
            x = x + nn.Dense(24)(nn.tanh(nn.Dense(32)(x)))
        return nn.Dense(1)(x)
