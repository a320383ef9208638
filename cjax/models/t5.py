"""T5: an encoder and a decoder with relative positions. Sizes by name, and the loss."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cjax.models.cross_entropy import CHUNK, cross_entropy
from cjax.models.layers import dropout, linear, rms_norm, tied_scores
from cjax.models.past import Past, positions_of
from cjax.models.sizes import check_counts, check_rate, choose

KeyValues = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The sizes of a T5.

    Attributes:
        num_layers: transformer blocks of the encoder, and as many of the decoder.
        num_decoder_layers: how many of the decoder, if not as many.
        num_heads: attention heads.
        head_dim: width of a head; `num_heads * head_dim` need not be `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_dim: width inside the MLP.
        vocab_size: token ids run from 0 to `vocab_size - 1`.
        num_buckets: kinds of distances that attention tells apart.
        max_distance: beyond it all distances are one.
        norm_epsilon: what RMSNorm adds to the mean square.
        dropout: rate on the embeddings, on what each branch adds to the residual stream, and inside the MLP.
        gated: T5 1.1's MLP, gated by GELU; otherwise ReLU.
        tied: the classifier is the token embedding, transposed and divided by sqrt(embed_dim); otherwise a matrix of
            its own, as in T5 1.1.

    Raises:
        ValueError: sizes that can't be built, with the nearest that can.

    >>> T5Config(num_layers=2, num_heads=2, head_dim=4, embed_dim=8, mlp_dim=16, vocab_size=100).decoder_layers
    2

    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019.
    """

    num_layers: int = 12
    num_decoder_layers: int | None = None
    num_heads: int = 12
    head_dim: int = 64
    embed_dim: int = 768
    mlp_dim: int = 3072
    vocab_size: int = 32128
    num_buckets: int = 32
    max_distance: int = 128
    norm_epsilon: float = 1e-6
    dropout: float = 0.0
    gated: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        counts = ("num_layers", "decoder_layers", "num_heads", "head_dim", "embed_dim", "mlp_dim", "vocab_size")
        check_counts(self, *counts)
        check_rate(self, "dropout")
        if self.num_buckets < 4 or self.num_buckets % 4 or self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"T5Config: num_buckets={self.num_buckets}, max_distance={self.max_distance}; write a multiple of 4, "
                f"and a distance above {max(4, self.num_buckets) // 2}"
            )

    @property
    def decoder_layers(self) -> int:
        """Of the decoder, whether they are given or not."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def num_params(self) -> int:
        """The number of trained values (a tied classifier is the token embedding, counted once)."""
        embed = self.embed_dim
        attention = 4 * embed * self.num_heads * self.head_dim + embed
        mlp = (3 if self.gated else 2) * embed * self.mlp_dim + embed
        blocks = self.num_layers * (attention + mlp) + self.decoder_layers * (2 * attention + mlp)
        biases = 2 * self.num_buckets * self.num_heads
        return blocks + biases + 2 * embed + (1 if self.tied else 2) * self.vocab_size * embed


# Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019.
_large = T5Config(num_layers=24, num_heads=16, embed_dim=1024, mlp_dim=4096)
presets: dict[str, T5Config] = {
    "t5-mini": T5Config(num_layers=2, num_heads=4, head_dim=32, embed_dim=192, mlp_dim=512, vocab_size=256),
    "t5-small": T5Config(num_layers=6, num_heads=8, embed_dim=512, mlp_dim=2048),
    "t5-base": T5Config(),
    "t5-large": _large,
    "t5-3b": dataclasses.replace(_large, num_heads=32, head_dim=128, mlp_dim=16384),
    "t5-11b": dataclasses.replace(_large, num_heads=128, head_dim=128, mlp_dim=65536),
}


def t5(name: str, **overrides: Any) -> T5Config:
    """The sizes of a T5 by name, some of them changed.

    Args:
        name: one of `presets`.
        overrides: fields of `T5Config`.

    Raises:
        ValueError: an unknown name or field, with those that exist.

    >>> t5("t5-small").num_params
    60506624
    """
    return choose(presets, "T5", name, overrides)


def buckets(config: T5Config, both_ways: bool) -> np.ndarray:
    """int[max_distance + 1]: the kind of each distance, the last for all beyond. It has its own sign apart.

    Half of the kinds are for one distance each, from 0 up; the others for ranges that widen towards `max_distance`.
    On the host: where a range begins hangs on the last bit of a logarithm, which differs from device to device.
    """
    num = config.num_buckets // 2 if both_ways else config.num_buckets
    exact = num // 2
    size = np.arange(config.max_distance + 1)
    ratio = np.maximum(size, exact).astype(np.float32) / np.float32(exact)
    share = np.log(ratio) / np.float32(math.log(config.max_distance / exact))
    wide = np.minimum(exact + (share * np.float32(num - exact)).astype(np.int32), num - 1)
    return np.where(size < exact, size, wide).astype(np.int32)


class RelativeBias(nnx.Module):
    """What each head adds to the scores of queries and keys, by their distance. All layers of a stack share it."""

    def __init__(self, config: T5Config, both_ways: bool, *, rngs: nnx.Rngs):
        self.config, self.both_ways = config, both_ways
        self.table = nnx.Embed(config.num_buckets, config.num_heads, embedding_init=_normal(config), rngs=rngs)

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Positions int[queries] and int[keys] to a bias [1, heads, queries, keys]."""
        distance = keys[None, :] - queries[:, None]
        later = distance > 0
        distance = jnp.abs(distance) if self.both_ways else jnp.where(later, 0, -distance)
        kinds = jnp.asarray(buckets(self.config, self.both_ways))[jnp.minimum(distance, self.config.max_distance)]
        if self.both_ways:
            kinds = kinds + later * (self.config.num_buckets // 2)
        return jnp.transpose(self.table(kinds), (2, 0, 1))[None]


class Attention(nnx.Module):
    """Attention without biases or scaling: the initial queries are smaller instead."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.head_dim)
        normal, embed = nnx.initializers.normal, config.embed_dim
        self.query = linear(embed, heads, rngs, normal((embed * config.head_dim) ** -0.5))
        self.key = linear(embed, heads, rngs, normal(embed**-0.5))
        self.value = linear(embed, heads, rngs, normal(embed**-0.5))
        self.out = linear(heads, embed, rngs, normal((config.num_heads * config.head_dim) ** -0.5))

    def keys_values(self, x: jax.Array) -> KeyValues:
        return self.key(x), self.value(x)

    def __call__(
        self, x: jax.Array, keys_values: KeyValues, bias: jax.Array | None, mask: jax.Array | None, causal: bool = False
    ) -> jax.Array:
        mixed = jax.nn.dot_product_attention(
            self.query(x), *keys_values, bias=bias, mask=mask, scale=1.0, is_causal=causal
        )
        return self.out(mixed)


class MLP(nnx.Module):
    """Two linear layers with ReLU between them, or one gated by the GELU of another."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        inner, outer = _normal(config), nnx.initializers.normal(config.mlp_dim**-0.5)
        if config.gated:
            self.gate = linear(config.embed_dim, config.mlp_dim, rngs, inner)
            self.linear = linear(config.embed_dim, config.mlp_dim, rngs, inner)
        else:
            self.up = linear(config.embed_dim, config.mlp_dim, rngs, inner)
        self.down = linear(config.mlp_dim, config.embed_dim, rngs, outer)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if hasattr(self, "gate"):
            return self.down(self.dropout(jax.nn.gelu(self.gate(x), approximate=True) * self.linear(x)))
        return self.down(self.dropout(jax.nn.relu(self.up(x))))


class EncoderBlock(nnx.Module):
    """Attention in both directions, and an MLP."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm, self.attention = rms_norm(config, rngs), Attention(config, rngs=rngs)
        self.mlp_norm, self.mlp = rms_norm(config, rngs), MLP(config, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, mask: jax.Array | None) -> jax.Array:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, self.attention.keys_values(y), bias, mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class DecoderBlock(nnx.Module):
    """Attention to what came before, attention to the encoder's text, and an MLP."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm, self.attention = rms_norm(config, rngs), Attention(config, rngs=rngs)
        self.cross_norm, self.cross = rms_norm(config, rngs), Attention(config, rngs=rngs)
        self.mlp_norm, self.mlp = rms_norm(config, rngs), MLP(config, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        source: KeyValues,
        bias: jax.Array,
        source_mask: jax.Array | None,
        past: Past | None = None,
    ) -> jax.Array:
        y = self.attention_norm(x)
        keys, values = self.attention.keys_values(y)
        if past is None:
            mixed = self.attention(y, (keys, values), bias, None, causal=True)
        else:
            mask = past.add(keys, values)
            mixed = self.attention(y, (past.keys, past.values), bias, mask)
        x = x + self.dropout(mixed)
        x = x + self.dropout(self.cross(self.cross_norm(x), source, None, source_mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class T5(nnx.Module):
    """An encoder of one text and a decoder that predicts the next token of another.

    Args:
        config: the sizes; see `t5` for the known ones.
        rngs: a `params` stream, and a `dropout` stream when `config.dropout` is not 0.

    >>> def logits(source, target):
    ...     model = T5(t5("t5-mini"), rngs=nnx.Rngs(0))
    ...     return model(source, target)
    >>> source, target = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2, 5), jnp.int32)
    >>> jax.eval_shape(logits, source, target).shape
    (2, 5, 256)
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        unit = nnx.initializers.normal(1.0)
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=unit, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)
        self.encoder_bias = RelativeBias(config, both_ways=True, rngs=rngs)
        self.encoder = nnx.List([EncoderBlock(config, rngs=rngs) for _ in range(config.num_layers)])
        self.encoder_norm = rms_norm(config, rngs)
        self.decoder_bias = RelativeBias(config, both_ways=False, rngs=rngs)
        self.decoder = nnx.List([DecoderBlock(config, rngs=rngs) for _ in range(config.decoder_layers)])
        self.decoder_norm = rms_norm(config, rngs)
        if not config.tied:
            self.head = linear(config.embed_dim, config.vocab_size, rngs, unit)

    def __call__(self, source: jax.Array, target: jax.Array, present: jax.Array | None = None) -> jax.Array:
        """Logits [batch, target length, vocab] of the token after each of `target`.

        Args:
            source: int[batch, source length], for the encoder.
            target: int[batch, target length], for the decoder; it begins with the padding token, 0.
            present: [batch, source length], 0 or False for padding; all are present when None.
        """
        return self.classify(self.hidden(source, target, present))

    def hidden(self, source: jax.Array, target: jax.Array, present: jax.Array | None = None) -> jax.Array:
        """What the classifier sees: [batch, target length, embed]."""
        return self.decode(target, self.remember_each(self.encode(source, present)), present)

    def encode(self, source: jax.Array, present: jax.Array | None = None) -> jax.Array:
        """The encoder alone: [batch, source length, embed]."""
        positions = jnp.arange(source.shape[1])
        bias = self.encoder_bias(positions, positions)
        x = self.dropout(self.token_embed(source))
        for block in self.encoder:
            x = block(x, bias, _mask(present))
        return self.dropout(self.encoder_norm(x))

    def remember(self, encoded: jax.Array) -> list[KeyValues]:
        """What each layer of the decoder needs of the encoder's text."""
        return list(self.remember_each(encoded))

    def remember_each(self, encoded: jax.Array) -> Iterator[KeyValues]:
        """The same, each made when its layer's turn has come, for one `decode`: it is then a part of that layer, which
        recomputes it, or walks with it, where it does so with the rest."""
        return (block.cross.keys_values(encoded) for block in self.decoder)

    def decode(
        self,
        target: jax.Array,
        source: Iterable[KeyValues],
        present: jax.Array | None = None,
        past: list[Past] | None = None,
    ) -> jax.Array:
        """The decoder alone, on what `remember` gave. `past` (see `make_past`) holds earlier tokens of `target`."""
        queries = positions_of(target.shape[1], past)
        keys = jnp.arange(past[0].keys.shape[1]) if past else queries
        bias = self.decoder_bias(queries, keys)
        x = self.dropout(self.token_embed(target))
        for i, (block, keys_values) in enumerate(zip(self.decoder, source, strict=True)):
            x = block(x, keys_values, bias, _mask(present), past[i] if past else None)
        return self.dropout(self.decoder_norm(x))

    def classify(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., vocab] of hidden states [..., embed]."""
        if not self.config.tied:
            return self.head(hidden)
        return tied_scores(self.token_embed, hidden * self.config.embed_dim**-0.5)

    def make_past(self, batch: int, room: int) -> list[Past]:
        """An empty memory of up to `room` tokens for each layer of the decoder."""
        heads, dtype = (self.config.num_heads, self.config.head_dim), self.token_embed.embedding.dtype
        return [Past.empty(batch, room, *heads, dtype) for _ in self.decoder]


def _mask(present: jax.Array | None) -> jax.Array | None:
    return None if present is None else present[:, None, None, :].astype(bool)


def _normal(config: T5Config) -> nnx.Initializer:
    return nnx.initializers.normal(config.embed_dim**-0.5)


def loss(model: T5, batch: Mapping[str, jax.Array], *, chunk: int | None = CHUNK) -> jax.Array:
    """Mean cross-entropy of the target's next token, in nats.

    Args:
        model: a T5.
        batch: `source` int[batch, source length]; `inputs` and `targets`, int[batch, target length]: `targets[:, t]`
            follows `inputs[:, t]`, or is -100 where nothing is to be predicted, and `inputs` begins with 0. Optional is
            `present`, 0 for padding of the source.
        chunk: how many positions of a row are classified at a time, all if None; see `cross_entropy`.

    >>> model = T5(t5("t5-mini", num_layers=1), rngs=nnx.Rngs(0))
    >>> text = np.arange(18).reshape(2, 9)
    >>> bool(5 < nnx.jit(loss)(model, {"source": text, "inputs": text[:, :-1], "targets": text[:, 1:]}) < 11)
    True
    """
    hidden = model.hidden(batch["source"], batch["inputs"], batch.get("present"))
    return cross_entropy(hidden, batch["targets"], model.classify, chunk=chunk)
