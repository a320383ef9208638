"""The rows of `bench_gpu.py`: a model, its loss and shapes, and the arithmetic of a step by formula."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cjax.models import (
    BERT,
    GPT,
    T5,
    Llama,
    ViT,
    bert,
    gpt,
    llama,
    llama_loss,
    loss,
    masked_loss,
    t5,
    t5_loss,
    vit,
    vit_loss,
)  # fmt: skip

from .mixture import Mixture, MixtureConfig, mixture_loss


@dataclasses.dataclass(frozen=True)
class Row:
    """One model at one length.

    Attributes:
        kind: "gpt", "bert", "vit", "llama", "t5" or "mixture".
        config: its sizes.
        seq: tokens of a row; of a T5 in its encoder and in its decoder.
        batch: rows that are compared with torch's.
        most: rows from which the largest batch that fits is looked for.
    """

    kind: str
    config: Any
    seq: int
    batch: int
    most: int

    @property
    def build(self) -> Callable[[nnx.Rngs], nnx.Module]:
        kinds: dict[str, Any] = {"gpt": GPT, "bert": BERT, "vit": ViT, "llama": Llama, "t5": T5, "mixture": Mixture}
        return lambda rngs: kinds[self.kind](self.config, rngs=rngs)

    @property
    def loss(self) -> Callable[..., Any]:
        return {
            "gpt": loss, "bert": masked_loss, "vit": vit_loss, "llama": llama_loss, "t5": t5_loss,
            "mixture": mixture_loss,
        }[self.kind]  # fmt: skip

    def shapes(self, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        tokens = jax.ShapeDtypeStruct((batch, self.seq), jnp.int32)
        if self.kind == "vit":
            size = self.config.image_size
            images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
            return {"images": images, "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)}
        return {"inputs": tokens, "targets": tokens} | ({"source": tokens} if self.kind == "t5" else {})

    def batch_of(self, batch: int, seed: int) -> dict[str, np.ndarray]:
        """Random numbers: what is timed does not depend on them."""
        rng, top = np.random.default_rng(seed), getattr(self.config, "vocab_size", 0)
        return {
            name: rng.integers(0, top or self.config.num_classes, shape.shape, dtype=np.int32)
            if shape.dtype == jnp.int32 else rng.standard_normal(shape.shape, dtype=np.float32)
            for name, shape in self.shapes(batch).items()
        }  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a row: patches and the class token of an image, both texts of a T5."""
        if self.kind == "vit":
            return (self.config.image_size // self.config.patch_size) ** 2 + 1
        return self.seq * (2 if self.kind == "t5" else 1)

    def flops(self, batch: int) -> float:
        """Of a training step: 6 a parameter and token, and 12 L H Q T a token for scores and their mixtures, all of
        them also where a mask hides half (Chowdhery et al., PaLM, 2022, appendix B). Tables that are only looked up
        count for nothing, nor do experts that a token is not sent to; half of a T5's parameters see each of its texts.
        """
        config = self.config
        looked_up = getattr(config, "context", 0) * config.embed_dim if self.kind in ("gpt", "bert") else 0
        if not getattr(config, "tied", True) and self.kind != "vit":
            looked_up += config.vocab_size * config.embed_dim
        head_dim = getattr(config, "head_dim", None) or config.embed_dim // config.num_heads
        num_params = getattr(config, "num_active", config.num_params)
        layers, length = config.num_layers * (3 if self.kind == "t5" else 1), self.tokens
        share = 1.0
        if self.kind == "t5":
            length, share = self.seq, 0.5
        attention = 12 * layers * config.num_heads * head_dim * length
        return batch * self.tokens * (6 * share * (num_params - looked_up) + share * attention)

    def activation_bytes(self, batch: int) -> int:
        """What Megatron keeps of a batch in 16 bits, scores aside (Korthikanti et al., 2022): 34 s b h a layer for a
        GPT. By width h, that of all heads a, of those of keys k, and the MLP's f, it is s b (10 h + 4 a + 4 k + 4 f);
        a gate is 2 f more, attention to another text 5 h + 4 a + 4 k."""
        config = self.config
        heads, width, inner = config.num_heads, config.embed_dim, config.mlp_dim or 4 * config.embed_dim
        head_dim = getattr(config, "head_dim", None) or width // heads
        both = 4 * head_dim * (heads + (getattr(config, "num_kv_heads", None) or heads))
        inner *= getattr(config, "top", 1)
        layer = 10 * width + both + (6 if self.kind in ("llama", "mixture") else 4) * inner
        if self.kind != "t5":
            return batch * self.tokens * config.num_layers * layer
        return batch * self.seq * (config.num_layers * layer + config.decoder_layers * (layer + 5 * width + both))


ROWS: dict[str, Row] = {
    "gpt2": Row("gpt", gpt("gpt2"), 1024, 16, 128),
    "gpt2-medium": Row("gpt", gpt("gpt2-medium"), 1024, 16, 64),
    "gpt2-large": Row("gpt", gpt("gpt2-large"), 1024, 8, 48),
    "gpt2-xl": Row("gpt", gpt("gpt2-xl"), 1024, 8, 32),
    "bert-large": Row("bert", bert("bert-large"), 512, 32, 128),
    "vit-l16": Row("vit", vit("vit-l16"), 0, 64, 256),
    "llama-1b": Row("llama", llama("llama-3.2-1b", context=4096), 2048, 8, 24),
    "llama-1b-4096": Row("llama", llama("llama-3.2-1b", context=4096), 4096, 4, 12),
    "t5-3b": Row("t5", t5("t5-3b"), 512, 4, 16),
    # Of Mixtral's and of OLMoE's proportions, with four layers.
    "mixture-8": Row("mixture", MixtureConfig(32000, 2048, 4, 2048, 16, 4, 7168, 8, 2), 2048, 8, 16),
    "mixture-64": Row("mixture", MixtureConfig(50304, 2048, 4, 2048, 16, 16, 1024, 64, 8), 2048, 8, 16),
}
TINY: dict[str, Row] = {
    "gpt": Row("gpt", gpt("gpt-mini", num_layers=2, embed_dim=64, context=32), 32, 4, 4),
    "bert": Row("bert", bert("bert-mini", num_layers=2, embed_dim=64, context=32), 32, 4, 4),
    "vit": Row("vit", vit("vit-mini", num_layers=2, embed_dim=64), 0, 4, 4),
    "llama": Row("llama", llama("llama-mini", num_layers=2, num_heads=4, embed_dim=64, context=32), 32, 4, 4),
    "t5": Row("t5", t5("t5-mini", embed_dim=64), 16, 4, 4),
    "mixture": Row("mixture", MixtureConfig(256, 32, 2, 64, 4, 2, 96, 4, 2), 32, 4, 4),
}
