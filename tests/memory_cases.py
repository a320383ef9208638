"""Models of the sizes that people train, plans for them on cards that are not here, and what XLA says they need.

`python tests/memory_cases.py` compiles, one by one, the cases that `tests/planner/costs/compiled-0.10.json` does not
have yet: 15 to 60 seconds of a core each. It needs the extra `aot`. Each JAX has a file of its own, and brings an
XLA of its own.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import cjax
from cjax.mesh import compile_lowered, resolve_devices
from cjax.models.bert import BERT, masked_loss
from cjax.models.bert import bert as bert_sizes
from cjax.models.gpt import GPT
from cjax.models.gpt import gpt as gpt_sizes
from cjax.models.gpt import loss as gpt_loss
from cjax.models.llama import Llama
from cjax.models.llama import llama as llama_sizes
from cjax.models.llama import loss as llama_loss
from cjax.models.t5 import T5
from cjax.models.t5 import loss as t5_loss
from cjax.models.t5 import t5 as t5_sizes
from cjax.models.vit import ViT
from cjax.models.vit import loss as vit_loss
from cjax.models.vit import vit as vit_sizes

FIGURES = Path(__file__).parent / "planner" / "costs"
HERE = ".".join(jax.__version__.split(".")[:2])

Made = tuple[Any, Callable[..., Any], Any]  # a model, its loss, the shapes of a batch


def _ids(rows: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, length), jnp.int32)


def _text(rows: int, length: int) -> dict[str, Any]:
    return {"inputs": _ids(rows, length), "targets": _ids(rows, length)}


def gpt(name: str, rows: int, length: int = 1024, **more: Any) -> Made:
    config = gpt_sizes(name, **{"context": length, **more})
    return (lambda rngs: GPT(config, rngs=rngs)), gpt_loss, _text(rows, length)


def whole_logits(rows: int, length: int = 1024) -> Made:
    """GPT-2 with a loss that holds the logits of all positions."""
    model, _, batch = gpt("gpt2", rows, length)
    return model, functools.partial(gpt_loss, chunk=None), batch


def bert(name: str, rows: int, length: int = 512, padded: bool = False, **more: Any) -> Made:
    config = bert_sizes(name, **more)
    batch = _text(rows, length) | ({"present": _ids(rows, length)} if padded else {})
    return (lambda rngs: BERT(config, rngs=rngs)), masked_loss, batch


def vit(name: str, rows: int) -> Made:
    config = vit_sizes(name)
    images = jax.ShapeDtypeStruct((rows, config.image_size, config.image_size, 3), jnp.float32)
    batch = {"images": images, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    return (lambda rngs: ViT(config, rngs=rngs)), vit_loss, batch


def t5(name: str, rows: int, source: int = 512, target: int = 128) -> Made:
    config = t5_sizes(name)
    return (
        (lambda rngs: T5(config, rngs=rngs)),
        t5_loss,
        {"source": _ids(rows, source), **_text(rows, target)},
    )


def llama(name: str, rows: int, length: int = 2048, **more: Any) -> Made:
    config = llama_sizes(name, **{"context": length, **more})
    return (lambda rngs: Llama(config, rngs=rngs)), llama_loss, _text(rows, length)


# --- a user's own ---


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        y = nn.relu(norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), (self.stride,) * 2, use_bias=False)(y)))
        y = norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(4 * self.features, (1, 1), (self.stride,) * 2, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet-50: He et al., 2016."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            for i in range(count):
                x = Bottleneck(64 * 2**stage, stride=2 if stage and not i else 1)(x, train)
        return nn.Dense(1000)(x.mean((1, 2)))


class Mixer(nn.Module):
    """MLP-Mixer: Tolstikhin et al., 2021."""

    layers: int
    embed: int
    patch: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.embed, (self.patch,) * 2, (self.patch,) * 2)(x)
        x = x.reshape(x.shape[0], -1, self.embed)
        for _ in range(self.layers):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(self.embed // 2)(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            x = x + nn.Dense(self.embed)(nn.gelu(nn.Dense(4 * self.embed)(nn.LayerNorm()(x))))
        return nn.Dense(1000)(nn.LayerNorm()(x).mean(1))


def image_loss(model: Any, batch: Any, train: bool) -> jax.Array:
    logits = model(batch["images"], train)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def images(model: nn.Module, rows: int, size: int = 224) -> Made:
    pictures = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.float32)
    return model, image_loss, {"images": pictures, "labels": jax.ShapeDtypeStruct((rows,), jnp.int32)}


class Experts(nn.Module):
    """Feed-forward experts with a capacity, each token sent to the best two (GShard)."""

    num: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, embed = x.shape
        capacity = 2 * length // self.num
        gates = jax.nn.softmax(nn.Dense(self.num, use_bias=False)(x))
        weights, chosen = jax.lax.top_k(gates, 2)
        taken = jax.nn.one_hot(chosen, self.num)  # [batch, length, 2, experts]
        place = jnp.cumsum(taken.reshape(batch, -1, self.num), axis=1).reshape(taken.shape) - taken
        slot = jax.nn.one_hot(jnp.sum(place * taken, -1).astype(jnp.int32), capacity)
        send = jnp.einsum("blke,blkc->blec", taken, slot)
        back = jnp.einsum("blk,blke,blkc->blec", weights / weights.sum(-1, keepdims=True), taken, slot)
        up = self.param("up", nn.initializers.lecun_normal(), (self.num, embed, self.hidden))
        down = self.param("down", nn.initializers.lecun_normal(), (self.num, self.hidden, embed))
        y = jnp.einsum("blec,bld->becd", send, x)
        y = nn.silu(jnp.einsum("becd,edf->becf", y, up))
        return jnp.einsum("blec,becd->bld", back, jnp.einsum("becf,efd->becd", y, down))


class SortedExperts(nn.Module):
    """The same without a capacity: tokens are sorted by expert (MegaBlocks)."""

    num: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(self.num, use_bias=False)(tokens)), 2)
        order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=self.num)
        up = self.param("up", nn.initializers.lecun_normal(), (self.num, x.shape[-1], self.hidden))
        down = self.param("down", nn.initializers.lecun_normal(), (self.num, self.hidden, x.shape[-1]))
        y = jax.lax.ragged_dot(nn.silu(jax.lax.ragged_dot(tokens[order // 2], up, sizes)), down, sizes)
        y = y[jnp.argsort(order)].reshape(-1, 2, x.shape[-1])
        return (y * (weights / weights.sum(-1, keepdims=True))[..., None]).sum(1).reshape(x.shape)


class MoE(nn.Module):
    """A decoder whose feed-forward layers are experts."""

    layers: int = 12
    embed: int = 768
    heads: int = 12
    experts: int = 8
    vocab: int = 32000
    kind: Any = Experts

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(self.vocab, self.embed)(ids)
        for _ in range(self.layers):
            h = nn.LayerNorm()(x)
            q, k, v = (nn.DenseGeneral((self.heads, self.embed // self.heads))(h) for _ in range(3))
            x = x + nn.DenseGeneral(self.embed, (-2, -1))(jax.nn.dot_product_attention(q, k, v, is_causal=True))
            x = x + self.kind(self.experts, 4 * self.embed)(nn.LayerNorm()(x))
        return nn.Dense(self.vocab)(nn.LayerNorm()(x))


def moe_loss(model: Any, batch: Any, train: bool) -> jax.Array:
    logits = model(batch["inputs"], train)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def moe(rows: int, length: int = 1024, **more: Any) -> Made:
    return MoE(**more), moe_loss, _text(rows, length)


# --- pairs ---


@dataclass(frozen=True)
class Case:
    """A model under a plan on some cards; `name` says both."""

    model: str
    make: Callable[[], Made]
    devices: str
    plan: str

    @property
    def name(self) -> str:
        return f"{self.model} | {self.devices} | {self.plan}"

    def program(self, devices: Any = None) -> cjax.Program:
        model, loss, batch = self.make()
        devices = devices or resolve_devices(self.devices)
        return cjax.parallelize(model, loss, optax.adam(1e-3), batch, self.plan, devices=devices)


def _cases() -> list[Case]:
    table: list[tuple[str, Callable[[], Made], str, list[str]]] = [
        ("gpt2 b8", lambda: gpt("gpt2", 8), "h100:1", [
            "data=1", "precision=bfloat16", "precision=bfloat16 remat=dots", "precision=bfloat16 remat=block",
        ]),
        ("gpt2 b64", lambda: gpt("gpt2", 64), "a100:4", [
            "precision=bfloat16", "zero=1 precision=bfloat16", "zero=3 precision=bfloat16 remat=block",
            "tensor=4 precision=bfloat16", "pipeline=1f1b:4 microbatches=8 precision=bfloat16",
        ]),
        ("gpt2 b16 whole logits", lambda: whole_logits(16), "h100:2", ["precision=bfloat16"]),
        ("gpt2 dropout b16", lambda: gpt("gpt2", 16, dropout=0.1), "h100:2", [
            "precision=bfloat16", "data=1 tensor=2 precision=bfloat16",
        ]),
        ("gpt2-medium b32", lambda: gpt("gpt2-medium", 32), "a100:4", [
            "data=2 tensor=2 precision=bfloat16", "microbatches=4 zero=1 precision=bfloat16", "zero=2",
            "microbatches=2 zero=3 precision=bfloat16", "zero=3 precision=bfloat16 remat=dots",
            "microbatches=2 zero=1 precision=bfloat16",
            "data=2 tensor=2 sequence=gather zero=1 microbatches=2 precision=bfloat16", "tensor=4",
        ]),
        ("gpt2-xl b64", lambda: gpt("gpt2-xl", 64), "h100:8", [
            "precision=bfloat16", "zero=1 precision=bfloat16 remat=dots", "zero=3 precision=bfloat16",
            "zero=3 precision=bfloat16 remat=block", "zero=1 microbatches=4 precision=bfloat16",
        ]),
        ("gpt2-xl b20", lambda: gpt("gpt2-xl", 20), "h100:5", ["tensor=5 precision=bfloat16"]),
        ("gpt 6.7b b64", lambda: gpt("gpt3-175b", 64, 2048, num_layers=32, num_heads=32, embed_dim=4096), "h100:16", [
            "zero=3 precision=bfloat16", "zero=3 precision=bfloat16 remat=block",
            "tensor=8 zero=1 precision=bfloat16", "tensor=2d:4 zero=1 precision=bfloat16",
            "tensor=8 microbatches=2 overlap=2 precision=bfloat16",
            "tensor=8 zero=1 microbatches=8 overlap=2 precision=bfloat16 remat=block",
            "tensor=2.5d:8/2 precision=bfloat16", "tensor=3d:8 precision=bfloat16",
            "pipeline=1f1b:4 tensor=4 microbatches=16 precision=bfloat16",
            "pipeline=gpipe:4 zero=1 microbatches=8 precision=bfloat16 remat=block",
            "pipeline=interleaved:4/2 tensor=2 microbatches=8 precision=bfloat16",
            "pipeline=zero_bubble:4 tensor=4 microbatches=16 precision=bfloat16",
            "sequence=ring:4 zero=3 precision=bfloat16", "sequence=all_to_all:4 zero=3 precision=bfloat16",
            "tensor=4 sequence=gather zero=1 precision=bfloat16",
        ]),
        ("bert-large b64", lambda: bert("bert-large", 64), "a100:4", [
            "precision=bfloat16", "zero=1 precision=float16", "tensor=4 precision=bfloat16", "remat=block",
            "pipeline=1f1b:4 microbatches=8 precision=bfloat16", "zero=2 microbatches=4 precision=bfloat16",
        ]),
        ("bert-base padded b64", lambda: bert("bert-base", 64, padded=True, dropout=0.1), "h100:2", [
            "precision=bfloat16", "zero=2 microbatches=4", "zero=3 precision=bfloat16 remat=block",
        ]),
        ("vit-l16 b256", lambda: vit("vit-l16", 256), "a100:4", [
            "precision=bfloat16", "zero=1 precision=bfloat16 remat=dots", "tensor=2 precision=bfloat16", "zero=3",
            "pipeline=1f1b:4 microbatches=8 precision=bfloat16",
        ]),
        ("vit-h14 b512", lambda: vit("vit-h14", 512), "h100:8", [
            "zero=3 precision=bfloat16", "microbatches=4 zero=1 precision=bfloat16",
        ]),
        ("t5-base b64", lambda: t5("t5-base", 64), "a100:4", [
            "precision=bfloat16", "zero=1", "tensor=4 precision=bfloat16", "zero=3 precision=bfloat16",
            "zero=2 microbatches=4 precision=bfloat16 remat=block",
            "pipeline=gpipe:4 microbatches=4 precision=bfloat16",
            "data=2 pipeline=1f1b:2 microbatches=4 zero=1 precision=bfloat16 remat=block",
        ]),
        ("t5-3b b32", lambda: t5("t5-3b", 32), "h100:8", [
            "zero=3 precision=bfloat16 remat=block", "pipeline=1f1b:4 microbatches=8 precision=bfloat16",
        ]),
        ("llama-2-7b b32", lambda: llama("llama-2-7b", 32), "h100:16", [
            "zero=3 precision=bfloat16", "zero=3 precision=bfloat16 remat=dots", "tensor=8 zero=1 precision=bfloat16",
            "sequence=ring:4 zero=3 precision=bfloat16",
            "data=2 tensor=2 pipeline=1f1b:4 microbatches=8 zero=1 precision=bfloat16",
            "data=2 sequence=ring:4 pipeline=1f1b:2 microbatches=8 zero=1 precision=bfloat16 remat=dots",
        ]),
        ("llama-3-8b b32", lambda: llama("llama-3-8b", 32, 4096), "h200:16", [
            "zero=3 precision=bfloat16 remat=block", "tensor=4 zero=2 microbatches=4 precision=bfloat16",
            "pipeline=1f1b:4 tensor=4 microbatches=16 precision=bfloat16",
        ]),
        ("resnet-50 b256", lambda: images(ResNet(), 256), "a100:4", ["data=4", "precision=bfloat16"]),
        ("mixer-l b256", lambda: images(Mixer(24, 1024), 256), "h100:4", [
            "precision=bfloat16", "zero=1", "zero=3 precision=bfloat16 remat=block", "tensor=4 precision=bfloat16",
        ]),
        ("moe 8x b32", lambda: moe(32), "h100:4", [
            "precision=bfloat16", "zero=3 precision=bfloat16", "tensor=4 precision=bfloat16",
            "zero=1 precision=bfloat16 remat=block", "zero=3 precision=bfloat16 remat=block",
            "pipeline=1f1b:4 microbatches=8 precision=bfloat16", "zero=2 microbatches=4 precision=bfloat16",
            "data=2 tensor=2 zero=1 precision=bfloat16",
            "expert=4 precision=bfloat16", "expert=2 zero=1 precision=bfloat16 remat=block",
            "expert=2 zero=3 precision=bfloat16", "expert=4 zero=2 microbatches=4 precision=bfloat16",
            "data=2 expert=2 tensor=2 zero=1 precision=bfloat16",
            "expert=2 pipeline=1f1b:2 microbatches=8 precision=bfloat16",
        ]),
        ("sorted 8x b32", lambda: moe(32, kind=SortedExperts), "h100:4", [
            "precision=bfloat16", "zero=3 precision=bfloat16", "tensor=4 precision=bfloat16",
            "data=2 tensor=2 zero=1 precision=bfloat16 remat=block",
        ]),
        ("gpt3-175b b64", lambda: gpt("gpt3-175b", 64, 2048), "h100:64", [
            "pipeline=1f1b:8 microbatches=32 tensor=8 precision=bfloat16 remat=dots",
            "pipeline=1f1b:8 microbatches=32 tensor=8 precision=bfloat16 remat=block",
            "tensor=8 zero=3 precision=bfloat16 remat=block",
        ]),
    ]  # fmt: skip
    return [Case(name, make, devices, plan) for name, make, devices, plans in table for plan in plans]


CASES = {case.name: case for case in _cases()}


def figures(case: Case) -> dict[str, Any]:
    """What XLA needs for one step of a case, bytes a device, and where they go; or why there is no such step."""
    start, devices = time.perf_counter(), resolve_devices(case.devices)
    try:
        program = case.program(devices)
        compiled = compile_lowered(program.lower(), devices)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return {"refused": str(error).splitlines()[0][:200]}
    facts = cjax.audit(compiled, program.mesh)
    assert facts.memory is not None
    return {
        "peak": facts.memory.peak,
        "arguments": facts.memory.arguments,
        "temporary": facts.memory.temporary,
        "kernels": len(facts.attention_kernels),
        "seconds": round(time.perf_counter() - start, 1),
        "jax": jax.__version__,
    }


def file_of(version: str) -> Path:
    return FIGURES / f"compiled-{version}.json"


def kept(version: str) -> dict[str, dict[str, Any]]:
    """The figures of a JAX, as `0.12`."""
    file = file_of(version)
    return json.loads(file.read_text()) if file.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="only cases whose name has this in it")
    parser.add_argument("--again", action="store_true", help="also those that are kept")
    options = parser.parse_args()
    for name, case in CASES.items():
        if options.match in name and (options.again or name not in kept(HERE)):
            found = figures(case)
            file_of(HERE).write_text(json.dumps(kept(HERE) | {name: found}, indent=1) + "\n")
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
