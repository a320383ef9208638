"""BERT: an encoder of text with a head for masked words or for classes. Sizes by name, and the losses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cjax.models.cross_entropy import CHUNK, classification, cross_entropy
from cjax.models.layers import MLP, NORMAL, Heads, dropout, layer_norm
from cjax.models.sizes import check_choice, check_counts, check_divides, check_length, check_rate, choose


@dataclasses.dataclass(frozen=True)
class BERTConfig:
    """The sizes of a BERT, and what is on top of it.

    Attributes:
        num_layers: transformer blocks.
        num_heads: attention heads; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_dim: width inside the MLP; 4 x `embed_dim` when None.
        context: the longest sequence, in tokens (learned positions).
        vocab_size: token ids run from 0 to `vocab_size - 1`.
        num_types: kinds of segments, such as question and answer.
        norm_epsilon: what LayerNorm adds to the variance.
        dropout: rate on the embeddings, on what each branch adds to the residual stream, and before classes.
        head: what the model returns: "none", hidden states [batch, sequence, embed]; "masked", logits of the word at
            each position; "classes", logits [batch, num_classes] of each text.
        pooling: how a text becomes one vector: "first", the first token through a dense layer and tanh; "mean", the
            mean of all tokens, as sentence embeddings are made; "none".
        num_classes: for the head "classes".
        tied: the classifier of words is the token embedding, transposed; otherwise a matrix of its own.

    Raises:
        ValueError: sizes that can't be built, with the nearest that can.

    >>> BERTConfig(num_layers=2, num_heads=2, embed_dim=8, context=16, vocab_size=100).mlp_width
    32

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2018.
    """

    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int | None = None
    context: int = 512
    vocab_size: int = 30522
    num_types: int = 2
    norm_epsilon: float = 1e-12
    dropout: float = 0.0
    head: str = "masked"
    pooling: str = "none"
    num_classes: int = 2
    tied: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "num_layers", "num_heads", "embed_dim", "context", "vocab_size", "num_types", "num_classes")
        check_divides(self, "embed_dim", "num_heads", "heads")
        check_rate(self, "dropout")
        check_choice(self, "head", ("none", "masked", "classes"))
        check_choice(self, "pooling", ("none", "first", "mean"))
        if self.head == "classes" and self.pooling == "none":
            raise ValueError(
                "BERTConfig: the head 'classes' needs one vector for each text; write pooling='first' or 'mean'"
            )

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, whether it is given or not."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def num_params(self) -> int:
        """The number of trained values (a tied classifier of words is the token embedding, counted once)."""
        embed, mlp, vocab = self.embed_dim, self.mlp_width, self.vocab_size
        dense = embed * embed + embed
        block = 4 * dense + 2 * embed * mlp + mlp + embed + 4 * embed
        total = self.num_layers * block + (vocab + self.context + self.num_types + 2) * embed
        masked = dense + 2 * embed + vocab + (0 if self.tied else vocab * embed)
        heads = {"none": 0, "masked": masked, "classes": (embed + 1) * self.num_classes}
        return total + heads[self.head] + (dense if self.pooling == "first" else 0)


# Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2018.
# MiniLM: Wang et al., "MiniLM: Deep Self-Attention Distillation", 2020; 6 layers are the size of all-MiniLM-L6-v2.
presets: dict[str, BERTConfig] = {
    "bert-mini": BERTConfig(num_layers=4, num_heads=4, embed_dim=192, context=128, vocab_size=256),
    "bert-base": BERTConfig(),
    "bert-large": BERTConfig(num_layers=24, num_heads=16, embed_dim=1024),
    "minilm-l6": BERTConfig(num_layers=6, embed_dim=384, head="none", pooling="mean"),
}


def bert(name: str, **overrides: Any) -> BERTConfig:
    """The sizes of a BERT by name, some of them changed.

    Args:
        name: one of `presets`.
        overrides: fields of `BERTConfig`.

    Raises:
        ValueError: an unknown name or field, with those that exist.

    >>> bert("bert-large", head="classes", pooling="first", num_classes=3).num_layers
    24
    """
    return choose(presets, "BERT", name, overrides)


class Attention(Heads):
    """Self-attention in both directions."""

    def __call__(self, x: jax.Array, present: jax.Array | None) -> jax.Array:
        mask = None if present is None else present[:, None, None, :].astype(bool)
        return self.out(jax.nn.dot_product_attention(*self.project(x), mask=mask))


class Block(nnx.Module):
    """One layer: attention and MLP, each added to the stream, which is normalised after it."""

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config.embed_dim, config.num_heads, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.mlp = MLP(config.embed_dim, config.mlp_width, rngs=rngs)
        self.mlp_norm = layer_norm(config, rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array, present: jax.Array | None) -> jax.Array:
        x = self.attention_norm(x + self.dropout(self.attention(x, present)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class MaskedHead(nnx.Module):
    """Which word stands at each position."""

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs):
        self.dense = nnx.Linear(config.embed_dim, config.embed_dim, kernel_init=NORMAL, rngs=rngs)
        self.norm = layer_norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros([config.vocab_size]))
        if not config.tied:
            self.words = nnx.Linear(config.embed_dim, config.vocab_size, use_bias=False, kernel_init=NORMAL, rngs=rngs)

    def transform(self, x: jax.Array) -> jax.Array:
        return self.norm(jax.nn.gelu(self.dense(x), approximate=False))

    def classify(self, x: jax.Array, token_embed: nnx.Embed) -> jax.Array:
        logits = self.words(x) if hasattr(self, "words") else token_embed.attend(x)
        return logits + self.bias[...].astype(logits.dtype)


class BERT(nnx.Module):
    """An encoder of text, and one of the heads of `BERTConfig`.

    Args:
        config: the sizes; see `bert` for the known ones.
        rngs: a `params` stream, and a `dropout` stream when `config.dropout` is not 0.

    >>> def logits(tokens):
    ...     model = BERT(bert("bert-mini"), rngs=nnx.Rngs(0))
    ...     return model(tokens)
    >>> jax.eval_shape(logits, jax.ShapeDtypeStruct((2, 16), jnp.int32)).shape
    (2, 16, 256)
    """

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=NORMAL, rngs=rngs)
        self.position_embed = nnx.Embed(config.context, config.embed_dim, embedding_init=NORMAL, rngs=rngs)
        self.type_embed = nnx.Embed(config.num_types, config.embed_dim, embedding_init=NORMAL, rngs=rngs)
        self.embed_norm = layer_norm(config, rngs)
        self.dropout = dropout(config.dropout, rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        if config.pooling == "first":
            self.pooler = nnx.Linear(config.embed_dim, config.embed_dim, kernel_init=NORMAL, rngs=rngs)
        if config.head == "masked":
            self.word_head = MaskedHead(config, rngs=rngs)
        elif config.head == "classes":
            self.class_head = nnx.Linear(config.embed_dim, config.num_classes, kernel_init=NORMAL, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, present: jax.Array | None = None, types: jax.Array | None = None
    ) -> jax.Array:
        """What `config.head` says, of tokens int[batch, sequence].

        Args:
            tokens: int[batch, sequence].
            present: [batch, sequence], 0 or False for padding; all are present when None.
            types: int[batch, sequence], the segment of each token; all 0 when None.
        """
        if self.config.head == "none":
            return self.hidden(tokens, present, types)
        if self.config.head == "masked":
            return self.classify(self.word_head.transform(self.hidden(tokens, present, types)))
        return self.class_head(self.dropout(self.pool(tokens, present, types)))

    def hidden(self, tokens: jax.Array, present: jax.Array | None = None, types: jax.Array | None = None) -> jax.Array:
        """The encoder alone: [batch, sequence, embed]."""
        length = tokens.shape[1]
        check_length(length, self.config.context)
        types = jnp.zeros_like(tokens) if types is None else types
        x = self.token_embed(tokens) + self.position_embed(jnp.arange(length)) + self.type_embed(types)
        x = self.dropout(self.embed_norm(x))
        for block in self.blocks:
            x = block(x, present)
        return x

    def pool(self, tokens: jax.Array, present: jax.Array | None = None, types: jax.Array | None = None) -> jax.Array:
        """One vector for each text, [batch, embed], as `config.pooling` says; of length 1 it is an embedding.

        Raises:
            ValueError: a BERT whose `config.pooling` is "none".
        """
        x = self.hidden(tokens, present, types)
        if self.config.pooling == "first":
            return jnp.tanh(self.pooler(x[:, 0]))
        if self.config.pooling == "none":
            raise ValueError("this BERT has no pooling; build or load it with pooling='mean' or 'first'")
        counts = jnp.ones_like(tokens) if present is None else present
        counts = counts.astype(x.dtype)[..., None]
        return (x * counts).sum(1) / jnp.maximum(counts.sum(1), 1)

    def classify(self, transformed: jax.Array) -> jax.Array:
        """Logits [..., vocab] of what the head "masked" has transformed."""
        return self.word_head.classify(transformed, self.token_embed)


def masked_loss(model: BERT, batch: Mapping[str, jax.Array], *, chunk: int | None = CHUNK) -> jax.Array:
    """Mean cross-entropy of the words that were masked, in nats.

    Args:
        model: a BERT with the head "masked".
        batch: `inputs` and `targets`, int[batch, sequence]; targets are -100 wherever nothing was masked. Optional are
            `present` and `types`, as the model takes them.
        chunk: how many positions of a row are classified at a time, all if None; see `cross_entropy`.

    Raises:
        ValueError: a BERT with another head, or targets of another shape.

    >>> model = BERT(bert("bert-mini", num_layers=1), rngs=nnx.Rngs(0))
    >>> batch = {"inputs": jnp.zeros([2, 9], jnp.int32), "targets": jnp.full([2, 9], -100).at[1, 3].set(7)}
    >>> bool(5 < nnx.jit(masked_loss)(model, batch) < 6)
    True
    """
    if model.config.head != "masked":
        raise ValueError(f"masked_loss needs a BERT with head='masked'; this one has head={model.config.head!r}")
    x = model.hidden(batch["inputs"], batch.get("present"), batch.get("types"))
    return cross_entropy(model.word_head.transform(x), batch["targets"], model.classify, chunk=chunk)


def classes_loss(model: BERT, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the classes of texts, in nats, and the accuracy.

    Args:
        model: a BERT with the head "classes".
        batch: `inputs` int[batch, sequence] and `labels` int[batch]. Optional are `present` and `types`.

    Raises:
        ValueError: a BERT with another head, or labels of another shape.

    >>> model = BERT(bert("bert-mini", num_layers=1, head="classes", pooling="mean"), rngs=nnx.Rngs(0))
    >>> value, aux = nnx.jit(classes_loss)(model, {"inputs": jnp.zeros([2, 9], jnp.int32), "labels": jnp.arange(2)})
    >>> bool(0.6 < value < 0.8), float(aux["accuracy"])
    (True, 0.5)
    """
    if model.config.head != "classes":
        raise ValueError(f"classes_loss needs a BERT with head='classes'; this one has head={model.config.head!r}")
    logits = model(batch["inputs"], batch.get("present"), batch.get("types"))
    return classification(logits, batch["labels"])
