"""Mixtures whose tokens are sorted by expert, under plans: as their authors train them, and what a device holds."""

import collections
import math
import os
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import SUBJECTS, assert_trained_alike
from mixtures import Dropless, Scattered, Sorted
from zoo import BATCH, TEXT, case, linen, next_token
from zoo_linen import EMBED, FFN, SEQ, MoEDecoder

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.sharding.products import blocks

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
SUBJECTS |= {
    "dropless": case("linen", linen(MoEDecoder, 0, Dropless), next_token, **TEXT, blocks=(3,)),
    "sorted": case("linen", linen(MoEDecoder, 0, Sorted), next_token, **TEXT, blocks=(3,)),
    "scattered": case("linen", linen(MoEDecoder, 0, Scattered), next_token, **TEXT, blocks=(3,)),
}
PAIRS = [
    ("dropless", "tensor=4 zero=3"),
    ("dropless", "tensor=2 sequence=ring:2 remat=block"),
    ("sorted", "tensor=2d:4"),
    ("scattered", "tensor=4 microbatches=2"),
]
MORE = [
    *(("dropless", f"tensor={size}") for size in (2, 4, 8)),
    *(("dropless", f"tensor=2 zero={stage}") for stage in (1, 2)),
    ("dropless", "data=8"),
    ("dropless", "data=8 zero=3 remat=block"),
    ("dropless", "tensor=2 zero=1/2 remat=dots"),
    ("dropless", "tensor=2 microbatches=2"),
    ("dropless", "tensor=2 microbatches=2 loss=microbatch"),
    ("dropless", "tensor=2 pipeline=1f1b:2 microbatches=4"),
    ("dropless", "data=4 pipeline=gpipe:2 microbatches=2 zero=1"),
    ("scattered", "data=4 tensor=2 microbatches=2"),
    ("dropless", "tensor=2 sequence=gather"),
    ("dropless", "tensor=2 sequence=all_to_all:2"),
    ("dropless", "tensor=2d:4"),
    ("dropless", "tensor=2.5d:8/2"),
    ("dropless", "tensor=3d:8"),
    ("dropless", "tensor=2 unroll=layers"),
    ("dropless", "tensor=4 overlap=2 microbatches=2"),
    ("sorted", "data=8 microbatches=2 loss=microbatch"),
    ("dropless", "data=2 tensor=4"),
    ("scattered", "data=2 tensor=4"),
    ("scattered", "tensor=2 zero=3 remat=block"),
    ("sorted", "tensor=4"),
    ("sorted", "tensor=2 zero=3 remat=block"),
    ("sorted", "tensor=3d:8"),
    ("sorted", "sequence=ring:4"),
]


@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *MORE] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


@pytest.mark.full("data=8")
@pytest.mark.parametrize("plan", ["data=8", "tensor=4 zero=1"])
def test_trains_as_its_author_would_in_blocks(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are too few for it, were copies of weights not free."""
    monkeypatch.setattr(blocks, "COPY", 0)
    monkeypatch.setattr(blocks, "TILE", 8)
    blocks.block_length.cache_clear()
    SUBJECTS["blocks"] = SUBJECTS["dropless"]
    assert_trained_alike("blocks", plan)
    blocks.block_length.cache_clear()


def program_of(plan: str, mixture: Any = Dropless, **given: Any) -> Any:
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, SEQ + 1), np.int32)}
    return cjax.parallelize(MoEDecoder(0, mixture), next_token, optax.sgd(0.1), batch, plan, **given)


def test_a_device_has_its_features_of_every_expert() -> None:
    """Gate and value, packed in one weight, are split as if they were two. Of biases a device has those of its
    features; so few that are the stream's stay whole, as what scores experts does."""
    rows = program_of("data=2 tensor=4").report().params
    found = {row.name: 4 * row.bytes_per_device / row.bytes for row in rows if row.name.startswith("Dropless_")}
    split = {"both": 1, "down": 1, f"bias_{2 * FFN}": 1, f"bias_{EMBED}": 4, "Dense_0/kernel": 4}
    assert {name.split("/", 1)[1]: share for name, share in found.items()} == split
    dims = {row.name.split("/", 1)[1]: row.dims for row in rows if row.name.startswith("Dropless_")}
    assert dims["both"] == ("experts", "embed", "ffn")


def test_devices_sort_their_own_rows() -> None:
    """Nothing of tokens and their rows goes from one to another. Of a token's two rows the sum is reduced over the
    tensor axis, and gradients of weights over the data axis."""
    program = program_of("data=2 tensor=4")
    facts = audit(program.lower().compile(), program.mesh)
    moved = [(each, shape.dims) for each in facts.collectives for shape in each.shapes if math.prod(shape.dims) > 4096]
    rows = (BATCH * SEQ, EMBED)
    count = collections.Counter[Any]()
    for each, dims in moved:
        count[each.kind, *each.axes, dims] += each.count
    assert not [key for key in count if key[:2] != ("all-reduce", "data")]
    assert ("all-reduce", "tensor", rows) not in count


def test_sorted_tokens_are_multiplied_in_half_precision() -> None:
    """As all other products are."""
    text = program_of("zero=3 precision=bfloat16").lower().as_text()
    found = re.findall(r"dot_general.*: \((tensor<[^)]*)\) ->", text)
    assert any("<4x40x2x64xbf16>" in operands for operands in found)
    assert not [operands for operands in found if "f32" in operands]


def test_on_one_device_gradients_of_rows_in_order_are_looked_up() -> None:
    """Where XLA would add them to zeros, in an order that changes; those of the table of words are added up still."""
    program = program_of("data=1", devices=jax.devices()[:1])
    batch = {"tokens": np.random.default_rng(0).integers(0, 50, (BATCH, SEQ + 1), dtype=np.int32)}
    state = program.init(0)
    assert program.check(state, batch).ok
    scattered = re.findall(r"stablehlo.scatter.*?\) -> tensor<([^>]*)>", program.lower().as_text(), re.DOTALL)
    assert f"{BATCH * SEQ}x{EMBED}xf32" not in scattered and f"{2 * BATCH * SEQ}x{EMBED}xf32" not in scattered
    assert any(shape.endswith(f"x{EMBED}xf32") for shape in scattered)


@pytest.mark.aot
def test_tokens_are_rounded_before_they_are_put_in_order() -> None:
    """Of those gathered and of their gradients' sums nothing is in float32, on GPUs."""
    program = program_of("data=8 precision=bfloat16", Sorted, devices="h100:8")
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    found = {
        (each.kind, str(shape.dtype))
        for each in facts.collectives for shape in each.shapes if shape.dims == (BATCH * SEQ, EMBED)
    }  # fmt: skip
    assert {("all-gather", "bf16")} <= found and not [kind for kind, dtype in found if dtype == "f32"]


def test_products_of_sorted_tokens_are_saved_where_products_are() -> None:
    """Scores of attention are made again, and no product of experts."""
    none, dots, block = (
        audit((program := program_of(f"tensor=8 remat={each}")).lower().compile(), program.mesh).flops
        for each in ("none", "dots", "block")
    )
    experts = 3 * 3 * 2 * (2 * BATCH * SEQ) * EMBED * FFN / 8  # of three layers, of all features of one of four
    assert none < dots < none + experts < block


@pytest.mark.aot
@pytest.mark.full
def test_what_two_products_were_given_has_one_gradient_reduced_in_half_precision() -> None:
    """By gate and value of each expert, on GPUs."""
    program = program_of("tensor=8 precision=bfloat16", Sorted, devices="h100:8")
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    found = [
        (each.count, str(shape.dtype))
        for each in facts.collectives for shape in each.shapes if shape.dims == (BATCH * SEQ, EMBED)
    ]  # fmt: skip
    assert found == [(3, "bf16"), (3, "bf16")]
