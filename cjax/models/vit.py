"""The vision transformer: images as sequences of patches, and their classes. Sizes by name, and the loss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cjax.models.cross_entropy import classification
from cjax.models.layers import MLP, NORMAL, Heads, dropout, layer_norm
from cjax.models.sizes import check_counts, check_divides, check_rate, choose

# As in the paper's own code. A normal of 0.02, which others take, is right for a width of about 1,000 alone: narrow
# models stay at chance for hundreds of steps.
_XAVIER = nnx.initializers.xavier_uniform()


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The sizes of a vision transformer.

    Attributes:
        num_layers: transformer blocks.
        num_heads: attention heads; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_dim: width inside the MLP; 4 x `embed_dim` when None.
        image_size: height and width of an image, in pixels.
        patch_size: height and width of a patch; must divide `image_size`.
        num_channels: numbers in a pixel.
        num_classes: labels run from 0 to `num_classes - 1`.
        norm_epsilon: what LayerNorm adds to the variance.
        dropout: rate on the embeddings and on what each branch adds to the residual stream.

    Raises:
        ValueError: sizes that can't be built, with the nearest that can.

    >>> ViTConfig(num_layers=2, num_heads=2, embed_dim=8, image_size=32, patch_size=8).num_patches
    16

    Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", 2020.
    """

    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int | None = None
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_classes: int = 1000
    norm_epsilon: float = 1e-12
    dropout: float = 0.0

    def __post_init__(self) -> None:
        counts = ("num_layers", "num_heads", "embed_dim", "image_size", "patch_size", "num_channels", "num_classes")
        check_counts(self, *counts)
        check_divides(self, "embed_dim", "num_heads", "heads")
        check_divides(self, "image_size", "patch_size", "pixels")
        check_rate(self, "dropout")

    @property
    def num_patches(self) -> int:
        """Patches of an image, the positions of the model but one: the class has a position of its own."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, whether it is given or not."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def num_params(self) -> int:
        """The number of trained values."""
        embed, mlp = self.embed_dim, self.mlp_width
        block = 4 * embed * embed + 4 * embed + 2 * embed * mlp + mlp + embed + 4 * embed
        patches = self.num_channels * self.patch_size**2 * embed + embed + (self.num_patches + 2) * embed
        return self.num_layers * block + patches + 2 * embed + (embed + 1) * self.num_classes


# Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020.
# g/14: Zhai et al., "Scaling Vision Transformers", 2021, with a class token in the place of its attention pooling.
presets: dict[str, ViTConfig] = {
    "vit-mini": ViTConfig(num_layers=4, num_heads=4, embed_dim=192, image_size=32, patch_size=8, num_classes=10),
    "vit-b16": ViTConfig(),
    "vit-l16": ViTConfig(num_layers=24, num_heads=16, embed_dim=1024),
    "vit-h14": ViTConfig(num_layers=32, num_heads=16, embed_dim=1280, patch_size=14),
    "vit-g14": ViTConfig(num_layers=40, num_heads=16, embed_dim=1408, mlp_dim=6144, patch_size=14),
}


def vit(name: str, **overrides: Any) -> ViTConfig:
    """The sizes of a vision transformer by name, some of them changed.

    Args:
        name: one of `presets`.
        overrides: fields of `ViTConfig`.

    Raises:
        ValueError: an unknown name or field, with those that exist.

    >>> vit("vit-b16", image_size=384).num_patches
    576
    """
    return choose(presets, "ViT", name, overrides)


class Attention(Heads):
    """Self-attention among patches."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.dot_product_attention(*self.project(x)))


class Block(nnx.Module):
    """One layer: attention and MLP, each on the normalised stream and added back to it."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = layer_norm(config, rngs)
        self.attention = Attention(config.embed_dim, config.num_heads, init=_XAVIER, rngs=rngs)
        self.mlp_norm = layer_norm(config, rngs)
        self.mlp = MLP(config.embed_dim, config.mlp_width, init=_XAVIER, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ViT(nnx.Module):
    """A classifier of images, which reads the class off a token of its own before the patches.

    Args:
        config: the sizes; see `vit` for the known ones.
        rngs: a `params` stream, and a `dropout` stream when `config.dropout` is not 0.

    >>> def logits(images):
    ...     model = ViT(vit("vit-mini"), rngs=nnx.Rngs(0))
    ...     return model(images)
    >>> jax.eval_shape(logits, jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)).shape
    (2, 10)
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        patch = (config.patch_size, config.patch_size, config.num_channels)
        self.patch_embed = nnx.LinearGeneral(patch, config.embed_dim, axis=(-3, -2, -1), rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros([config.embed_dim]))
        self.position_embed = nnx.Param(NORMAL(rngs.params(), (1 + config.num_patches, config.embed_dim)))
        self.dropout = dropout(config.dropout, rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = layer_norm(config, rngs)
        self.head = nnx.Linear(config.embed_dim, config.num_classes, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images [batch, height, width, channels] to logits [batch, num_classes]."""
        return self.head(self.hidden(images)[:, 0])

    def hidden(self, images: jax.Array) -> jax.Array:
        """[batch, 1 + patches, embed]: the token of the class, then the patches row by row."""
        config = self.config
        _check_images(images.shape, config)
        x = self.patch_embed(patches_of(images, config.patch_size))
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, config.embed_dim))
        x = jnp.concatenate([token, x], axis=1)
        x = self.dropout(x + self.position_embed[...].astype(x.dtype))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def patches_of(images: jax.Array, size: int) -> jax.Array:
    """Images [batch, height, width, channels] as patches [batch, patches, size, size, channels], row by row."""
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(grid, 2, 3).reshape(batch, -1, size, size, channels)


def _check_images(shape: tuple[int, ...], config: ViTConfig) -> None:
    wanted = (config.image_size, config.image_size, config.num_channels)
    if len(shape) == 4 and shape[1:] == wanted:
        return
    if len(shape) == 3:
        instead = "give grey images a channel: images[..., None]"
    elif len(shape) == 4 and shape[1] == shape[2]:
        instead = f"resize them, or build the model with image_size={shape[1]}, num_channels={shape[3]}"
    else:
        instead = f"make them {wanted[0]} x {wanted[1]}; all sides are of one length"
    raise ValueError(f"this ViT takes images [batch, {', '.join(map(str, wanted))}], not {list(shape)}; {instead}")


def loss(model: ViT, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the classes of images, in nats, and the accuracy.

    Args:
        model: a ViT.
        batch: `images` [batch, height, width, channels] and `labels` int[batch].

    >>> model = ViT(vit("vit-mini", num_layers=1, num_classes=4), rngs=nnx.Rngs(0))
    >>> value, aux = nnx.jit(loss)(model, {"images": jnp.ones([4, 32, 32, 3]), "labels": jnp.arange(4)})
    >>> bool(1 < value < 2), float(aux["accuracy"])
    (True, 0.25)
    """
    return classification(model(batch["images"]), batch["labels"])
