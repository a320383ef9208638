"""Three models of three kinds, small enough for 8 virtual devices on 2 cores, and plans to try each under."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cjax.models import GPT, loss
from cjax.models.gpt import GPTConfig


@dataclasses.dataclass(frozen=True)
class Setting:
    """What `cjax.parallelize` takes, and twelve plans."""

    name: str
    model: Any
    loss: Callable[..., Any]
    batch: dict[str, np.ndarray]
    plans: tuple[str, ...]


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al., 2021), as its user would write it."""

    layers: int
    features: int
    hidden: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (8, 8), (8, 8))(images)
        x = x.reshape(x.shape[0], -1, self.features)
        for _ in range(self.layers):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(2 * x.shape[1])(y)))
            x = x + y.swapaxes(1, 2)
            y = nn.Dense(self.hidden)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.features)(nn.gelu(y))
        return nn.Dense(10)(x.mean(1))


class ConvNet(nn.Module):
    """Convolutions with residuals."""

    layers: int
    features: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (4, 4), (4, 4))(images)
        for _ in range(self.layers):
            y = nn.relu(nn.Conv(self.features, (3, 3))(nn.LayerNorm()(x)))
            x = x + nn.Conv(self.features, (3, 3))(y)
        return nn.Dense(10)(x.mean((1, 2)))


def classified(model: Callable[..., jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of images."""
    logits = jax.nn.log_softmax(model(batch["images"]))
    return -jnp.take_along_axis(logits, batch["labels"][:, None], 1).mean()


def settings() -> list[Setting]:
    rng = np.random.default_rng(0)
    config = GPTConfig(num_layers=4, num_heads=8, embed_dim=256, context=128, vocab_size=2048)
    tokens = rng.integers(0, 2048, (16, 128), dtype=np.int32)
    images = rng.standard_normal((32, 64, 64, 3), dtype=np.float32)
    pictures = {"images": images, "labels": rng.integers(0, 10, 32, dtype=np.int32)}
    return [
        Setting(
            "GPT", lambda rngs: GPT(config, rngs=rngs), loss, {"inputs": tokens, "targets": tokens},
            ("data=8", "data=8 zero=1", "data=8 zero=3", "data=8 microbatches=2", "data=8 remat=block",
             "data=4 tensor=2", "tensor=8", "data=2 tensor=2d:4", "tensor=3d:8", "tensor=8 sequence=gather",
             "data=2 sequence=ring:4", "data=2 pipeline=1f1b:4 microbatches=4"),
        ),
        Setting(
            "Mixer", Mixer(4, 256, 1024), classified, pictures,
            ("data=8", "data=8 zero=1", "data=8 zero=3", "data=8 microbatches=4", "data=8 remat=block",
             "data=4 tensor=2", "data=2 tensor=4", "tensor=8", "data=2 tensor=2d:4", "tensor=2.5d:8/2", "tensor=3d:8",
             "data=2 pipeline=gpipe:4 microbatches=4"),
        ),
        Setting(
            "ConvNet", ConvNet(4, 64), classified, pictures,
            ("data=8", "data=8 zero=1", "data=8 zero=2", "data=8 zero=3", "data=8 microbatches=2",
             "data=8 microbatches=4", "data=8 remat=dots", "data=8 remat=block", "data=4 tensor=2", "data=2 tensor=4",
             "data=4 tensor=2 zero=3", "data=2 pipeline=1f1b:4 microbatches=8"),
        ),
    ]  # fmt: skip
