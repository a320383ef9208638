"""What attention over a sequence axis costs: no matrix of scores, bytes that move, blocks that are computed."""

import math
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    ALONE,
    QKV,
    B,
    D,
    H,
    S,
    V,
    mesh_of,
    our,
    split,
    values,
)
from jax.sharding import Mesh, PartitionSpec

import cjax
from cjax.trace.attention.bounds import bounds
from cjax.trace.attention.find import find_attentions
from cjax.trace.jaxpr.simplify import simplify


def compiled(function: Callable[..., Any], args: Any, mesh: Mesh, mode: str, gradients: bool) -> Any:
    run = split(function, args, mesh, mode)
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "sequence"))
    placed = [jax.device_put(x, sharding) for x in args]
    step = jax.grad(lambda *a: run(*a).sum(), (0, 1, 2)) if gradients else run
    return jax.jit(step, out_shardings=sharding).lower(*placed).compile()


@pytest.mark.full("causal-True")
@pytest.mark.parametrize("gradients", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", ["bidirectional", "causal", pytest.param("dropout", marks=pytest.mark.full), "packed"])
def test_no_matrix_of_scores(kind: str, gradients: bool) -> None:
    """The longest block of scores is S/P by S/P."""
    long = 96
    shapes = ((B, long, H, D), (B, long, H, D), (B, long, H, V))
    function = {
        "bidirectional": our(),
        "causal": our(causal=True),
        "dropout": our(dropout_rate=0.2, dropout_rng=jax.random.key(0), deterministic=False, broadcast_dropout=False),
        "packed": our(segment_ids=jnp.arange(B * long).reshape(B, long) // 20),
    }[kind]
    text = compiled(function, values(*shapes, dtype=np.float32), mesh_of(**ALONE), "ring", gradients).as_text()
    for dims in re.findall(r"\b(?:f32|pred|u32|s32)\[([\d,]+)\]", text):
        sizes = [int(size) for size in dims.split(",")]
        assert sum(size >= 24 for size in sizes) <= 2 and not (long in sizes and 24 in sizes), dims
        assert math.prod(sizes) <= max(B * H * 24 * 24, B * long * H), dims


def test_ring_moves_keys_and_values_once_each_way() -> None:
    mesh, size = mesh_of(**ALONE), 4
    key, value = B * S * H * D * 4, B * S * H * V * 4
    args = values(*QKV, dtype=np.float32)

    def moved(gradients: bool) -> float:
        found = cjax.audit(compiled(nn.dot_product_attention, args, mesh, "ring", gradients), mesh)
        assert {c.kind for c in found.collectives} == {"collective-permute"}
        return sum(c.total_bytes for c in found.collectives)

    there = (size - 1) / size * (key + value)
    assert moved(False) == there
    assert moved(True) == 2 * there + key + value  # and gradients go all the way round


def test_all_to_all_moves_a_part_of_each_operand() -> None:
    mesh, size = mesh_of(**ALONE), 4
    args = values(*QKV, dtype=np.float32)
    total = sum(B * S * H * depth * 4 for depth in (D, D, V, V))
    found = cjax.audit(compiled(nn.dot_product_attention, args, mesh, "all_to_all", False), mesh)
    assert {c.kind for c in found.collectives} == {"all-to-all"}
    assert sum(c.total_bytes for c in found.collectives) == (size - 1) / size**2 * total


def test_causal_order_shares_the_work() -> None:
    """In zigzag order every device computes as many blocks, and as many in each turn but the first."""
    args = values(*QKV, dtype=np.float32)
    closed = simplify(jax.make_jaxpr(our(causal=True))(*args))
    (found,), _ = find_attentions(closed.jaxpr.eqns, closed.jaxpr.outvars)
    size = 4
    above = bounds(found, 2 * size, 2 * size, ())
    chunks = [(device, 2 * size - 1 - device) for device in range(size)]
    for turn in range(size):
        work = [
            sum(not above[i, j] < -1000 for i in chunks[device] for j in chunks[(device - turn) % size])
            for device in range(size)
        ]
        assert work == [3 if turn == 0 else 2] * size


def test_empty_blocks_are_not_computed() -> None:
    """Keys that are hidden by their position may hold anything: no product with them is made."""
    args = values(*QKV, dtype=np.float32)
    spoiled = args[1].at[:, 12:].set(jnp.nan)
    run = jax.jit(split(our(causal=True), args, mesh_of(**ALONE), "ring"))
    out = run(args[0], spoiled, args[2].at[:, 12:].set(jnp.nan))
    np.testing.assert_allclose(out[:, :12], run(*args)[:, :12], rtol=1e-6)
    assert np.isnan(out[:, 12:]).all()
