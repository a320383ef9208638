"""The two models of `large_batch.py`: a vision transformer and an encoder that fills in masked bytes. Plain Flax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import cjax

HEADS = 2


class Block(nn.Module):
    """Pre-norm transformer layer. ReLU and an MLP of twice the width, as both are cheap on a CPU."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(width)(nn.relu(nn.Dense(2 * width)(nn.LayerNorm()(x))))


class ViT(nn.Module):
    """Images [rows, height, width] to logits of classes; a token is a patch."""

    patch: tuple[int, int]
    width: int = 32
    num_layers: int = 2
    num_classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        rows, height, width = images.shape
        p, q = self.patch
        x = images.reshape(rows, height // p, p, width // q, q).swapaxes(2, 3).reshape(rows, -1, p * q)
        x = nn.Dense(self.width, name="patches")(x)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.num_layers):
            x = Block()(x)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x).mean(1))


class Encoder(nn.Module):
    """Tokens [rows, length] to logits of the byte at each position; looks both ways."""

    vocab_size: int
    width: int = 32
    num_layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.num_layers):
            x = Block()(x)
        return nn.Dense(self.vocab_size)(nn.LayerNorm()(x))


def image_loss(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy, and the share of images that are classified rightly."""
    logits = model(batch["images"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}


def masked_loss(model: Any, batch: dict[str, jax.Array]) -> tuple[cjax.Mean, dict[str, cjax.Mean]]:
    """Cross-entropy and accuracy of the bytes that were hidden; a Mean, since micro-batches hide unequal numbers."""
    logits, hidden = model(batch["inputs"]), batch["hidden"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    right = (logits.argmax(-1) == batch["targets"]) * hidden
    num_hidden = jnp.sum(hidden)
    return cjax.Mean((losses * hidden).sum(), num_hidden), {"accuracy": cjax.Mean(right.sum(), num_hidden)}
