"""Small models of many kinds, written the way their authors would write them: nothing here knows cjax.

Sizes differ from dim to dim wherever they can, so that mixing up two dims shows: batch 16, sequence 12, embed 40,
heads 8 x 5, ffn 64, vocabulary 101 (divisible by nothing).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from zoo_cjax import ROWS, built
from zoo_linen import (
    CLASSES,
    HEADS,
    SEQ,
    VOCAB,
    EncoderDecoder,
    LinenConvNet,
    LinenDecoder,
    LinenEncoder,
    LinenLSTM,
    LinenScanDecoder,
    Mixer,
    MoEDecoder,
    PackedDecoder,
    VisionTransformer,
)
from zoo_nnx import MLP, Llama, NNXConvNet, NNXDecoder, NNXEncoder, NNXScanDecoder

BATCH = 16
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One model. `make(param_dtype)` gives (model, loss, batch), always the same batch.

    `param_dtype` matters where Flax keeps the dtype of construction (an LSTM's carry, `nnx.Embed`); elsewhere the
    computation follows the parameters it is given.
    """

    make: Callable[..., tuple[Any, Callable[..., Any], Batch]]
    kind: str  # "linen" | "nnx"
    blocks: tuple[int, ...] = ()  # repeats of each run of equal layers
    scanned: bool = False  # the author wrote the run as a scan
    heads: int | None = None
    couples: bool = False  # examples meet before the loss: BatchNorm, expert capacity
    dropout: bool = False


# --- batches and losses ---


def tokens(vocab: int = VOCAB, seq: int = SEQ, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (BATCH, seq), dtype=np.int32)


def text_batch() -> Batch:
    return {"tokens": tokens(seq=SEQ + 1)}  # one more than the models see: inputs and labels are shifted


def padded_batch() -> Batch:
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, SEQ + 1, BATCH)
    mask = np.arange(SEQ) < lengths[:, None]
    return {"tokens": tokens(), "mask": mask, "labels": rng.integers(0, CLASSES, BATCH, dtype=np.int32)}


def image_batch(height: int = 12, width: int = 20) -> Batch:
    rng = np.random.default_rng(2)
    images = rng.standard_normal((BATCH, height, width, 3), dtype=np.float32)
    return {"images": images, "labels": rng.integers(0, CLASSES, BATCH, dtype=np.int32)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def next_token(model: Any, batch: Batch, train: bool) -> jax.Array:
    logits = model(batch["tokens"][:, :-1], train=train)
    return cross_entropy(logits, batch["tokens"][:, 1:]).mean()


def nnx_next_token(model: Any, batch: Batch) -> jax.Array:
    return cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]).mean()


def masked_next_token(model: Any, batch: Batch, train: bool) -> jax.Array:
    logits = model(batch["tokens"], train=train)
    losses = cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])
    mask = batch["mask"][:, 1:]
    return (losses * mask).sum() / mask.sum()


def classify_text(model: Any, batch: Batch, train: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(batch["tokens"], batch["mask"], train=train)
    accuracy = (logits.argmax(-1) == batch["labels"]).mean()
    return cross_entropy(logits, batch["labels"]).mean(), {"accuracy": accuracy}


def classify_images(model: Any, batch: Batch, train: bool) -> jax.Array:
    return cross_entropy(model(batch["images"], train=train), batch["labels"]).mean()


def translate(model: Any, batch: Batch, train: bool) -> jax.Array:
    logits = model(batch["source"], batch["target"][:, :-1], train=train)
    return cross_entropy(logits, batch["target"][:, 1:]).mean()


def nnx_classify_text(model: Any, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(batch["tokens"], batch["mask"])
    accuracy = (logits.argmax(-1) == batch["labels"]).mean()
    return cross_entropy(logits, batch["labels"]).mean(), {"accuracy": accuracy}


def nnx_classify_images(model: Any, batch: Batch) -> jax.Array:
    return cross_entropy(model(batch["images"]), batch["labels"]).mean()


def regression(model: Any, batch: Batch, train: bool) -> jax.Array:
    return jnp.square(model(batch["x"], train=train)[:, 0] - batch["y"]).mean()


def squared_error(model: Any, batch: Batch) -> jax.Array:
    return jnp.square(model(batch["x"])[:, 0] - batch["y"]).mean()


# --- the table ---


def case(
    kind: str, model: Callable[[Any], Any], loss: Callable[..., Any], batch: Callable[[], Batch], **traits: Any
) -> Case:
    """A row. `model(param_dtype)` makes what a user would hand over."""
    return Case(make=lambda param_dtype=jnp.float32: (model(param_dtype), loss, batch()), kind=kind, **traits)


def linen(net: Callable[..., nn.Module], *args: Any) -> Callable[[Any], nn.Module]:
    return lambda param_dtype: net(*args)


def builder(net: Callable[..., nnx.Module]) -> Callable[[Any], Callable[..., nnx.Module]]:
    return lambda param_dtype: lambda rngs: net(param_dtype=param_dtype, rngs=rngs)


def instance(net: Callable[..., nnx.Module]) -> Callable[[Any], nnx.Module]:
    return lambda param_dtype: net(param_dtype=param_dtype, rngs=nnx.Rngs(0, dropout=1))


def regression_batch() -> Batch:
    rng = np.random.default_rng(3)
    return {
        "x": rng.standard_normal((BATCH, 10), dtype=np.float32),
        "y": rng.standard_normal(BATCH, dtype=np.float32),
    }


def translation_batch() -> Batch:
    return {"source": tokens(), "target": tokens(83, 10, seed=4)}


TEXT: dict[str, Any] = {"batch": text_batch, "heads": HEADS}
TEXT4: dict[str, Any] = {**TEXT, "blocks": (4,)}
PADDED: dict[str, Any] = {"batch": padded_batch, "heads": HEADS, "blocks": (3,)}
IMAGES: dict[str, Any] = {"batch": image_batch}

MODELS: dict[str, Case] = {
    "linen_decoder": case("linen", linen(LinenDecoder), next_token, **TEXT4, dropout=True),
    "linen_encoder": case("linen", linen(LinenEncoder), classify_text, **PADDED, dropout=True),
    "linen_scan": case("linen", linen(LinenScanDecoder), next_token, **TEXT4, scanned=True, dropout=True),
    "linen_remat": case("linen", linen(LinenDecoder, 4, 0.1, True), next_token, **TEXT4, dropout=True),
    "linen_tied": case("linen", linen(LinenDecoder, 4, 0.0, False, True), next_token, **TEXT4),
    "linen_packed_qkv": case("linen", linen(PackedDecoder), next_token, **TEXT4),
    "linen_masked_mean": case("linen", linen(LinenDecoder, 3, 0.0), masked_next_token, **PADDED),
    "linen_encoder_decoder": case(
        "linen", linen(EncoderDecoder), translate, translation_batch, blocks=(3, 4), heads=HEADS, dropout=True
    ),
    "linen_moe_soft": case("linen", linen(MoEDecoder, 0), next_token, **TEXT, blocks=(3,)),
    "linen_moe_capacity": case("linen", linen(MoEDecoder, 2), next_token, **TEXT, blocks=(3,), couples=True),
    "linen_conv": case("linen", linen(LinenConvNet), classify_images, **IMAGES, couples=True),
    "linen_vit": case(
        "linen", linen(VisionTransformer), classify_images, **IMAGES, blocks=(4,), heads=HEADS, dropout=True
    ),
    "linen_mixer": case("linen", linen(Mixer), classify_images, **IMAGES, blocks=(4,)),
    "linen_lstm": case("linen", LinenLSTM, next_token, text_batch),
    "nnx_decoder": case("nnx", builder(NNXDecoder), nnx_next_token, **TEXT4, dropout=True),
    "nnx_encoder": case("nnx", instance(NNXEncoder), nnx_classify_text, **PADDED, dropout=True),
    "nnx_scan": case("nnx", builder(NNXScanDecoder), nnx_next_token, **TEXT4, scanned=True, dropout=True),
    "nnx_llama": case("nnx", builder(Llama), nnx_next_token, **TEXT4),
    "nnx_conv": case("nnx", lambda _: lambda rngs: NNXConvNet(rngs=rngs), nnx_classify_images, **IMAGES, couples=True),
    "nnx_mlp": case("nnx", lambda _: lambda rngs: MLP(rngs=rngs), squared_error, regression_batch),
    **{
        name: case("nnx", built(kind, config), loss, batch, blocks=blocks, heads=HEADS)
        for name, (kind, config, loss, batch, blocks) in ROWS.items()
    },
}
