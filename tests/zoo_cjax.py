"""The models of `cjax.models` as rows of the zoo: cjax knows no more of them than of anybody's."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from zoo_linen import CLASSES, HEADS, SEQ, VOCAB

from cjax.models import BERT, GPT, T5, Llama, ViT, llama_loss, loss, masked_loss, t5_loss, vit_loss
from cjax.models.bert import BERTConfig
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config
from cjax.models.vit import ViTConfig

BATCH, SOURCE = 16, 10
SIZES: dict[str, Any] = {"num_heads": HEADS, "embed_dim": 40, "vocab_size": VOCAB}
GPTS = GPTConfig(**SIZES, num_layers=4, mlp_dim=64, context=SEQ)
BERTS = BERTConfig(**SIZES, num_layers=4, mlp_dim=64, context=SEQ)
VITS = ViTConfig(4, HEADS, 40, mlp_dim=64, image_size=12, patch_size=4, num_classes=CLASSES)
T5S = T5Config(**SIZES, num_layers=3, num_decoder_layers=2, head_dim=5, mlp_dim=64, num_buckets=8, max_distance=16)
LLAMAS = LlamaConfig(**SIZES, num_layers=4, num_kv_heads=4, head_dim=6, mlp_dim=64, context=SEQ)


def built(kind: Callable[..., nnx.Module], config: Any) -> Callable[[Any], Callable[..., nnx.Module]]:
    def of_dtype(param_dtype: Any) -> Callable[..., nnx.Module]:
        def build(rngs: nnx.Rngs) -> nnx.Module:
            model = kind(config, rngs=rngs)
            for _, node in nnx.iter_graph(model):
                if isinstance(node, nnx.Embed):  # the one layer of theirs that keeps the dtype of construction
                    node.dtype = param_dtype
            return model

        return build

    return of_dtype


def _tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, length), dtype=np.int32)


def _text(seed: int) -> dict[str, np.ndarray]:
    """Inputs and targets, a fifth of which don't count."""
    whole = _tokens(SEQ + 1, seed)
    ignored = np.random.default_rng(seed + 1).random((BATCH, SEQ)) < 0.2
    return {"inputs": whole[:, :-1], "targets": np.where(ignored, -100, whole[:, 1:])}


def _present(length: int, seed: int) -> np.ndarray:
    return np.arange(length) < np.random.default_rng(seed).integers(4, length + 1, BATCH)[:, None]


def _images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    images = rng.standard_normal((BATCH, 12, 12, 3), dtype=np.float32)
    return {"images": images, "labels": rng.integers(0, CLASSES, BATCH, dtype=np.int32)}


# name: (kind, config, loss, batch, runs of equal layers); some classify a few positions at a time
ROWS: dict[str, tuple[Any, Any, Any, Callable[[], dict[str, np.ndarray]], tuple[int, ...]]] = {
    "cjax_gpt": (GPT, GPTS, functools.partial(loss, chunk=4), lambda: _text(5), (4,)),
    "cjax_bert": (BERT, BERTS, masked_loss, lambda: {**_text(6), "present": _present(SEQ, 1)}, (4,)),
    "cjax_vit": (ViT, VITS, vit_loss, _images, (4,)),
    "cjax_t5": (
        T5, T5S, functools.partial(t5_loss, chunk=5),
        lambda: {**_text(7), "source": _tokens(SOURCE, 8), "present": _present(SOURCE, 2)}, (3, 2),
    ),
    "cjax_llama": (Llama, LLAMAS, llama_loss, lambda: _text(8), (4,)),
}  # fmt: skip
