"""Three models of three kinds, small enough for 8 virtual devices on 2 cores."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cjax.models import GPT, Llama, LlamaConfig, loss
from cjax.models.gpt import GPTConfig
from cjax.models.llama import loss as llama_loss


@dataclasses.dataclass(frozen=True)
class Setting:
    """What `cjax.parallelize` takes, but for the optimizer and the plan."""

    name: str
    model: Any
    loss: Callable[..., Any]
    batch: dict[str, np.ndarray]


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al., 2021) of patches of 8 x 8. They are cut out by reshaping: on CPUs, XLA's
    convolutions run at 1/18 of a matmul's rate, and where features are split at less, which no measured rate tells."""

    layers: int
    features: int
    hidden: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        n, height, width, colors = images.shape
        x = images.reshape(n, height // 8, 8, width // 8, 8, colors).swapaxes(2, 3)
        x = nn.Dense(self.features)(x.reshape(n, -1, 64 * colors))
        for _ in range(self.layers):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(2 * x.shape[1])(y)))
            x = x + y.swapaxes(1, 2)
            y = nn.Dense(self.hidden)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.features)(nn.gelu(y))
        return nn.Dense(10)(x.mean(1))


def classified(model: Callable[..., jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of images."""
    logits = jax.nn.log_softmax(model(batch["images"]))
    return -jnp.take_along_axis(logits, batch["labels"][:, None], 1).mean()


def settings() -> list[Setting]:
    rng = np.random.default_rng(0)
    config = GPTConfig(num_layers=4, num_heads=8, embed_dim=256, context=128, vocab_size=2048)
    tokens = rng.integers(0, 2048, (16, 128), dtype=np.int32)
    wide = LlamaConfig(
        num_layers=4, num_heads=8, num_kv_heads=8, embed_dim=256, mlp_dim=768, context=64, vocab_size=1024
    )
    texts = rng.integers(0, 1024, (32, 64), dtype=np.int32)
    images = rng.standard_normal((32, 64, 64, 3), dtype=np.float32)
    pictures = {"images": images, "labels": rng.integers(0, 10, 32, dtype=np.int32)}
    return [
        Setting("GPT", lambda rngs: GPT(config, rngs=rngs), loss, {"inputs": tokens, "targets": tokens}),
        Setting("Mixer", Mixer(4, 256, 1024), classified, pictures),
        Setting("Llama", lambda rngs: Llama(wide, rngs=rngs), llama_loss, {"inputs": texts, "targets": texts}),
    ]
