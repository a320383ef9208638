"""The models of `tensor_parallel.py`, and what the layouts of tensor parallelism must move for one of their layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cjax import Plan
from cjax.models.gpt import GPT, Attention, Block, GPTConfig
from cjax.models.gpt import loss as gpt_loss
from cjax.models.past import Past

PATCH = 14 * 14 * 3  # values of one patch of an image
CLASSES = 1000


class Stack(nnx.Module):
    """The layers of a GPT between no embedding and no classifier: every large transfer is a layer's own."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.embed_dim,)))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., None] * self.scale[...]
        for block in self.blocks:
            x = block(x)
        return x


class Bidirectional(Attention):
    """GPT's attention, each position seeing all."""

    def __call__(self, x: jax.Array, past: Past | None = None) -> jax.Array:
        assert past is None, "nothing is generated here"
        return self.out(jax.nn.dot_product_attention(self.query(x), self.key(x), self.value(x)))


class EncoderBlock(Block):
    """GPT's layer with bidirectional attention."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.attention = Bidirectional(config.embed_dim, config.num_heads, rngs=rngs)


class ViT(nnx.Module):
    """A vision transformer over patches [batch, patches, values], its classifier on the mean of all positions."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Linear(PATCH, config.embed_dim, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.context, config.embed_dim)))
        self.blocks = nnx.List([EncoderBlock(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.embed_dim, rngs=rngs)
        self.head = nnx.Linear(config.embed_dim, CLASSES, rngs=rngs)

    def __call__(self, patches: jax.Array) -> jax.Array:
        x = self.embed(patches) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class BERT(GPT):
    """A bidirectional encoder with tied classifier: BERT's layers in GPT's order."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.blocks = nnx.List([EncoderBlock(config, rngs=rngs) for _ in range(config.num_layers)])


def stack_loss(model: Stack, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"])))


def vit_loss(model: ViT, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["patches"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def _scalars(batch: int, length: int) -> dict[str, Any]:
    return {"x": jax.ShapeDtypeStruct((batch, length), jnp.float32)}


def _patches(batch: int, length: int) -> dict[str, Any]:
    patches = jax.ShapeDtypeStruct((batch, length, PATCH), jnp.bfloat16)
    return {"patches": patches, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}


def _tokens(batch: int, length: int) -> dict[str, Any]:
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}


# name: (model, its loss, the shapes of a batch)
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[int, int], dict[str, Any]]]] = {
    "blocks": (Stack, stack_loss, _scalars),
    "vit": (ViT, vit_loss, _patches),
    "gpt": (GPT, gpt_loss, _tokens),
    "bert": (BERT, gpt_loss, _tokens),
}


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Args:
      name: as tables call it.
      kind: one of `KINDS`.
      width, heads, layers, vocab: sizes of the model.
      length: positions of one example: tokens, or patches of an image.
      batch: examples.
    """

    name: str
    kind: str
    width: int
    heads: int
    layers: int
    length: int
    batch: int
    vocab: int = 64

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def build(self, rngs: nnx.Rngs) -> Any:
        config = GPTConfig(
            num_layers=self.layers,
            num_heads=self.heads,
            embed_dim=self.width,
            context=self.length,
            vocab_size=self.vocab,
        )
        return KINDS[self.kind][0](config, rngs=rngs)

    @property
    def loss(self) -> Callable[..., Any]:
        return KINDS[self.kind][1]

    @property
    def batch_shape(self) -> dict[str, Any]:
        return KINDS[self.kind][2](self.batch, self.length)


def linears(width: int) -> list[tuple[int, int]]:
    """(K, N) of the matmuls by weights of one layer; queries, keys and values share their input, so they are one."""
    return [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]


def elements_received(plan: str, tokens: int, width: int) -> float:
    """Elements that each device must receive for one layer, forward and backward.

    Args:
      plan: text with a `tensor` part.
      tokens: of the whole batch: M.
      width: of the residual stream.

    >>> elements_received("tensor=4", 8, 16) == 8 * (3 / 4) * 8 * 16
    True
    """
    tensor = Plan.parse(plan).tensor
    p, d = tensor.size, tensor.depth
    if tensor.mode == "1d":
        return 8 * (p - 1) / p * tokens * width  # two pairs of matmuls, and an all-reduce each way for each
    shapes = linears(width)
    x, w, y = (sum(sizes) for sizes in zip(*((tokens * k, k * n, tokens * n) for k, n in shapes), strict=True))
    if tensor.mode == "3d":
        side = round(p ** (1 / 3))
        return (side - 1) / side**3 * (3 * x + 3 * w + 2 * y)
    q = round((p / d) ** 0.5)
    return 3 * (q - 1) / q**2 * (x / d + w) + 2 * (d - 1) / d * w / q**2
