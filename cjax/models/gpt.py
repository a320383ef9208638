"""GPT-2's architecture, its sizes by name, its loss, and sampling from it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


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

    Raises:
        ValueError: sizes that can't be built, with the nearest that can.
    """

    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int | None = None
    context: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "embed_dim", "context", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig: {name} is {getattr(self, name)}; it must be at least 1")
        if self.embed_dim % self.num_heads:
            nearest = max(1, round(self.embed_dim / self.num_heads)) * self.num_heads
            raise ValueError(
                f"GPTConfig: embed_dim {self.embed_dim} does not divide into {self.num_heads} heads; "
                f"write embed_dim={nearest}, or another num_heads"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig: dropout is {self.dropout}; it is a rate, at least 0 and below 1")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def num_params(self) -> int:
        """The number of trained values (the classifier is the token embedding, counted once)."""
        embed, mlp = self.embed_dim, self.mlp_dim or 4 * self.embed_dim
        attention = 4 * embed * embed + 4 * embed
        block = attention + 2 * embed * mlp + mlp + embed + 4 * embed
        return self.num_layers * block + (self.vocab_size + self.context) * embed + 2 * embed


# GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
# 175B: Brown et al., "Language Models are Few-Shot Learners", 2020, without its alternating sparse attention.
presets: dict[str, GPTConfig] = {
    "gpt-mini": GPTConfig(num_layers=4, num_heads=4, embed_dim=192, context=256, vocab_size=256),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(num_layers=24, num_heads=16, embed_dim=1024),
    "gpt2-large": GPTConfig(num_layers=36, num_heads=20, embed_dim=1280),
    "gpt2-xl": GPTConfig(num_layers=48, num_heads=25, embed_dim=1600),
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
    if name not in presets:
        raise ValueError(f"no GPT is called {name!r}; the names are {', '.join(presets)}")
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    if unknown := [field for field in overrides if field not in fields]:
        raise ValueError(f"GPTConfig has no {', '.join(unknown)}; its fields are {', '.join(fields)}")
    return dataclasses.replace(presets[name], **overrides)


class Attention(nnx.Module):
    """Causal self-attention. The projections keep heads as a dimension of their own: [embed, heads, head_dim]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.head_dim)
        normal = nnx.initializers.normal(0.02)
        self.query = nnx.LinearGeneral(config.embed_dim, heads, kernel_init=normal, rngs=rngs)
        self.key = nnx.LinearGeneral(config.embed_dim, heads, kernel_init=normal, rngs=rngs)
        self.value = nnx.LinearGeneral(config.embed_dim, heads, kernel_init=normal, rngs=rngs)
        self.out = nnx.LinearGeneral(
            heads, config.embed_dim, axis=(-2, -1), kernel_init=_residual_init(config), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = jax.nn.dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.out(mixed)


class MLP(nnx.Module):
    """Two linear layers with GPT-2's tanh form of GELU between them."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        mlp_dim = config.mlp_dim or 4 * config.embed_dim
        normal = nnx.initializers.normal(0.02)
        self.up = nnx.Linear(config.embed_dim, mlp_dim, kernel_init=normal, rngs=rngs)
        self.down = nnx.Linear(mlp_dim, config.embed_dim, kernel_init=_residual_init(config), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """One layer: attention and MLP, each on the normalised stream and added back to it."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = _dropout(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nnx.Module):
    """A decoder that predicts the next token. The classifier is the token embedding, transposed.

    Args:
        config: the sizes; see `gpt` for the known ones.
        rngs: a `params` stream, and a `dropout` stream when `config.dropout` is not 0.

    >>> model = GPT(gpt("gpt-mini"), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros([2, 16], jnp.int32)).shape
    (2, 16, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(0.02)
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=normal, rngs=rngs)
        self.position_embed = nnx.Embed(config.context, config.embed_dim, embedding_init=normal, rngs=rngs)
        self.dropout = _dropout(config, rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int[batch, sequence] to logits [batch, sequence, vocab] of the token after each."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"a sequence of {length} tokens is longer than this model's context of {self.config.context}; "
                f"cut it, or build the model with context={length}"
            )
        x = self.dropout(self.token_embed(tokens) + self.position_embed(jnp.arange(length)))
        for block in self.blocks:
            x = block(x)
        return self.token_embed.attend(self.norm(x))


def _dropout(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    # Without a stream the model has no random state to carry, and its loss is a plain function.
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def _residual_init(config: GPTConfig) -> nnx.Initializer:
    # 2 x num_layers branches are added to one stream: this keeps its variance independent of the depth.
    return nnx.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5)


def loss(model: GPT, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of the next token, in nats.

    Args:
        model: a GPT, or anything that maps int[batch, sequence] to logits [batch, sequence, vocab].
        batch: `inputs` and `targets`, int[batch, sequence]; `targets[:, t]` is the token that follows `inputs[:, t]`.
            They are two arrays, because a shift inside the loss would make neighbours in a split sequence communicate.
    """
    logits = model(batch["inputs"]).astype(jnp.float32)
    # Not optax's form: its one-hot or gather over log-probabilities keeps a second [batch, sequence, vocab] array.
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def generate(
    model: GPT,
    tokens: jax.Array,
    num_tokens: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> jax.Array:
    """Continues each row of `tokens` by sampling; compiles once per shape.

    There is no key-value cache: each new token runs the model over the whole window, which is as long as the text
    and at most the model's context. Good for samples, not for serving.

    Args:
        model: a trained GPT; sampled in eval mode, and left as it was.
        tokens: int[batch, length], length at least 1.
        num_tokens: how many to add to each row.
        key: randomness for the samples.
        temperature: below 1 is bolder; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only.

    Returns:
        int32[batch, length + num_tokens], the given tokens first.

    >>> model = GPT(gpt("gpt-mini"), rngs=nnx.Rngs(0))
    >>> generate(model, jnp.zeros([2, 3], jnp.int32), 5, jax.random.key(0)).shape
    (2, 8)
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"generate needs tokens of shape [batch, length >= 1], not {list(tokens.shape)}")
    if temperature < 0 or (top_k is not None and not 1 <= top_k <= model.config.vocab_size):
        raise ValueError(
            f"generate got temperature={temperature}, top_k={top_k}; "
            f"it needs temperature >= 0 and 1 <= top_k <= {model.config.vocab_size}"
        )
    graph, state = nnx.split(model)
    return _generate(graph, state, jnp.asarray(tokens, jnp.int32), key, num_tokens, float(temperature), top_k)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _generate(
    graph: nnx.GraphDef[GPT],
    state: nnx.State,
    tokens: jax.Array,
    key: jax.Array,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
) -> jax.Array:
    model = nnx.merge(graph, state)
    model.eval()
    length = tokens.shape[1]
    window = min(length + num_tokens, model.config.context)
    text = jnp.pad(tokens, ((0, 0), (0, num_tokens)))

    def add_token(position: jax.Array, text: jax.Array) -> jax.Array:
        # What lies at or after `position` is not written yet; causality keeps it from the logits that are read.
        start = jnp.maximum(position - window, 0)
        logits = model(jax.lax.dynamic_slice_in_dim(text, start, window, axis=1))
        logits = jax.lax.dynamic_index_in_dim(logits, position - 1 - start, axis=1, keepdims=False)
        token = _sample(logits.astype(jnp.float32), jax.random.fold_in(key, position), temperature, top_k)
        return jax.lax.dynamic_update_index_in_dim(text, token, position, axis=1)

    return jax.lax.fori_loop(length, length + num_tokens, add_token, text)


def _sample(logits: jax.Array, key: jax.Array, temperature: float, top_k: int | None) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None:
        smallest_kept = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest_kept, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)
