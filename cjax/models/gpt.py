"""GPT-2's architecture, its sizes by name, and its loss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from cjax.models.cross_entropy import CHUNK, cross_entropy
from cjax.models.layers import MLP, NORMAL, Heads, dropout, tied_scores
from cjax.models.past import Past, attend_causally, positions_of
from cjax.models.sizes import check_counts, check_divides, check_length, check_rate, choose


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Attributes:
        num_layers: transformer blocks.
        num_heads: attention heads; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_dim: width inside the MLP; 4 x `embed_dim` when None.
        context: the longest sequence, in tokens (learned positions).
        vocab_size: token ids run from 0 to `vocab_size - 1`.
        dropout: rate on the embeddings and on what each branch adds to the residual stream.
        tied: the classifier is the token embedding, transposed; otherwise a matrix of its own.

    Raises:
        ValueError: sizes that can't be built, with the nearest that can.

    >>> GPTConfig(num_layers=2, num_heads=2, embed_dim=8, context=16, vocab_size=100).num_params
    2688

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int | None = None
    context: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "num_layers", "num_heads", "embed_dim", "context", "vocab_size")
        check_divides(self, "embed_dim", "num_heads", "heads")
        check_rate(self, "dropout")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed_dim // self.num_heads

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, whether it is given or not."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def num_params(self) -> int:
        """The number of trained values (a tied classifier is the token embedding, counted once)."""
        embed, mlp = self.embed_dim, self.mlp_width
        attention = 4 * embed * embed + 4 * embed
        block = attention + 2 * embed * mlp + mlp + embed + 4 * embed
        tables = (self.vocab_size * (1 if self.tied else 2) + self.context) * embed
        return self.num_layers * block + tables + 2 * embed


# GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
# GPT-3: Brown et al., "Language Models are Few-Shot Learners", 2020, without its alternating sparse attention. Heads of
# 128 in the 1.3B (its table has 24, which do not divide its width) and 5120 wide for the 13B's 5140.
presets: dict[str, GPTConfig] = {
    "gpt-mini": GPTConfig(num_layers=4, num_heads=4, embed_dim=192, context=256, vocab_size=256),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(num_layers=24, num_heads=16, embed_dim=1024),
    "gpt2-large": GPTConfig(num_layers=36, num_heads=20, embed_dim=1280),
    "gpt2-xl": GPTConfig(num_layers=48, num_heads=25, embed_dim=1600),
    "gpt3-125m": GPTConfig(context=2048),
    "gpt3-350m": GPTConfig(num_layers=24, num_heads=16, embed_dim=1024, context=2048),
    "gpt3-760m": GPTConfig(num_layers=24, num_heads=16, embed_dim=1536, context=2048),
    "gpt3-1.3b": GPTConfig(num_layers=24, num_heads=16, embed_dim=2048, context=2048),
    "gpt3-2.7b": GPTConfig(num_layers=32, num_heads=32, embed_dim=2560, context=2048),
    "gpt3-6.7b": GPTConfig(num_layers=32, num_heads=32, embed_dim=4096, context=2048),
    "gpt3-13b": GPTConfig(num_layers=40, num_heads=40, embed_dim=5120, context=2048),
    "gpt3-175b": GPTConfig(num_layers=96, num_heads=96, embed_dim=12288, context=2048),
}


def gpt(name: str, **overrides: Any) -> GPTConfig:
    """The sizes of a GPT by name, some of them changed.

    Args:
        name: one of `presets`.
        overrides: fields of `GPTConfig`.

    Raises:
        ValueError: an unknown name or field, with those that exist.

    >>> gpt("gpt2-xl", dropout=0.1).num_layers
    48
    """
    return choose(presets, "GPT", name, overrides)


class Attention(Heads):
    """Causal self-attention."""

    def __call__(self, x: jax.Array, past: Past | None = None) -> jax.Array:
        return self.out(attend_causally(*self.project(x), past))


class Block(nnx.Module):
    """One layer: attention and MLP, each on the normalised stream and added back to it."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        # 2 x num_layers branches are added to one stream: this keeps its variance independent of the depth.
        branch = nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)
        self.attention_norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(config.embed_dim, config.num_heads, out_init=branch, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(config.embed_dim, config.mlp_width, approximate=True, out_init=branch, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array, past: Past | None = None) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), past))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nnx.Module):
    """A decoder that predicts the next token.

    Args:
        config: the sizes; see `gpt` for the known ones.
        rngs: a `params` stream, and a `dropout` stream when `config.dropout` is not 0.

    >>> def logits(tokens):
    ...     model = GPT(gpt("gpt-mini"), rngs=nnx.Rngs(0))
    ...     return model(tokens)
    >>> jax.eval_shape(logits, jax.ShapeDtypeStruct((2, 16), jax.numpy.int32)).shape
    (2, 16, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=NORMAL, rngs=rngs)
        self.position_embed = nnx.Embed(config.context, config.embed_dim, embedding_init=NORMAL, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        if not config.tied:
            size = (config.embed_dim, config.vocab_size)
            self.head = nnx.Linear(*size, use_bias=False, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int[batch, sequence] to logits [batch, sequence, vocab] of the token after each."""
        return self.classify(self.hidden(tokens))

    def hidden(self, tokens: jax.Array, past: list[Past] | None = None) -> jax.Array:
        """What the classifier sees: [batch, sequence, embed]. `past` (see `make_past`) holds earlier tokens."""
        length = tokens.shape[1]
        check_length(length, self.config.context)
        x = self.dropout(self.token_embed(tokens) + self.position_embed(positions_of(length, past)))
        for i, block in enumerate(self.blocks):
            x = block(x, past[i] if past else None)
        return self.norm(x)

    def classify(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., vocab] of hidden states [..., embed]."""
        return tied_scores(self.token_embed, hidden) if self.config.tied else self.head(hidden)

    def make_past(self, batch: int, room: int) -> list[Past]:
        """An empty memory of up to `room` tokens for each layer."""
        heads, dtype = (self.config.num_heads, self.config.head_dim), self.token_embed.embedding.dtype
        return [Past.empty(batch, room, *heads, dtype) for _ in self.blocks]


def loss(model: Any, batch: Mapping[str, jax.Array], *, chunk: int | None = CHUNK) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
        model: a GPT, or anything that maps int[batch, sequence] to logits [batch, sequence, vocab].
        batch: `inputs` and `targets`, int[batch, sequence]; `targets[:, t]` is the token that follows `inputs[:, t]`,
            or -100 where nothing is to be predicted. They are two arrays, because a shift inside the loss would make
            neighbours in a split sequence communicate.
        chunk: how many positions of a row are classified at a time, all if None; see `cross_entropy`.

    >>> tokens = jax.numpy.arange(34).reshape(2, 17)
    >>> model = GPT(gpt("gpt-mini", num_layers=1), rngs=nnx.Rngs(0))
    >>> bool(5 < nnx.jit(loss)(model, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}) < 6)
    True
    """
    if isinstance(model, GPT):
        return cross_entropy(model.hidden(batch["inputs"]), batch["targets"], model.classify, chunk=chunk)
    logits = model(batch["inputs"])
    return cross_entropy(logits, batch["targets"], lambda logits: logits)
