"""What each model's step moves between devices, in the program that XLA compiles for eight H100s."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import cjax
from cjax.audit import Audit, audit
from cjax.mesh import compile_lowered
from cjax.models import BERT, GPT, T5, Llama, ViT, llama_loss, loss, masked_loss, t5_loss, vit_loss
from cjax.models.bert import BERTConfig
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config
from cjax.models.vit import ViTConfig
from cjax.tree import leaf_names

pytestmark = pytest.mark.aot

CHUNK = 32  # positions of a row that are classified at a time
LAYERS, DECODER_LAYERS, EMBED, VOCAB, SEQ, SOURCE, ROWS = 4, 3, 256, 1024, 128, 64, 16
SIZES: dict[str, Any] = {"num_heads": 8, "embed_dim": EMBED, "mlp_dim": 1024}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": VOCAB, "num_layers": LAYERS}
TOKENS = {name: jax.ShapeDtypeStruct((ROWS, SEQ), np.int32) for name in ("inputs", "targets")}
IMAGES = {
    "images": jax.ShapeDtypeStruct((ROWS, 176, 176, 3), np.float32),
    "labels": jax.ShapeDtypeStruct((ROWS,), np.int32),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model; `reduced` are the lengths of [rows, length, embed] that 1d reduces in a step, with how often: Megatron's
    two a layer each way, three of a decoder that reads an encoder, and one at each end."""

    kind: Any
    config: Any
    loss: Any
    batch: Any
    reduced: dict[int, int]


def chunked(whole: Any) -> Any:
    return functools.partial(whole, chunk=CHUNK)


CASES = {
    "gpt": Case(GPT, GPTConfig(**TEXT, context=SEQ), chunked(loss), TOKENS, {SEQ: 4 * LAYERS + 2}),
    # What comes after a norm is read by queries, keys, values and the residual, whose gradient is whole.
    "bert": Case(BERT, BERTConfig(**TEXT, context=SEQ), chunked(masked_loss), TOKENS, {SEQ: 4 * LAYERS + 2}),
    "vit": Case(
        ViT, ViTConfig(LAYERS, 8, EMBED, mlp_dim=1024, image_size=176, patch_size=16, num_classes=1000), vit_loss,
        IMAGES, {122: 4 * LAYERS, 121: 1},
    ),
    "t5": Case(
        T5, T5Config(**TEXT, num_decoder_layers=DECODER_LAYERS, head_dim=32), chunked(t5_loss),
        {**TOKENS, "source": jax.ShapeDtypeStruct((ROWS, SOURCE), np.int32)},
        {SOURCE: 4 * LAYERS + 2, SEQ: 6 * DECODER_LAYERS + 2},
    ),
    "llama": Case(
        Llama, LlamaConfig(**TEXT, num_kv_heads=8, head_dim=32, context=SEQ), chunked(llama_loss), TOKENS,
        {SEQ: 4 * LAYERS + 2},
    ),
}  # fmt: skip


@functools.cache
def compiled(name: str, plan: str) -> tuple[Audit, int]:
    """What the step does, and how many bytes its parameters have."""
    case = CASES[name]
    build = lambda rngs: case.kind(case.config, rngs=rngs)  # noqa: E731
    program = cjax.parallelize(build, case.loss, optax.adamw(1e-3), case.batch, plan, devices="h100:8")
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    params: Any = program._composed.capture.params_shape
    return facts, sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def bytes_of(name: str, pattern: str) -> int:
    """Of the parameters whose path matches."""
    case = CASES[name]
    params = nnx.state(nnx.eval_shape(lambda: case.kind(case.config, rngs=nnx.Rngs(0))), nnx.Param)
    named = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    return sum(4 * leaf.size for path, leaf in named if re.search(pattern, path))


def received(whole: float, size: int, times: int = 1) -> float:
    """Bytes a device receives when an array is reduced to, or gathered from, shards; an all-reduce is both."""
    return times * whole * (size - 1) / size


TENSORS = [("data=1 tensor=8", 8), ("data=2 tensor=4", 4)]


@pytest.mark.full(
    *(f"{plan}-{tensor}-{name}" for plan, tensor in TENSORS for name in CASES if (tensor, name) != (4, "vit"))
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("plan", "tensor"), TENSORS)
def test_1d_reduces_streams_and_nothing_else(name: str, plan: str, tensor: int) -> None:
    facts, _ = compiled(name, plan)
    rows = ROWS * tensor // 8
    wanted = sum(times * 4 * rows * length * EMBED for length, times in CASES[name].reduced.items())
    assert facts.moved("all-reduce", ["tensor"]) == pytest.approx(received(wanted, tensor, 2), rel=0.02)
    assert facts.moved(axes=["tensor"]) - facts.moved("all-reduce", ["tensor"]) < 0.01 * wanted


@pytest.mark.full("bert", "llama")
@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_1d_reduces_bfloat16(name: str) -> None:
    """Gradients of one input of several weights too: Llama has two such in a layer."""
    facts, _ = compiled(name, "data=1 tensor=8 precision=bfloat16")
    wanted = sum(times * 2 * ROWS * length * EMBED for length, times in CASES[name].reduced.items())
    assert facts.moved("all-reduce", ["tensor"]) == pytest.approx(received(wanted, 8, 2), rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_data_parallelism_reduces_each_gradient_once(name: str) -> None:
    """That of a table too which is looked up, once or twice, and multiplied in a loop over positions."""
    facts, whole = compiled(name, "data=8")
    assert facts.moved("all-reduce") == facts.moved()
    # T5's relative biases too: of their tables, not of what was looked up in them for each pair of positions.
    assert facts.moved() == pytest.approx(received(whole, 8, 2), rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [1, 3])
def test_zero_scatters_gradients_and_gathers_weights(name: str, stage: int) -> None:
    """Weights once in stage 1; in stage 3 those of layers again in the backward pass."""
    facts, whole = compiled(name, f"zero={stage}")
    layers = bytes_of(name, r"(blocks|encoder|decoder)/\d") if stage == 3 else 0
    assert 0.97 * received(whole, 8) <= facts.moved("reduce-scatter") <= 1.01 * received(whole, 8)
    assert 0.97 * received(whole + layers, 8) <= facts.moved("all-gather") <= 1.01 * received(whole + layers, 8)
    assert facts.moved("all-reduce") <= 0.005 * whole


@pytest.mark.full("t5")
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_zero_in_groups_scatters_a_tied_table_in_them_first(name: str) -> None:
    """Then each part is reduced over the groups; nothing is over all devices but norms' scales, and the loss."""
    facts, whole = compiled(name, "data=8 zero=3/4")
    assert facts.moved("reduce-scatter", ["zero"]) == pytest.approx(received(whole, 4), rel=0.01)
    assert facts.moved() - facts.moved(axes=["zero"]) == pytest.approx(received(whole / 4, 2, 2), rel=0.03)
