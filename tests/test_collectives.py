"""What a step moves between devices, read from the program that XLA compiles for eight H100s."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
import zoo
import zoo_linen
from plans import tensor_of

import cjax
from cjax.audit import Audit, Collective, audit
from cjax.mesh import compile_lowered
from cjax.models.gpt import GPT, gpt, loss
from cjax.planner.hardware import hardware_of

pytestmark = pytest.mark.aot

LAYERS, EMBED, FFN, VOCAB, SEQ, BATCH = 4, 256, 1024, 1024, 128, 16
SIZES = gpt("gpt-mini", num_layers=LAYERS, embed_dim=EMBED, num_heads=8, vocab_size=VOCAB, context=SEQ)
OUTSIDE = (2 * VOCAB + SEQ) * EMBED  # parameters of the Linen decoder that are in no layer: embedding, positions, head
STREAM = BATCH * SEQ * EMBED * 4  # bytes of what one layer hands to the next, in float32


@pytest.fixture(autouse=True, scope="module")
def wide_zoo() -> Iterator[None]:
    """The zoo's models in sizes that XLA's GPU compiler tiles, and that tell the dims apart by bytes."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"EMBED": EMBED, "FFN": FFN, "VOCAB": VOCAB, "HEADS": 8, "SEQ": SEQ}
        for name, size in sizes.items():
            patch.setattr(zoo_linen, name, size)
        yield


@dataclasses.dataclass(frozen=True)
class Compiled:
    facts: Audit
    data: int  # devices that split the batch
    num_params: int


@functools.cache
def compiled(model: str, plan: str) -> Compiled:
    shape = (BATCH, SEQ)
    if model == "gpt":
        tokens = jax.ShapeDtypeStruct(shape, np.int32)
        net, objective, batch = (lambda rngs: GPT(SIZES, rngs=rngs)), loss, {"inputs": tokens, "targets": tokens}
    else:
        net = zoo_linen.LinenDecoder(LAYERS, 0.0)
        objective, batch = zoo.next_token, {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), np.int32)}
    program = cjax.parallelize(net, objective, optax.adamw(1e-3), batch, plan, devices="h100:8")
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    params: Any = program._composed.capture.params_shape
    return Compiled(facts, program.plan.data, sum(leaf.size for leaf in jax.tree.leaves(params)))


def received(whole_bytes: float, size: int, times: int = 1) -> float:
    """Bytes a device receives when an array is reduced to, or gathered from, shards; an all-reduce is both."""
    return times * whole_bytes * (size - 1) / size


# -- tensor parallelism -----------------------------------------------------------------------------------------------
@pytest.mark.full("data=1 tensor=8-8-gpt", "data=2 tensor=4-4-gpt", "data=2 tensor=4-4-linen_decoder")
@pytest.mark.parametrize("model", ["gpt", "linen_decoder"])
@pytest.mark.parametrize(("plan", "tensor"), [("data=1 tensor=8", 8), ("data=2 tensor=4", 4)])
def test_1d_moves_two_streams_a_layer_each_way(model: str, plan: str, tensor: int) -> None:
    """Megatron's count, and one more each for the embedding (forward) and the head (backward). Nothing else of that
    order: no gather, no logits."""
    result = compiled(model, plan)
    stream = STREAM // result.data
    large = [c for c in result.facts.select(axes=["tensor"]) if c.bytes >= stream / 4]
    assert {c.kind for c in large} == {"all-reduce"}
    assert sum(c.count for c in large) == 4 * LAYERS + 2
    inside = [c for c in large if "while" in c.op_name]
    forward = sum(c.count for c in inside if "transpose" not in c.op_name)
    assert (forward, sum(c.count for c in inside) - forward) == (2 * LAYERS, 2 * LAYERS)
    assert all(c.bytes == pytest.approx(received(stream, tensor, 2), rel=0.01) for c in large)
    small = sum(c.total_bytes for c in result.facts.select(axes=["tensor"]) if c not in large)
    assert small < 0.05 * stream, "softmax statistics of [batch, seq] and scalars"


@pytest.mark.full
def test_1d_with_data_reduces_each_gradient_once_over_data() -> None:
    result = compiled("linen_decoder", "data=2 tensor=4")
    whole = 4 * result.num_params
    split = whole / 4  # what is kept whole, norms and positions, is little
    assert result.facts.moved(axes=["data"]) == pytest.approx(received(split, 2, 2), rel=0.1)


# -- data parallelism and ZeRO ----------------------------------------------------------------------------------------
def test_data_parallelism_reduces_each_gradient_once() -> None:
    result = compiled("linen_decoder", "data=8")
    assert {c.kind for c in result.facts.collectives} == {"all-reduce"}
    assert result.facts.moved() == pytest.approx(received(4 * result.num_params, 8, 2), rel=0.02)


def test_layers_are_reduced_inside_the_backward_loop_where_it_is_hidden() -> None:
    result = compiled("linen_decoder", "data=8")
    in_loop = [c for c in result.facts.collectives if c.count == LAYERS]
    assert sum(c.total_bytes for c in in_loop) > 0.5 * result.facts.moved()
    assert all(c.is_async for c in in_loop)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_reduce_to_shards_and_gather_once(stage: int) -> None:
    result = compiled("linen_decoder", f"zero={stage}")
    whole = 4 * result.num_params
    assert result.facts.moved("reduce-scatter") == pytest.approx(received(whole, 8), rel=0.05)
    assert result.facts.moved("all-gather") == pytest.approx(received(whole, 8), rel=0.05)
    assert result.facts.moved("all-reduce") < 0.05 * received(whole, 8)


@pytest.mark.full("data=4 tensor=2 zero=2")
@pytest.mark.parametrize("plan", ["zero=1 remat=block", "data=4 tensor=2 zero=2"])
def test_layers_of_zero_1_and_2_move_their_weights_while_others_are_computed(plan: str) -> None:
    """Gathered once, in bfloat16, and scattered once; and of what is gathered six tenths or more have a product beside
    them, of what is scattered a third or more. Gathered ahead of all layers, 6 to 59 % would have; scattered when a
    layer's last gradient is made, 2 %."""
    config = gpt("gpt-mini", num_layers=6, embed_dim=2048, num_heads=16, vocab_size=1024, context=1024)
    tokens = jax.ShapeDtypeStruct((16, 1024), np.int32)
    program = cjax.parallelize(
        lambda rngs: GPT(config, rngs=rngs), loss, optax.adamw(1e-3), {"inputs": tokens, "targets": tokens},
        f"{plan} precision=bfloat16", devices="h100:8",
    )  # fmt: skip
    devices = list(program.mesh.devices.flat)
    facts = audit(compile_lowered(program.lower(), devices), program.mesh)
    whole = 2 * sum(leaf.size for leaf in jax.tree.leaves(program._composed.capture.params_shape))
    whole /= program.plan.tensor.size
    for kind in ("all-gather", "reduce-scatter"):
        moved = facts.select(kind, ["data"])
        total = sum(each.total_bytes for each in moved)
        assert total == pytest.approx(received(whole, program.plan.data), rel=0.05)
        exposed = sum(each.exposed_bytes(hardware_of(devices)) for each in moved) / total
        assert exposed < (0.4 if kind == "all-gather" else 0.7), kind


def test_zero_3_gathers_forward_and_backward_inside_the_loop() -> None:
    result = compiled("linen_decoder", "zero=3")
    whole, outside = 4 * result.num_params, 4 * OUTSIDE
    assert result.facts.moved("reduce-scatter") == pytest.approx(received(whole, 8), rel=0.05)
    # Layers twice; what stands outside of them is still there when the backward pass begins.
    wanted = received(whole - outside, 8, 2) + received(outside, 8)
    assert result.facts.moved("all-gather") == pytest.approx(wanted, rel=0.05)
    gathers = [c for c in result.facts.select("all-gather") if c.count == LAYERS]
    assert {"transpose" in c.op_name for c in gathers} == {True, False}
    assert sum(c.count for c in result.facts.select("reduce-scatter")) >= LAYERS


def test_zero_3_keeps_no_gathered_layer() -> None:
    """Temporary memory: a layer's weights at a time, not all of them."""
    whole = 4 * compiled("linen_decoder", "zero=3").num_params
    memory, plain = (compiled("linen_decoder", plan).facts.memory for plan in ("zero=3", "data=8"))
    assert memory is not None and plain is not None
    # One layer in four is gathered at the peak; were all of them kept so, next to nothing would be saved.
    assert plain.temporary - memory.temporary >= 0.6 * 7 / 8 * whole, "gradients at least are in parts"


PARTS = [("zero=1", 1 / 8), ("zero=2", 1 / 8), ("zero=3", 1 / 8), ("zero=2/4", 1 / 4)]


@pytest.mark.full("zero=1-0.125", "zero=2-0.125", "zero=2/4-0.25")
@pytest.mark.parametrize(("plan", "part"), PARTS)
def test_gradients_are_held_in_parts(plan: str, part: float) -> None:
    """4 bytes a parameter against 1/N of them, within 5 %, from temporary memory: all that differs between two plans.

    Of the layers, that is; at the peak a table of the vocabulary's gradient is still whole. Stage 1 need not hold
    parts, but nothing reads the whole, and XLA scatters what it reduces. Of one layer of four, under stage 3 weights
    are gathered, and from JAX 0.11 on gradients that wait to be scattered are whole.
    """
    result, plain = compiled("linen_decoder", plan), compiled("linen_decoder", "data=8")
    assert result.facts.memory is not None and plain.facts.memory is not None
    saved = plain.facts.memory.temporary - result.facts.memory.temporary
    layers = (result.num_params - OUTSIDE) * (3 / 4 if plan == "zero=3" or jax.__version_info__ >= (0, 11) else 1)
    assert saved >= 0.95 * (1 - part) * 4 * layers


@pytest.mark.full("zero=1 microbatches=2", "data=8 microbatches=2")
@pytest.mark.parametrize("plan", ["zero=1 microbatches=2", "zero=2 microbatches=2", "data=8 microbatches=2"])
def test_micro_batches_are_reduced_once_at_the_end(plan: str) -> None:
    result = compiled("linen_decoder", plan)
    whole = 4 * result.num_params
    reduced = result.facts.moved("reduce-scatter") + result.facts.moved("all-reduce") / 2
    assert reduced == pytest.approx(received(whole, 8), rel=0.05)


@pytest.mark.full
def test_a_group_talks_to_its_members_more_than_to_others() -> None:
    result = compiled("linen_decoder", "zero=3/4")
    whole = 4 * result.num_params
    assert result.facts.moved("all-gather", axes=["data"]) == 0
    assert result.facts.moved(axes=["data"]) == pytest.approx(received(whole / 4, 2, 2), rel=0.1)


@pytest.mark.full
def test_tied_embeddings_are_reduced_once() -> None:
    """A table that is looked up and multiplied has two gradients, which each device adds up before all reduce."""
    result = compiled("gpt", "data=8")
    assert result.facts.moved() == pytest.approx(received(4 * result.num_params, 8, 2), rel=0.02)


@pytest.mark.full
def test_bfloat16_halves_what_zero_3_gathers() -> None:
    wide, low = (compiled("linen_decoder", plan).facts for plan in ("zero=3", "zero=3 precision=bfloat16"))
    assert low.moved("all-gather") == pytest.approx(0.5 * wide.moved("all-gather"), rel=0.1)


@pytest.mark.full("sequence=ring:4 zero=1", "pipeline=1f1b:2 microbatches=2")
@pytest.mark.parametrize(
    "plan", ["tensor=4 sequence=gather", "sequence=ring:4 zero=1", "pipeline=1f1b:2 microbatches=2"]
)
def test_no_product_of_low_precision_has_an_operand_in_float32(plan: str) -> None:
    """Grids are asked where their bytes are."""
    facts = compiled("linen_decoder", f"{plan} precision=bfloat16").facts
    assert facts.flops > 0 and facts.flops_float32 == 0, str(facts)


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt", "linen_decoder"])
def test_a_ring_puts_positions_in_order_once(model: str) -> None:
    """Keys and values go round in both passes, their gradients round and home; beside that, tokens alone move."""
    facts = compiled(model, "data=1 sequence=ring:8").facts
    assert facts.moved("collective-permute") == pytest.approx(LAYERS * (7 + 7 + 8) * 2 * STREAM / 8, rel=0.001)


# -- 2D, 2.5D and 3D --------------------------------------------------------------------------------------------------
# A layer of GPT-3's width, 16,384 tokens at a time.
WIDE, WIDE_HEADS, WIDE_VOCAB, WIDE_LAYERS, WIDE_BATCH, WIDE_SEQ = 8192, 64, 51200, 4, 64, 256
TOKENS = WIDE_BATCH * WIDE_SEQ
# Features in, and those out of each weight that shares them: queries, keys and values; their way out; up; down.
LINEARS = [(WIDE, (WIDE,) * 3), (WIDE, (WIDE,)), (WIDE, (4 * WIDE,)), (4 * WIDE, (WIDE,))]
GRIDS = ["tensor=2d:4", "tensor=2.5d:8/2", "tensor=3d:8", "tensor=2d:16", "tensor=2.5d:64/4", "tensor=3d:64"]


@functools.cache
def grid_facts(plan: str, **sizes: int) -> tuple[Audit, Sequence[jax.Device]]:
    """Of a GPT under a plan that leaves data parallelism no devices; `sizes` are others than those above."""
    of = dict(h=WIDE, heads=WIDE_HEADS, vocab=WIDE_VOCAB, layers=WIDE_LAYERS, batch=WIDE_BATCH, seq=WIDE_SEQ) | sizes
    config = gpt(
        "gpt-mini", num_layers=of["layers"], embed_dim=of["h"], num_heads=of["heads"], vocab_size=of["vocab"],
        context=of["seq"],
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((of["batch"], of["seq"]), np.int32)
    program = cjax.parallelize(
        lambda rngs: GPT(config, rngs=rngs), loss, optax.adamw(1e-3), {"inputs": tokens, "targets": tokens}, plan,
        devices=f"h100:{num_devices(plan)}",
    )  # fmt: skip
    devices = list(program.mesh.devices.flat)
    return audit(compile_lowered(program.lower(), devices), program.mesh), devices


def num_devices(plan: str) -> int:
    mode, side, depth = tensor_of(plan)
    return depth * side ** {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[mode]


def linear_elements(plan: str, k: int, ns: Sequence[int]) -> float:
    """Elements a device receives for X [tokens, k] times weights [k, n], and all gradients, by design.md's table; X is
    moved once for all of them."""
    mode, side, depth = tensor_of(plan)
    x, w, y = TOKENS * k, k * sum(ns), TOKENS * sum(ns)
    if mode == "3d":
        return (side - 1) / side**3 * (3 * x + 3 * w + 2 * y)
    return 3 * (side - 1) / side**2 * (x / depth + w) + 2 * (depth - 1) / depth * w / side**2


def table_elements(plan: str) -> float:
    """Of a tied table, which lies as the classifier needs it: gathered to be looked up, its gradient scattered, and
    both taken to where the other use has them."""
    mode, side, depth = tensor_of(plan)
    size = WIDE_VOCAB * WIDE
    if mode == "3d":
        return size * (2 * (side - 1) / side**2 + 2 * (side - 1) / side**3 + 2 / side**3)
    return size * (2 * (side - 1) + 2 + 2 * (depth - 1) / depth) / side**2


def elements(collectives: Sequence[Collective]) -> float:
    """Received in a step."""
    return sum(c.total_bytes * math.prod(c.shapes[0].dims) / c.shapes[0].bytes for c in collectives)


def reason(c: Collective, mode: str) -> str:
    """What a collective of a GPT on a grid is for."""
    features, batch = (("j", "k"), ("i", "j", "k")) if mode == "3d" else (("col",), ("depth", "row"))
    is_large = math.prod(c.shapes[0].dims) >= WIDE * WIDE // 64
    part_of_product = c.kind in ("all-gather", "reduce-scatter") or c.axes == ("depth",)
    if part_of_product and "while" in c.op_name:
        return "linears"
    if c.kind == "all-gather" and c.shapes[0].dtype == "s32":
        return "tokens, to be looked up by the devices that have their rows of the table"
    if is_large and (part_of_product or c.kind == "collective-permute"):
        return "classifier and table"
    if c.kind == "all-reduce" and c.shapes[0].dtype == "f32" and set(c.axes) <= set(features):
        return "statistics of norms and of the softmax over the vocabulary"
    if c.kind == "all-reduce" and set(c.axes) <= set(batch):
        return "gradients of biases, norms and positions"
    if c.kind == "all-reduce" and max(shape.bytes for shape in c.shapes) < 1024:
        return "loss and norm of the gradient"
    if mode == "3d" and c.kind == "collective-permute" and set(c.axes) <= set(features):
        return "statistics, from where the vocabulary leaves the batch to where the embedding does"
    return "unexplained"


@pytest.mark.full(*GRIDS[1:])
@pytest.mark.parametrize("plan", GRIDS)
def test_a_grid_moves_its_linears_and_little_else(plan: str) -> None:
    """The layers of a transformer, by the formulas of its linears; the classifier and the table, once a step; and what
    has no formula, a hundredth of that."""
    facts, _ = grid_facts(f"{plan} precision=bfloat16")
    assert facts.flops_float32 == 0, str(facts)
    by_reason: dict[str, list[Collective]] = {}
    for c in facts.collectives:
        by_reason.setdefault(reason(c, tensor_of(plan)[0]), []).append(c)
    assert not by_reason.get("unexplained")
    layers = sum(linear_elements(plan, k, ns) for k, ns in LINEARS)
    assert 0.95 * WIDE_LAYERS * layers <= elements(by_reason.pop("linears")) <= 1.01 * WIDE_LAYERS * layers
    # The two uses of a tied table, their gradients added up in float32 at the classifier's.
    ends = linear_elements(plan, WIDE, (WIDE_VOCAB,)) + table_elements(plan)
    assert elements(by_reason.pop("classifier and table")) <= 1.01 * ends
    rest = {why: elements(those) for why, those in by_reason.items()}
    assert sum(rest.values()) <= 0.01 * WIDE_LAYERS * layers, rest


@pytest.mark.full(*GRIDS[1:3])
@pytest.mark.parametrize("plan", GRIDS[:3])
def test_a_grid_moves_while_it_multiplies(plan: str) -> None:
    """Of the time that transfers inside the layers take, at most 35 % has no work beside it."""
    facts, devices = grid_facts(f"{plan} precision=bfloat16")
    hardware = hardware_of(devices)

    def seconds(received: float, c: Collective) -> float:
        return received / (c.bandwidth(hardware) or math.nan)

    inside = [c for c in facts.collectives if "while" in c.op_name]
    exposed = sum(seconds(c.exposed_bytes(hardware), c) for c in inside)
    assert 0 < exposed <= 0.35 * sum(seconds(c.total_bytes, c) for c in inside)


MANY = dict(h=1024, heads=16, vocab=2048, layers=8)  # layers, so that one of them with all it gathers is little


@pytest.mark.full
@pytest.mark.parametrize("plan", GRIDS[:3])
def test_a_grid_splits_activations_over_all_its_devices(plan: str) -> None:
    """Temporary memory: 1/q^2 of one device's in 2d, 1/(d q^2) in 2.5d and 1/l^3 in 3d, and 20 % for one layer's
    operands, which are gathered while they are used (22 % in 3d, where all else is least). One device loops over its
    layers as they do: compiled one by one, which is what it does by itself, they need less."""
    one, split = (grid_facts(each, **MANY)[0].memory for each in ("tensor=1 unroll=none", plan))
    assert one is not None and split is not None
    assert split.temporary <= 1.22 * one.temporary / num_devices(plan)
