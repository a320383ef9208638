"""Llama 2 and 3: rotary positions, grouped queries, RMSNorm, gated MLP. Sizes by name, and the loss."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cjax.models.cross_entropy import CHUNK, cross_entropy
from cjax.models.layers import linear, rms_norm, tied_scores
from cjax.models.past import Past, attend_causally, positions_of
from cjax.models.sizes import check_counts, check_divides, check_length, choose


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama.

    Attributes:
        num_layers: transformer blocks.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, each shared by `num_heads / num_kv_heads` heads of queries.
        embed_dim: width of the residual stream.
        mlp_dim: width inside the gated MLP.
        head_dim: width of a head; `embed_dim / num_heads` when None.
        context: the longest sequence, in tokens.
        vocab_size: token ids run from 0 to `vocab_size - 1`.
        norm_epsilon: what RMSNorm adds to the mean square.
        rope_theta: the base of the rotary positions' wavelengths.
        rope_factor: Llama 3.1's stretching of long wavelengths for longer contexts; 1 leaves them as they are. The next
            three matter only otherwise.
        rope_low: wavelengths above `rope_context / rope_low` are stretched by the whole factor,
        rope_high: those below `rope_context / rope_high` not at all.
        rope_context: the context before stretching.
        tied: the classifier is the token embedding, transposed; otherwise a matrix of its own.

    Raises:
        ValueError: sizes that can't be built, with the nearest that can.

    >>> LlamaConfig(num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=16, mlp_dim=32).width  # of a head
    4

    Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
    """

    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    embed_dim: int = 4096
    mlp_dim: int = 11008
    head_dim: int | None = None
    context: int = 4096
    vocab_size: int = 32000
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    tied: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "num_layers", "num_heads", "num_kv_heads", "embed_dim", "mlp_dim", "context", "vocab_size")
        check_divides(self, "num_heads", "num_kv_heads", "groups")
        if self.head_dim is None:
            check_divides(self, "embed_dim", "num_heads", "heads")
        if self.width % 2:
            raise ValueError(
                f"LlamaConfig: head_dim is {self.width}, and rotary positions turn pairs of numbers; "
                f"write head_dim={self.width + 1}"
            )
        if self.rope_factor < 1 or not 0 < self.rope_low < self.rope_high:
            raise ValueError(
                f"LlamaConfig: rope_factor={self.rope_factor}, rope_low={self.rope_low}, rope_high={self.rope_high}; "
                "write a factor of at least 1, such as 8, and 0 < rope_low < rope_high, such as 1 and 4"
            )

    @property
    def width(self) -> int:
        """Of a head, whether it is given or not."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def num_params(self) -> int:
        """The number of trained values (a tied classifier is the token embedding, counted once)."""
        attention = 2 * self.embed_dim * self.width * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.embed_dim * self.mlp_dim + 2 * self.embed_dim
        return self.num_layers * block + (1 if self.tied else 2) * self.vocab_size * self.embed_dim + self.embed_dim


_llama3 = LlamaConfig(num_kv_heads=8, mlp_dim=14336, context=8192, vocab_size=128256, rope_theta=500000.0)
_llama2_70b = LlamaConfig(num_layers=80, num_heads=64, num_kv_heads=8, embed_dim=8192, mlp_dim=28672)
# Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023.
# Grattafiori et al., "The Llama 3 Herd of Models", 2024; 3.1 and 3.2 are its longer contexts and smaller models.
presets: dict[str, LlamaConfig] = {
    "llama-mini": LlamaConfig(4, num_heads=6, num_kv_heads=2, embed_dim=192, mlp_dim=512, context=256, vocab_size=256),
    "llama-2-7b": LlamaConfig(),
    "llama-2-13b": LlamaConfig(num_layers=40, num_heads=40, num_kv_heads=40, embed_dim=5120, mlp_dim=13824),
    "llama-2-70b": _llama2_70b,
    "llama-3-8b": _llama3,
    "llama-3-70b": dataclasses.replace(_llama2_70b, context=8192, vocab_size=128256, rope_theta=500000.0),
    "llama-3.1-8b": dataclasses.replace(_llama3, context=131072, rope_factor=8.0),
    "llama-3.1-405b": dataclasses.replace(
        _llama3, num_layers=126, num_heads=128, embed_dim=16384, mlp_dim=53248, context=131072, rope_factor=8.0
    ),
    "llama-3.2-1b": dataclasses.replace(
        _llama3, num_layers=16, embed_dim=2048, head_dim=64, mlp_dim=8192, context=131072, rope_factor=32.0, tied=True
    ),
}


def llama(name: str, **overrides: Any) -> LlamaConfig:
    """The sizes of a Llama by name, some of them changed.

    Args:
        name: one of `presets`.
        overrides: fields of `LlamaConfig`.

    Raises:
        ValueError: an unknown name or field, with those that exist.

    >>> llama("llama-3-8b").num_params
    8030261248
    """
    return choose(presets, "Llama", name, overrides)


def frequencies(config: LlamaConfig) -> np.ndarray:
    """float64[head_dim / 2]: radians per position of each pair of numbers in a head."""
    plain = config.rope_theta ** (-np.arange(0, config.width, 2) / config.width)
    if config.rope_factor == 1:
        return plain
    # 0 for wavelengths that are stretched, 1 for those that stay, between the two bounds a straight line in frequency.
    share = config.rope_context * plain / (2 * math.pi)
    kept = np.clip((share - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    return plain * (kept + (1 - kept) / config.rope_factor)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of x [batch, sequence, heads, head_dim] by angles [sequence, head_dim / 2].

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention, several heads of queries to each head of keys and values."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        heads, kv_heads = (config.num_heads, config.width), (config.num_kv_heads, config.width)
        self.query = linear(config.embed_dim, heads, rngs)
        self.key = linear(config.embed_dim, kv_heads, rngs)
        self.value = linear(config.embed_dim, kv_heads, rngs)
        self.out = linear(heads, config.embed_dim, rngs)

    def __call__(self, x: jax.Array, angles: jax.Array, past: Past | None = None) -> jax.Array:
        query, key = rotate(self.query(x), angles), rotate(self.key(x), angles)
        return self.out(attend_causally(query, key, self.value(x), past))


class MLP(nnx.Module):
    """SwiGLU: a linear layer gated by the SiLU of another.

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config.embed_dim, config.mlp_dim, rngs)
        self.up = linear(config.embed_dim, config.mlp_dim, rngs)
        self.down = linear(config.mlp_dim, config.embed_dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention and MLP, each on the normalised stream and added back to it."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, angles: jax.Array, past: Past | None = None) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), angles, past)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """A decoder that predicts the next token.

    Args:
        config: the sizes; see `llama` for the known ones.
        rngs: a `params` stream.

    >>> def logits(tokens):
    ...     model = Llama(llama("llama-mini"), rngs=nnx.Rngs(0))
    ...     return model(tokens)
    >>> jax.eval_shape(logits, jax.ShapeDtypeStruct((2, 16), jnp.int32)).shape
    (2, 16, 256)
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(0.02)
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = rms_norm(config, rngs)
        if not config.tied:
            self.head = linear(config.embed_dim, config.vocab_size, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int[batch, sequence] to logits [batch, sequence, vocab] of the token after each."""
        return self.classify(self.hidden(tokens))

    def hidden(self, tokens: jax.Array, past: list[Past] | None = None) -> jax.Array:
        """What the classifier sees: [batch, sequence, embed]. `past` (see `make_past`) holds earlier tokens."""
        length = tokens.shape[1]
        check_length(length, self.config.context)
        # In float32 whatever the model's precision: at position 10,000 bfloat16 can't tell neighbours apart.
        angles = positions_of(length, past)[:, None] * jnp.asarray(frequencies(self.config), jnp.float32)
        x = self.token_embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, angles, past[i] if past else None)
        return self.norm(x)

    def classify(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., vocab] of hidden states [..., embed]."""
        return tied_scores(self.token_embed, hidden) if self.config.tied else self.head(hidden)

    def make_past(self, batch: int, room: int) -> list[Past]:
        """An empty memory of up to `room` tokens for each layer."""
        heads, dtype = (self.config.num_kv_heads, self.config.width), self.token_embed.embedding.dtype
        return [Past.empty(batch, room, *heads, dtype) for _ in self.blocks]


def loss(model: Llama, batch: Mapping[str, jax.Array], *, chunk: int | None = CHUNK) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
        model: a Llama.
        batch: `inputs` and `targets`, int[batch, sequence]; `targets[:, t]` is the token that follows `inputs[:, t]`,
            or -100 where nothing is to be predicted, such as in a prompt.
        chunk: how many positions of a row are classified at a time, all if None; see `cross_entropy`.

    >>> tokens = np.arange(34).reshape(2, 17)
    >>> model = Llama(llama("llama-mini", num_layers=1), rngs=nnx.Rngs(0))
    >>> bool(5 < nnx.jit(loss)(model, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}) < 6)
    True
    """
    return cross_entropy(model.hidden(batch["inputs"]), batch["targets"], model.classify, chunk=chunk)
