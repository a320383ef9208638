"""What compiled steps move, multiply and launch, read from programs for absent GPUs, against formulas for the same.

    python experiments/bench_programs.py                           # all pairs, about 15 s each on 2 cores
    python experiments/bench_programs.py --models bert --plans tensor=8 --log logs

    python experiments/bench_programs.py --models gpt2-xl --by-hand --parts 12   # plain JAX too; largest kernels

Needs XLA's GPU compiler (extra `cjax[aot]`), no GPU. A row is a model and a plan: MiB that a device receives in a step
by kind and axis, their ratio to the formula of the plan, milliseconds that this takes at the links' full rate and of
these what no kernel hides, the share of matmul FLOPs with float32 operands, bytes that kernels touch by XLA's own
count, GFLOP of matmuls and MiB that a step needs beside its state. Then, by another count (shared/kernels.py): kernels
that a step launches, milliseconds of those that multiply, at 0.75 of an H100's 989 TFLOP/s, and of the others, by the
bytes that they read and write at 3.35 TB/s. Formulas, in the precision of the plan; they have no transfers of experts
whose tokens are of the whole batch (einsum, seats, choosing, sorted):

    data=n      each gradient all-reduced once
    expert=n    likewise over the devices that have the same experts, and seats for tokens of an example exchanged four
                times a layer
    zero=1, 2   each gradient scattered once, each parameter gathered once
    zero=3      likewise, and the parameters of layers gathered again for the backward pass
    zero=3/4    in groups of four: as zero=3 in each, and a device's part of each gradient all-reduced over both groups
    tensor=n    [rows, length, width] all-reduced twice a layer each way, and once at each end; once each way where two
                products are added to each other
    ring:n      keys and values to all in both passes, their gradients round and home; gradients as data=n
    all_to_all  queries, keys, values and results exchanged in both passes; gradients as data=n
    pipeline    in each tick an activation and a gradient; in float32, where micro-batches add them up, gradients of a
                stage's layers reduced over the copies of the stage; what is in no layer, each stage is given its part
                of over the stages, which is reduced over the copies, and gathers once

Positions that n does not divide (a ViT's 197) are filled up, and ring and all_to_all move as many as there are then.
Models with "wide" in their names are of width 2,048, large enough for matmuls to hide transfers under, and are compiled
under tensor=8, as it is and with micro-batches that overlap, and under zero=1 and zero=3; so is gpt3-6.7b, in its own
size. Others that are named as they are published (gpt2-xl, bert-large, vit-l16) are compiled for one H100;
`--by-hand` compiles the same as an expert writes them in plain JAX (`benchmarks/in_jax.py`), scanned and unrolled.
"""

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from benchmarks import in_jax
from benchmarks.models import Row as ByHand
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared.compiled import described
from shared.kernels import kernels

import cjax
from cjax.audit import Audit, audit
from cjax.mesh import compile_lowered, resolve_devices
from cjax.models import (
    BERT,
    GPT,
    T5,
    Llama,
    ViT,
    bert,
    gpt,
    llama_loss,
    loss,
    masked_loss,
    t5_loss,
    vit,
    vit_loss,
)  # fmt: skip
from cjax.models.bert import BERTConfig
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config
from cjax.models.vit import ViTConfig
from cjax.planner.hardware import hardware_of

LAYERS, EMBED, HEADS, VOCAB, SEQ, ROWS, CHUNK, IMAGE = 4, 256, 8, 2048, 256, 16, 64, 224
WIDE, LONG = 2048, 1024
SEATS = 80  # of an expert, for tokens of an example
SIZES: dict[str, Any] = dict(num_heads=HEADS, embed_dim=EMBED, mlp_dim=4 * EMBED, vocab_size=VOCAB, num_layers=LAYERS)
WIDE_SIZES = SIZES | {"num_heads": 16, "embed_dim": WIDE, "mlp_dim": 4 * WIDE, "vocab_size": 50257}
WIDE_PLANS = ("tensor=8", "tensor=8 microbatches=2 overlap=2", "zero=1", "zero=3")
LARGE_PLANS = ("tensor=8 microbatches=2 overlap=2", "zero=1", "zero=3", "zero=3 remat=dots")
PLANS = (
    "tensor=8", "data=8", "zero=1", "zero=2", "zero=3", "zero=3/4", "data=1 sequence=ring:8",
    "data=1 sequence=all_to_all:8", "data=2 pipeline=1f1b:4 microbatches=4",
)  # fmt: skip


class OwnLayer(nn.Module):
    """A layer whose norm comes behind, and five products of whose input are no other model's."""

    width: int = EMBED

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(x, mask=nn.make_causal_mask(x[..., 0]))
        gated = nn.Dense(4 * self.width)(x) * nn.sigmoid(nn.Dense(4 * self.width)(x))
        return nn.LayerNorm()(x + mixed + nn.Dense(self.width)(gated))


class OwnModel(nn.Module):
    """A user's own: post-norm, its table tied through `attend`."""

    width: int = EMBED

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, self.width)
        x = embed(tokens)
        for _ in range(LAYERS):
            x = OwnLayer(self.width)(x)
        return embed.attend(x)


class Experts(nn.Module):
    """Eight experts for all tokens, each weighed and added to the others', as an author may write a mixture of them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(nn.Dense(8, use_bias=False)(x))
        total = jax.numpy.zeros_like(x)
        for number in range(8):
            up, gate = (nn.Dense(EMBED, use_bias=False)(x) for _ in range(2))
            total = total + nn.Dense(EMBED, use_bias=False)(nn.silu(gate) * up) * gates[..., number : number + 1]
        return total


class SentExperts(nn.Module):
    """Each token is sent to two of eight experts, each of which has seats for 80 tokens of an example, by einsum."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        jnp, init, seats = jax.numpy, nn.initializers.lecun_normal(batch_axis=(0,)), SEATS
        up, gate = (self.param(name, init, (8, EMBED, 4 * EMBED)) for name in ("up", "gate"))
        down = self.param("down", init, (8, 4 * EMBED, EMBED))
        best, expert = jax.lax.top_k(jax.nn.softmax(nn.Dense(8, use_bias=False)(x)), 2)
        chosen = jax.nn.one_hot(expert, 8)  # [row, token, choice, expert]
        before = chosen.reshape(len(x), -1, 8)
        seat = (jnp.cumsum(before, 1) * before).reshape(chosen.shape).sum(-1).astype(int) - 1
        combine = jnp.einsum("bske,bskc,bsk->bsec", chosen, jax.nn.one_hot(seat, seats), best)
        sent = jnp.einsum("bsec,bsd->ebcd", (combine > 0).astype(x.dtype), x)
        made = nn.silu(jnp.einsum("ebcd,edf->ebcf", sent, gate)) * jnp.einsum("ebcd,edf->ebcf", sent, up)
        return jnp.einsum("bsec,ebcd->bsd", combine, jnp.einsum("ebcf,efd->ebcd", made, down))


class ExpertsOfAll(nn.Module):
    """Eight experts with seats for so many tokens of the whole batch: sent there by einsum or added up in their seats,
    or chosen by the experts (Zhou et al., 2022); and with no seats, of tokens sorted by expert (Gale et al., 2023)."""

    how: str = "einsum"
    width: int = EMBED

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        jnp, init = jax.numpy, nn.initializers.lecun_normal(batch_axis=(0,))
        up, gate = (self.param(name, init, (8, self.width, 4 * self.width)) for name in ("up", "gate"))
        down = self.param("down", init, (8, 4 * self.width, self.width))
        tokens = x.reshape(-1, self.width)
        seats = 5 * len(tokens) // 16
        probs = jax.nn.softmax(nn.Dense(8, use_bias=False)(tokens))

        def made(sent: jax.Array) -> jax.Array:
            h = nn.silu(jnp.einsum("ecd,edf->ecf", sent, gate)) * jnp.einsum("ecd,edf->ecf", sent, up)
            return jnp.einsum("ecf,efd->ecd", h, down)

        if self.how == "choosing":
            best, which = jax.lax.top_k(probs.T, seats)
            return jnp.zeros_like(tokens).at[which].add(made(tokens[which]) * best[..., None]).reshape(x.shape)
        best, expert = jax.lax.top_k(probs, 2)
        if self.how == "sorted":
            sizes, order = jnp.bincount(expert.reshape(-1), length=8), jnp.argsort(expert.reshape(-1))
            sent = tokens[order // 2]
            h = nn.silu(jax.lax.ragged_dot(sent, gate, sizes)) * jax.lax.ragged_dot(sent, up, sizes)
            back = jax.lax.ragged_dot(h, down, sizes)[jnp.argsort(order)].reshape(-1, 2, self.width)
            return (back * best[..., None]).sum(1).reshape(x.shape)
        chosen = jax.nn.one_hot(expert, 8)  # [token, choice, expert]
        seat = (jnp.cumsum(chosen.reshape(-1, 8), 0).reshape(chosen.shape) - 1).astype(int)
        if self.how == "einsum":
            places = jax.nn.one_hot(seat, seats)
            sent = jnp.einsum("nec,nd->ecd", jnp.einsum("nke,nkec->nec", chosen, places), tokens)
            combine = jnp.einsum("nk,nke,nkec->nec", best, chosen, places)
            return jnp.einsum("nec,ecd->nd", combine, made(sent)).reshape(x.shape)
        seat = (seat * chosen).sum(-1).astype(int)
        at = jnp.where(seat < seats, expert * seats + seat, 8 * seats)
        sent = jnp.zeros((8 * seats + 1, self.width), x.dtype).at[at.reshape(-1)].add(jnp.repeat(tokens, 2, 0))[:-1]
        back = made(sent.reshape(8, seats, self.width)).reshape(-1, self.width)
        back = jnp.concatenate([back, jnp.zeros((1, self.width), back.dtype)])[at]
        return (back * best[..., None]).sum(1).reshape(x.shape)


class ExpertModel(nn.Module):
    """A mixture of experts in each layer."""

    layer: Callable[[], nn.Module] = Experts
    width: int = EMBED

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, self.width)(tokens)
        for _ in range(LAYERS):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS)(h, mask=nn.make_causal_mask(tokens))
            x = x + self.layer()(nn.LayerNorm()(x))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def own_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()


@dataclass(frozen=True)
class Case:
    """A model, and how often a tensor axis reduces streams of which length."""

    build: Any
    loss: Callable[..., Any]
    reduced: dict[int, int]
    leaves: tuple[str, ...] = ("inputs", "targets")
    positions: int = SEQ
    layers: int = LAYERS
    attentions: int = 1  # of a layer; a T5's decoder has two, and its encoder another
    on_a_stage: int = 1  # layers of the fullest of four
    shape: tuple[int, int] = (ROWS, SEQ)
    devices: str = "h100:8"
    embed: int = EMBED
    under: Sequence[str] = ()  # plans, where they are not the usual ones

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        if self.leaves == ("images", "labels"):
            images, labels = ((self.shape[0], IMAGE, IMAGE, 3), np.float32), (self.shape[:1], np.int32)
            return {name: jax.ShapeDtypeStruct(*each) for name, each in zip(self.leaves, (images, labels), strict=True)}
        return {name: jax.ShapeDtypeStruct(self.shape, np.int32) for name in self.leaves}

    @property
    def plans(self) -> Sequence[str]:
        usual = ("data=1",) if self.devices == "h100:1" else WIDE_PLANS if self.embed == WIDE else PLANS
        return [f"{plan} precision=bfloat16" for plan in self.under or usual]


def of(kind: Any, config: Any) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: kind(config, rngs=rngs)


def chunked(whole: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(whole, chunk=CHUNK)


PUBLISHED: dict[str, Any] = {"gpt2-xl": gpt("gpt2-xl"), "bert-large": bert("bert-large"), "vit-l16": vit("vit-l16")}
MODELS = {
    "gpt": Case(of(GPT, GPTConfig(**SIZES, context=SEQ)), chunked(loss), {SEQ: 4 * LAYERS + 2}),
    # Its head is worth two layers: stages have three, three, two and none.
    "head": Case(
        of(GPT, GPTConfig(**SIZES | {"num_layers": 8, "vocab_size": 8192}, context=SEQ)), chunked(loss),
        {SEQ: 4 * 8 + 2}, layers=8, on_a_stage=3,
    ),
    "bert": Case(of(BERT, BERTConfig(**SIZES, context=SEQ)), chunked(masked_loss), {SEQ: 4 * LAYERS + 2}),
    "t5": Case(
        of(T5, T5Config(**SIZES, num_decoder_layers=LAYERS, head_dim=32)), chunked(t5_loss),
        {SEQ: 10 * LAYERS + 4}, ("inputs", "targets", "source"), attentions=3,
    ),
    "llama": Case(
        of(Llama, LlamaConfig(**SIZES, num_kv_heads=HEADS, head_dim=32, context=SEQ)), chunked(llama_loss),
        {SEQ: 4 * LAYERS + 2},
    ),
    "vit": Case(
        of(ViT, ViTConfig(LAYERS, HEADS, EMBED, mlp_dim=4 * EMBED, image_size=IMAGE)), vit_loss,
        {197: 4 * LAYERS, 196: 1}, ("images", "labels"), 197,
    ),
    # Its attention stands beside its other products, reads what they read, and is added to what they make.
    "own": Case(OwnModel(), own_loss, {SEQ: 2 * LAYERS + 2}),
    "experts": Case(ExpertModel(), own_loss, {SEQ: 4 * LAYERS + 2}),
    "sent": Case(ExpertModel(SentExperts), own_loss, {SEQ: 4 * LAYERS + 2}),
} | {
    how: Case(ExpertModel(functools.partial(ExpertsOfAll, how)), own_loss, {SEQ: 4 * LAYERS + 2})
    for how in ("einsum", "seats", "choosing", "sorted")
} | {
    "wide gpt": Case(
        of(GPT, GPTConfig(**WIDE_SIZES, context=LONG)), loss, {LONG: 4 * LAYERS + 2}, shape=(ROWS, LONG), embed=WIDE
    ),
    "wide bert": Case(
        of(BERT, BERTConfig(**WIDE_SIZES, context=LONG)), masked_loss, {LONG: 4 * LAYERS + 2}, shape=(ROWS, LONG),
        embed=WIDE,
    ),
    "wide t5": Case(
        of(T5, T5Config(**WIDE_SIZES, num_decoder_layers=LAYERS, head_dim=128)), t5_loss, {LONG: 10 * LAYERS + 4},
        ("inputs", "targets", "source"), shape=(ROWS, LONG), embed=WIDE, attentions=3,
    ),
    "wide llama": Case(
        of(Llama, LlamaConfig(**WIDE_SIZES, num_kv_heads=16, head_dim=128, context=LONG)), llama_loss,
        {LONG: 4 * LAYERS + 2}, shape=(ROWS, LONG), embed=WIDE,
    ),
    "wide vit": Case(
        of(ViT, ViTConfig(LAYERS, 16, WIDE, mlp_dim=4 * WIDE, image_size=IMAGE)), vit_loss,
        {197: 4 * LAYERS}, ("images", "labels"), 197, shape=(64, IMAGE), embed=WIDE,
    ),
    "wide own": Case(OwnModel(WIDE), own_loss, {LONG: 2 * LAYERS + 2}, shape=(ROWS, LONG), embed=WIDE),
    "wide sorted": Case(
        ExpertModel(functools.partial(ExpertsOfAll, "sorted", WIDE), WIDE), own_loss, {LONG: 4 * LAYERS + 2},
        shape=(ROWS, LONG), embed=WIDE,
    ),
    "gpt3-6.7b": Case(
        of(GPT, gpt("gpt3-6.7b")), loss, {2048: 4 * 32 + 2}, layers=32, shape=(ROWS, 2048), embed=4096,
        under=LARGE_PLANS,
    ),
    "gpt2-xl": Case(of(GPT, PUBLISHED["gpt2-xl"]), loss, {}, shape=(8, 1024), devices="h100:1"),
    "bert-large": Case(of(BERT, PUBLISHED["bert-large"]), masked_loss, {}, shape=(16, 512), devices="h100:1"),
    "vit-l16": Case(
        of(ViT, PUBLISHED["vit-l16"]), vit_loss, {}, ("images", "labels"), shape=(64, IMAGE), devices="h100:1"
    ),
}  # fmt: skip


# Weights of layers, by their names; of a mixture's, attention and experts.
LAYER = re.compile(r"(blocks|encoder|decoder|OwnLayer|Experts|ExpertsOfAll|MultiHeadDotProductAttention)[/_]\d")


def formula(case: Case, plan: str, params: Sequence[tuple[str, int]]) -> float | None:
    """Bytes that a device receives, of eight; None for one by itself."""
    if case.devices == "h100:1":
        return None
    low = 2 if "bfloat16" in plan else 4
    share, whole = 7 / 8, sum(size for _, size in params)
    layers = sum(size for path, size in params if LAYER.search(path))
    if plan.startswith("tensor"):
        return (
            2 * share * low * sum(times * case.shape[0] * length * case.embed for length, times in case.reduced.items())
        )
    if found := re.fullmatch(r"data=8 expert=(\d)( precision=\w+)?", plan):
        size, mine = int(found[1]), sum(size for path, size in params if re.search(r"/(up|gate|down)$", path))
        seats = 4 * LAYERS * ROWS / 8 * 8 * SEATS * EMBED
        reduced = share * (whole - mine) + (1 - size / 8) * mine / size
        return low * (2 * reduced + (size - 1) / size * seats) if case is MODELS["sent"] else None
    if "expert" in plan:
        return None
    if plan.startswith("data=8"):
        return 2 * share * low * whole
    if plan.startswith("zero=3/4"):
        return low * (3 / 4 * (2 * whole + layers) + 2 * 1 / 2 * whole / 4)
    if plan.startswith("zero"):
        return share * low * (2 * whole + (layers if plan.startswith("zero=3") else 0))
    if "pipeline" in plan:
        if case.leaves == MODELS["t5"].leaves:
            return None  # two stacks go round twice
        ticks, stream = 4 + 2 * (4 - 1), ROWS / 2 / 4 * case.positions * EMBED
        mine, outside = layers / case.layers * case.on_a_stage, whole - layers
        return low * ticks * 2 * stream + 4 * mine + (4 * (3 / 4 + 1 / 4) + low * 3 / 4) * outside
    held = ROWS * math.ceil(case.positions / 8) * EMBED * case.layers * case.attentions
    if "ring" in plan:
        return low * ((7 + 7 + 8) * 2 * held + 2 * share * whole)
    if "all_to_all" in plan:
        return low * (share * 8 * held + 2 * share * whole)
    return None


def row(name: str, plan: str, parts: int = 0) -> dict[str, Any]:
    """What the step of a model does under a plan, compiled for H100s."""
    case = MODELS[name]
    program = cjax.parallelize(case.build, case.loss, optax.adamw(1e-3), case.batch, plan, devices=case.devices)
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    facts: Audit = audit(compiled, program.mesh)
    times = described(facts, hardware_of(list(program.mesh.devices.flat)))
    shapes = jax.tree_util.tree_flatten_with_path(program._composed.capture.params_shape)[0]
    params = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.size) for path, leaf in shapes]
    kinds: dict[str, float] = {}
    for each in facts.collectives:
        key = f"{each.kind} {each.axis} {each.dtype}"
        kinds[key] = kinds.get(key, 0.0) + each.total_bytes / 2**20
    wanted = formula(case, plan, params)
    return {
        "model": name, "plan": plan, "jax": jax.__version__, "MiB": round(facts.moved() / 2**20, 2),
        "ratio": None if wanted is None else round(facts.moved() / wanted, 3),
        "transfer ms": round(1e3 * times["transfer_s"], 3), "exposed ms": round(1e3 * times["exposed_s"], 3),
        "float32": round(facts.flops_float32 / max(facts.flops, 1.0), 4),
        "GiB touched": round((facts.bytes_accessed or math.nan) / 2**30, 2),
        "GFLOP": round(facts.flops / 1e9, 1),
        "MiB beside the state": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
        **counted(compiled, parts),
        "moved": {key: round(amount, 2) for key, amount in sorted(kinds.items()) if amount >= 0.05},
    }  # fmt: skip


def counted(compiled: jax.stages.Compiled, parts: int) -> dict[str, Any]:
    """What kernels do, by their own count, and the `parts` groups of them that take longest without multiplying."""
    found = kernels(compiled.as_text() or "")
    others = [each for each in found if not each.flops]
    largest: dict[str, float] = {}
    for each in others:
        group = re.sub(r"[._\d]+$", "", each.name) + " " + each.op_name.rsplit("/", 1)[-1]
        largest[group] = largest.get(group, 0.0) + 1e3 * each.seconds
    ordered = sorted(largest.items(), key=lambda item: -item[1])[:parts]
    return {
        "launches": sum(each.count for each in found),
        "matmul ms": round(1e3 * sum(each.seconds for each in found if each.flops), 2),
        "other ms": round(1e3 * sum(each.seconds for each in others), 2),
        **({"of these": {group: round(took, 2) for group, took in ordered}} if parts else {}),
    }


def by_hand(name: str, unrolled: bool, parts: int = 0) -> dict[str, Any]:
    """The step of a published model in plain JAX."""
    case, config = MODELS[name], PUBLISHED[name]
    given = ByHand(name.split("-")[0].rstrip("2"), config, case.shape[1], case.shape[0], case.shape[0])
    devices = resolve_devices(case.devices)
    whole = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
    layers = config.num_layers if unrolled else 1
    start, step = in_jax.train(given, low=True, remat="dots", unroll=layers, on_gpu=True)
    state, batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        (jax.eval_shape(start, jax.random.key(0)), given.shapes(given.batch)),
    )
    compiled = compile_lowered(jax.jit(step, donate_argnums=0).lower(state, batch), devices)
    return {
        "model": name, "plan": f"by hand, {'unrolled' if unrolled else 'scanned'}", "jax": jax.__version__,
        "MiB beside the state": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
        **counted(compiled, parts),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--plans", nargs="+", help="by default all that the formulas are of; data=1 of published models"
    )
    parser.add_argument("--by-hand", action="store_true", help="published models in plain JAX as well")
    parser.add_argument(
        "--parts", type=int, default=0, help="kernels that do not multiply, those that take most: how many"
    )
    parser.add_argument("--log", type=Path, help="a file that rows are added to")
    options = parser.parse_args(arguments)
    made = [
        functools.partial(row, name, plan, options.parts)
        for name in options.models
        for plan in options.plans or MODELS[name].plans
        # Keys that padding masks by example go round no ring; the formula is of causal attention.
        if not (name in ("bert", "t5") and "ring" in plan)
    ]
    if options.by_hand:
        published = [name for name in options.models if name in PUBLISHED]
        made += [functools.partial(by_hand, name, each, options.parts) for name in published for each in (False, True)]
    rows = []
    for make in made:
        try:
            rows.append(make())
        except ValueError as error:  # micro-batches of a mixture, of which each would have seats of its own
            print(f"{make.args[:2]} refused: {error}", flush=True)
            continue
        print(json.dumps(rows[-1]), flush=True)
        if options.log:
            with options.log.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
