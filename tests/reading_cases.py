"""Models and plans whose compiled steps were audited; `planner/costs/audited.json` has what a device receives."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from cjax.models import BERT, GPT, T5, Llama, ViT, llama_loss, loss, masked_loss, t5_loss, vit_loss
from cjax.models.bert import BERTConfig
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config
from cjax.models.vit import ViTConfig
from cjax.trace.author.capture import Capture, capture

LAYERS, EMBED, VOCAB, SEQ, SOURCE, ROWS = 4, 128, 512, 64, 32, 16
SIZES: dict[str, Any] = {"num_heads": 8, "embed_dim": EMBED, "mlp_dim": 4 * EMBED}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": VOCAB, "num_layers": LAYERS}


def _tokens(**lengths: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((ROWS, length), np.int32) for name, length in lengths.items()}


class OwnLayer(nn.Module):
    """A gated layer as no paper has it: the attention's result gates what the stream is multiplied by."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.RMSNorm()(x)
        mixed = nn.MultiHeadDotProductAttention(8, use_bias=False)(y, mask=nn.make_causal_mask(y[..., 0]))
        width = x.shape[-1]
        gated = nn.Dense(3 * width)(y) * nn.sigmoid(nn.Dense(3 * width)(mixed))
        return x + nn.Dense(width, use_bias=False)(gated)


class OwnModel(nn.Module):
    """A user's own model."""

    vocab: int = VOCAB
    width: int = EMBED

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width)(tokens)
        for _ in range(LAYERS):
            x = OwnLayer()(x)
        return nn.Dense(self.vocab)(nn.RMSNorm()(x))


class TiedModel(nn.Module):
    """A user's own model whose classifier is its table."""

    vocab: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(self.vocab, self.width)
        x = table(tokens)
        for _ in range(LAYERS):
            x = OwnLayer()(x)
        return table.attend(nn.RMSNorm()(x))


class Expert(nn.Module):
    """A layer whose tokens go to one of four experts, as many to each as there is room for."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows, length, width = x.shape
        room = length // 2
        gates = nn.softmax(nn.Dense(4, use_bias=False)(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), 4)
        place = (jnp.cumsum(chosen, 1) * chosen).astype(int) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, room)
        up = self.param("up", nn.initializers.lecun_normal(), (4, width, 2 * width))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * width, width))
        given = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        made = jnp.einsum("ebcf,efd->ebcd", nn.gelu(jnp.einsum("ebcd,edf->ebcf", given, up)), down)
        return x + jnp.einsum("bsec,ebcd->bsd", dispatch * gates[..., None], made)


class Switch(nn.Module):
    """The same with room for so many tokens of the whole batch."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *_, width = x.shape
        tokens = x.reshape(-1, width)
        room = 3 * len(tokens) // 8
        gates = nn.softmax(nn.Dense(4, use_bias=False)(tokens))
        chosen = jax.nn.one_hot(gates.argmax(-1), 4)
        place = (jnp.cumsum(chosen, 0) * chosen).astype(int) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, room)
        up = self.param("up", nn.initializers.lecun_normal(), (4, width, 2 * width))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * width, width))
        given = jnp.einsum("nec,nd->ecd", dispatch, tokens)
        made = jnp.einsum("ecf,efd->ecd", nn.gelu(jnp.einsum("ecd,edf->ecf", given, up)), down)
        return x + jnp.einsum("nec,ecd->nd", dispatch * gates[..., None], made).reshape(x.shape)


class TopTwo(nn.Module):
    """The same with two experts for each token, whose masks are made by products."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *_, width = x.shape
        tokens = x.reshape(-1, width)
        gates = nn.softmax(nn.Dense(4, use_bias=False)(tokens))
        best, expert = jax.lax.top_k(gates, 2)
        chosen = jax.nn.one_hot(expert, 4, dtype=jnp.int32)
        seat = jnp.cumsum(chosen.reshape(-1, 4), 0).reshape(chosen.shape) - 1
        seats = jax.nn.one_hot(seat, 3 * len(tokens) // 4, dtype=x.dtype)
        dispatch = jnp.einsum("nke,nkec->nec", chosen, seats)
        combine = jnp.einsum("nk,nke,nkec->nec", best, chosen, seats)
        up = self.param("up", nn.initializers.lecun_normal(), (4, width, 2 * width))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * width, width))
        given = jnp.einsum("nec,nd->ecd", dispatch, tokens)
        made = jnp.einsum("ecf,efd->ecd", nn.gelu(jnp.einsum("ecd,edf->ecf", given, up)), down)
        return x + jnp.einsum("nec,ecd->nd", combine, made).reshape(x.shape)


class Dropless(nn.Module):
    """Two of four experts for each token, for whom tokens are sorted."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *_, width = x.shape
        tokens = x.reshape(-1, width)
        best, expert = jax.lax.top_k(nn.softmax(nn.Dense(4, use_bias=False)(tokens)), 2)
        order, sizes = jnp.argsort(expert.reshape(-1)), jnp.bincount(expert.reshape(-1), length=4)
        gate, up = (self.param(name, nn.initializers.lecun_normal(), (4, width, 2 * width)) for name in ("gate", "up"))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * width, width))
        given = tokens[order // 2]
        hidden = nn.silu(jax.lax.ragged_dot(given, gate, sizes)) * jax.lax.ragged_dot(given, up, sizes)
        made = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)].reshape(-1, 2, width)
        return x + (made * best[..., None]).sum(1).reshape(x.shape)


class Scattered(nn.Module):
    """The same tokens sorted; what their experts make is weighed as it is sorted, and added to zeros. Experts are where
    a table says, so that all devices' rows are put in one order."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *_, width = x.shape
        tokens = x.reshape(-1, width)
        best, expert = jax.lax.top_k(nn.softmax(nn.Dense(4, use_bias=False)(tokens)), 2)
        expert = jnp.roll(jnp.arange(4), 1)[expert]
        order, sizes = jnp.argsort(expert.reshape(-1)), jnp.bincount(expert.reshape(-1), length=4)
        up = self.param("up", nn.initializers.lecun_normal(), (4, width, 2 * width))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 2 * width, width))
        made = jax.lax.ragged_dot(nn.silu(jax.lax.ragged_dot(tokens[order // 2], up, sizes)), down, sizes)
        made = made * best.reshape(-1)[order][:, None]
        return x + jnp.zeros(tokens.shape, made.dtype).at[order // 2].add(made).reshape(x.shape)


class ExpertModel(nn.Module):
    """A mixture of experts."""

    expert: type[nn.Module] = Expert

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(tokens)
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(8)(y, mask=nn.make_causal_mask(y[..., 0]))
            x = self.expert()(x)
        return nn.Dense(VOCAB)(x)


def own_loss(model: Any, batch: Any) -> jax.Array:
    logits = model(batch["inputs"])
    picked = jnp.take_along_axis(nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -picked.mean()


def optax_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as a user hands it over, and its batch."""

    build: Any
    loss: Any
    batch: Any

    def captured(self) -> Capture:
        return capture(self.build, self.loss, self.batch)


def _nnx(kind: Any, config: Any) -> Any:
    return lambda rngs: kind(config, rngs=rngs)


IMAGES = {
    "images": jax.ShapeDtypeStruct((ROWS, 120, 120, 3), np.float32),
    "labels": jax.ShapeDtypeStruct((ROWS,), np.int32),
}
MODELS: dict[str, Model] = {
    "gpt": Model(_nnx(GPT, GPTConfig(**TEXT, context=SEQ)), loss, _tokens(inputs=SEQ, targets=SEQ)),
    "bert": Model(_nnx(BERT, BERTConfig(**TEXT, context=SEQ)), masked_loss, _tokens(inputs=SEQ, targets=SEQ)),
    "vit": Model(
        _nnx(ViT, ViTConfig(LAYERS, 8, EMBED, mlp_dim=4 * EMBED, image_size=120, patch_size=15, num_classes=256)),
        vit_loss, IMAGES,
    ),
    "t5": Model(
        _nnx(T5, T5Config(**TEXT, num_decoder_layers=4, head_dim=16)), t5_loss,
        _tokens(source=SOURCE, inputs=SEQ, targets=SEQ),
    ),
    "llama": Model(
        _nnx(Llama, LlamaConfig(**TEXT, num_kv_heads=4, head_dim=16, context=SEQ)), llama_loss,
        _tokens(inputs=SEQ, targets=SEQ),
    ),
    "own": Model(OwnModel(), own_loss, _tokens(inputs=SEQ, targets=SEQ)),
    "experts": Model(ExpertModel(), own_loss, _tokens(inputs=SEQ, targets=SEQ)),
    "dropless": Model(ExpertModel(Dropless), own_loss, _tokens(inputs=SEQ, targets=SEQ)),
    "scattered": Model(ExpertModel(Scattered), own_loss, _tokens(inputs=SEQ, targets=SEQ)),
    "switch": Model(ExpertModel(Switch), own_loss, _tokens(inputs=SEQ, targets=SEQ)),
    "top two": Model(ExpertModel(TopTwo), own_loss, _tokens(inputs=SEQ, targets=SEQ)),
}  # fmt: skip
# Sizes at which tables and logits are to layers as they are where people train; vocabularies that nothing divides.
WIDE_SEQ, WIDTH = 512, 1024
_WIDE: dict[str, Any] = {"num_layers": LAYERS, "num_heads": 16, "embed_dim": WIDTH}
_WIDE_TEXT = _tokens(inputs=WIDE_SEQ, targets=WIDE_SEQ)
MODELS |= {
    "wide gpt": Model(_nnx(GPT, GPTConfig(**_WIDE, vocab_size=50257, context=WIDE_SEQ)), loss, _WIDE_TEXT),
    "wide bert": Model(_nnx(BERT, BERTConfig(**_WIDE, vocab_size=30522, context=WIDE_SEQ)), masked_loss, _WIDE_TEXT),
    "wide llama": Model(
        _nnx(Llama, LlamaConfig(**_WIDE, num_kv_heads=8, mlp_dim=2816, vocab_size=32000, context=WIDE_SEQ)),
        llama_loss, _WIDE_TEXT,
    ),
    "wide t5": Model(
        _nnx(T5, T5Config(**_WIDE, num_decoder_layers=LAYERS, mlp_dim=2816, gated=True)), t5_loss,
        _tokens(source=WIDE_SEQ, inputs=WIDE_SEQ // 2, targets=WIDE_SEQ // 2),
    ),
    "wide vit": Model(
        _nnx(ViT, ViTConfig(**_WIDE)), vit_loss,
        {
            "images": jax.ShapeDtypeStruct((ROWS, 224, 224, 3), np.float32),
            "labels": jax.ShapeDtypeStruct((ROWS,), np.int32),
        },
    ),
    "wide own": Model(OwnModel(50257, WIDTH), own_loss, _WIDE_TEXT),
    "wide tied": Model(TiedModel(50257, WIDTH), optax_loss, _WIDE_TEXT),
}  # fmt: skip
_WIDE_PLANS = (
    "data=8 zero=1",
    "data=8 zero=3",
    "data=2 tensor=4",
    "data=4 tensor=2 zero=1",
    "data=2 zero=3 tensor=4",
    "data=2 tensor=4 sequence=gather",
    "data=4 tensor=2 sequence=gather zero=1",
    "data=1 tensor=8 sequence=gather remat=block",
    "data=2 tensor=2d:4",
    "data=1 tensor=3d:8",
    "data=2 sequence=ring:4",
    "data=2 sequence=all_to_all:4",
    "data=2 sequence=ring:4 zero=3",
    "data=2 tensor=2 sequence=ring:2",
    "data=2 tensor=2 pipeline=1f1b:2 microbatches=4",
    "data=2 pipeline=1f1b:4 microbatches=8 zero=1",
)

PAIRS: tuple[tuple[str, str], ...] = (
    ("gpt", "data=8"),
    ("gpt", "data=8 zero=1"),
    ("gpt", "data=8 zero=2 microbatches=2"),
    ("gpt", "data=8 zero=3"),
    ("gpt", "data=8 zero=3 microbatches=2"),
    ("gpt", "data=8 zero=3/4"),
    ("gpt", "data=8 zero=1/2 microbatches=2"),
    ("gpt", "data=8 zero=1 precision=bfloat16"),
    ("gpt", "data=8 zero=3 precision=bfloat16"),
    ("gpt", "data=1 tensor=8"),
    ("gpt", "data=2 tensor=4 precision=bfloat16"),
    ("gpt", "data=2 tensor=4 zero=1"),
    ("gpt", "data=2 tensor=4 remat=block"),
    ("gpt", "data=2 tensor=2d:4"),
    ("gpt", "data=1 tensor=2.5d:8/2"),
    ("gpt", "data=1 tensor=3d:8"),
    ("gpt", "data=2 sequence=ring:4"),
    ("gpt", "data=1 sequence=ring:8 precision=bfloat16"),
    ("gpt", "data=2 sequence=all_to_all:4"),
    ("gpt", "data=2 tensor=4 sequence=gather"),
    ("gpt", "data=4 pipeline=2 microbatches=2"),
    ("gpt", "data=2 pipeline=1f1b:4 microbatches=4 zero=1"),
    ("gpt", "data=2 tensor=2 pipeline=gpipe:2 microbatches=4"),
    ("bert", "data=2 tensor=4"),
    ("bert", "data=2 tensor=2d:4"),
    ("bert", "data=8 zero=2"),
    ("bert", "data=2 sequence=ring:4"),
    ("vit", "data=2 tensor=4"),
    ("vit", "data=8 zero=3"),
    ("vit", "data=2 pipeline=4 microbatches=4"),
    ("vit", "data=1 tensor=3d:8"),
    ("vit", "data=1 sequence=ring:8"),  # 65 positions
    ("vit", "data=1 sequence=all_to_all:8"),
    ("vit", "data=2 tensor=4 sequence=gather"),
    ("t5", "data=2 tensor=4"),
    ("t5", "data=8 zero=1"),
    ("t5", "data=2 tensor=2d:4"),
    ("llama", "data=2 tensor=4"),
    ("llama", "data=1 tensor=8"),
    ("llama", "data=2 tensor=4 sequence=gather"),
    ("llama", "data=8 zero=3"),
    ("llama", "data=2 sequence=ring:4"),
    ("llama", "data=1 sequence=all_to_all:8"),
    ("own", "data=2 tensor=4"),
    ("own", "data=8 zero=3"),
    ("own", "data=2 tensor=2d:4"),
    ("experts", "data=8"),
    ("experts", "data=8 zero=3"),
    ("experts", "data=2 tensor=4"),
    ("switch", "data=8"),
    ("switch", "data=8 zero=3/4 precision=bfloat16"),
    ("switch", "data=2 tensor=4"),
    ("switch", "data=4 tensor=2 zero=1 remat=block"),
    ("top two", "data=8"),
    ("top two", "data=8 zero=3/4 precision=bfloat16"),
    ("top two", "data=2 tensor=4"),
    ("top two", "data=4 tensor=2 zero=1 remat=block"),
    ("dropless", "data=8"),
    ("dropless", "data=2 tensor=4 precision=bfloat16"),
    ("dropless", "data=4 tensor=2 zero=1 remat=block"),
    ("dropless", "data=2 tensor=2 sequence=ring:2"),
    ("dropless", "data=4 tensor=2 sequence=gather zero=3"),
    ("dropless", "data=2 tensor=2d:4"),
    ("scattered", "data=2 tensor=4 zero=1"),
    ("scattered", "data=2 tensor=2d:4"),
    # Experts on data-parallel devices: what is sent to them is exchanged, or gathered, if the whole batch makes it.
    ("experts", "data=8 expert=4"),
    ("experts", "data=8 expert=2 zero=3 precision=bfloat16"),
    ("experts", "data=4 expert=2 tensor=2 zero=1 remat=block"),
    ("experts", "data=8 expert=4 zero=1 microbatches=2"),
    ("experts", "data=4 expert=4 pipeline=1f1b:2 microbatches=4"),
    ("switch", "data=8 expert=4"),
    ("switch", "data=8 expert=2 zero=3 remat=block"),
    ("gpt", "data=2 tensor=4 microbatches=2"),
    ("gpt", "data=4 tensor=2 zero=3 precision=bfloat16"),
    ("gpt", "data=2 tensor=2 sequence=ring:2"),
    ("gpt", "data=2 tensor=2d:4 microbatches=2 remat=block"),
    ("gpt", "data=2 sequence=ring:4 remat=block"),
    ("gpt", "data=2 pipeline=2 tensor=2 microbatches=4 remat=block"),
    ("gpt", "data=4 pipeline=2 microbatches=4 zero=3"),
    ("gpt", "data=4 pipeline=interleaved:2/2 microbatches=4"),
    ("gpt", "data=2 pipeline=zero_bubble:4 microbatches=8 precision=bfloat16"),
    ("t5", "data=2 pipeline=4 microbatches=4"),
    ("gpt", "data=2 pipeline=1f1b:4 microbatches=4 precision=bfloat16"),
    ("gpt", "data=4 pipeline=2 microbatches=4 zero=2/2"),
    ("gpt", "data=4 pipeline=gpipe:2 microbatches=1 zero=2"),
    ("llama", "data=2 pipeline=1f1b:4 microbatches=4 zero=1 precision=bfloat16"),
    # Stages in lockstep, which run their layers more often than they have micro-batches for them.
    ("gpt", "data=1 pipeline=1f1b:2 microbatches=4 sequence=ring:4"),
    ("gpt", "data=1 pipeline=1f1b:2 microbatches=4 sequence=ring:4 zero=1"),
    ("gpt", "data=2 pipeline=gpipe:2 microbatches=1 sequence=all_to_all:2 zero=1"),
    ("gpt", "data=1 pipeline=1f1b:2 microbatches=4 tensor=2d:4"),
    ("llama", "data=2 pipeline=zero_bubble:2/2 microbatches=4 sequence=all_to_all:2"),
    ("t5", "data=1 pipeline=2 microbatches=4 sequence=ring:4"),
    ("llama", "data=2 tensor=2 sequence=ring:2 microbatches=2"),
    # Positions are split: gradients are reduced, or with ZeRO scattered, in each micro-batch.
    ("llama", "data=2 sequence=ring:4 microbatches=4 zero=1 precision=bfloat16"),
    ("gpt", "data=2 sequence=ring:4 microbatches=2 zero=1"),
    ("own", "data=2 sequence=all_to_all:4 microbatches=2 zero=2 precision=bfloat16"),
    ("llama", "data=2 sequence=ring:2 pipeline=1f1b:2 microbatches=4 zero=1 precision=bfloat16"),
    ("own", "data=1 sequence=all_to_all:4 pipeline=1f1b:2 microbatches=4 zero=2"),
    # Stages gather what stands outside of layers in each micro-batch, where they round it.
    ("llama", "data=4 pipeline=1f1b:2 microbatches=4 zero=3 precision=bfloat16"),
    ("gpt", "data=2 tensor=2 pipeline=1f1b:2 microbatches=4 zero=3 precision=bfloat16"),
    # Stages run as many micro-batches through the encoder as through the decoder, which is twice as long.
    ("t5", "data=2 tensor=2 pipeline=1f1b:2 microbatches=4 precision=bfloat16"),
)
WIDE_PAIRS = (
    *((name, f"{plan} precision=bfloat16") for name in MODELS if name.startswith("wide") for plan in _WIDE_PLANS),
    ("wide gpt", "data=2 tensor=2 pipeline=zero_bubble:2 microbatches=4 precision=bfloat16"),
    ("wide bert", "data=2 tensor=2 pipeline=zero_bubble:2 microbatches=4 precision=bfloat16"),
    ("wide llama", "data=2 sequence=ring:4 microbatches=2 remat=block precision=bfloat16"),
    ("wide llama", "data=8 zero=3/4 precision=bfloat16"),
)


@functools.cache
def captured(name: str) -> Capture:
    return MODELS[name].captured()
