"""A convolutional net as a user would write it, in Linen: ResNet-50 with group norms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Bottleneck(nn.Module):
    """Three convolutions around a narrow middle, and a way past them.

    Attributes:
        width: channels of the middle.
        stride: of the convolution in the middle.
    """

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.GroupNorm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
        y = nn.relu(nn.GroupNorm()(nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(y)))
        y = nn.GroupNorm()(nn.Conv(4 * self.width, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.GroupNorm()(nn.Conv(4 * self.width, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [batch, height, width, 3] to classes.

    Attributes:
        blocks: of each resolution.
        width: channels in the middle of the first blocks; twice as many at each lower resolution.
        classes: of the classifier.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.GroupNorm()(nn.Conv(self.width, (7, 7), 2, use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, num in enumerate(self.blocks):
            for j in range(num):
                x = Bottleneck(self.width * 2**i, 2 if i and not j else 1)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def loss(model: ResNet, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["images"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
