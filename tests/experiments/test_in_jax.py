"""The rows of the benchmark of GPUs by hand in plain JAX: the same models as Flax's, to the last bias."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import in_jax, in_jax_weights
from benchmarks.models import ROWS, TINY, Row
from flax import nnx

from cjax.models.llama import frequencies
from cjax.models.t5 import RelativeBias

# Names of the layers' weights in cjax's models.
ATTENTION = {"q": "query", "k": "key", "v": "value", "out": "out"}
MLP = {"up": "up", "gate": "gate", "down": "down", "router": "router"}


def linear(name: str, layer: Any) -> dict[str, jax.Array]:
    if isinstance(layer, nnx.Param):
        return {name: layer[...]}
    found = {name: layer.kernel[...]}
    return found if layer.bias is None else found | {f"{name}_bias": layer.bias[...]}


def norm(name: str, layer: Any) -> dict[str, jax.Array]:
    found = {name: layer.scale[...]}
    return found if getattr(layer, "bias", None) is None else found | {f"{name}_bias": layer.bias[...]}


def stacked(blocks: Any) -> dict[str, jax.Array]:
    def one(block: Any) -> dict[str, jax.Array]:
        found = norm("norm1", block.attention_norm) | norm("norm2", block.mlp_norm)
        for mine, theirs in ATTENTION.items():
            found |= linear(mine, getattr(block.attention, theirs))
            if hasattr(block, "cross"):
                found |= linear(f"cross_{mine}", getattr(block.cross, theirs)) | norm("norm3", block.cross_norm)
        for mine, theirs in MLP.items():
            if hasattr(block.mlp, theirs):
                found |= linear(mine, getattr(block.mlp, theirs))
        return found

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(one, blocks))


def copied(row: Row, model: Any) -> dict[str, Any]:
    """Flax's weights in the layout of in_jax."""
    if row.kind == "vit":
        found: dict[str, Any] = {"layers": stacked(model.blocks)} | norm("norm", model.norm)
        found |= linear("patches", model.patch_embed) | linear("head", model.head)
        return found | {"first": model.class_token[...], "positions": model.position_embed[...]}
    found = {"embed": model.token_embed.embedding[...]}
    if row.kind == "t5":
        found |= norm("norm", model.decoder_norm) | norm("encoder_norm", model.encoder_norm)
        found |= {"encoder": stacked(model.encoder), "layers": stacked(model.decoder)}
        found |= {"encoder_relative": model.encoder_bias.table.embedding[...]}
        return found | {"relative": model.decoder_bias.table.embedding[...]}
    found["layers"] = stacked(model.blocks)
    if row.kind in ("llama", "mixture"):
        return found | norm("norm", model.norm) | ({} if row.config.tied else linear("head", model.head))
    found["positions"] = model.position_embed.embedding[...]
    if row.kind == "gpt":
        return found | norm("norm", model.norm)
    head = model.word_head
    found |= norm("norm", model.embed_norm) | linear("dense", head.dense) | norm("head_norm", head.norm)
    return found | {"types": model.type_embed.embedding[...], "head_bias": head.bias[...]}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_of_the_same_size(name: str) -> None:
    assert in_jax.num_params(ROWS[name]) == ROWS[name].config.num_params


@pytest.mark.full
@pytest.mark.parametrize("name", TINY)
def test_it_is_the_same_model(name: str) -> None:
    row = TINY[name]
    model, batch = row.build(nnx.Rngs(0)), row.batch_of(4, 0)
    # Biases and scales that are all zero or one would hide that one is missing.
    rng = np.random.default_rng(0)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda w: w + 0.05 * rng.standard_normal(w.shape, dtype=np.float32), state))
    weights = copied(row, model)
    sizes = jax.tree.map(lambda w: w.shape, weights)
    assert sizes == in_jax_weights.shapes(row) and in_jax.num_params(row) == row.config.num_params
    found = row.loss(model, batch)
    wanted = found[0] if name == "vit" else found  # the accuracy beside it
    value = jax.jit(lambda given: in_jax.loss_of(row, given, batch, jnp.float32))(weights)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)


def test_positions_are_those_of_the_large_rows() -> None:
    one, other = ROWS["llama-1b"], ROWS["t5-3b"]  # long wavelengths are stretched; distances go beyond the last bucket
    angles = np.arange(one.seq)[:, None] * frequencies(one.config).astype(np.float32)
    np.testing.assert_allclose(in_jax.rotary(one.config, one.seq), angles, rtol=1e-6)
    for both_ways in (True, False):
        bias = RelativeBias(dataclasses.replace(other.config, num_heads=1), both_ways, rngs=nnx.Rngs(0))
        bias.table.embedding[...] = jnp.arange(other.config.num_buckets, dtype=jnp.float32)[:, None]
        wanted = bias(jnp.arange(other.seq), jnp.arange(other.seq))[0, 0]
        np.testing.assert_array_equal(in_jax.relative(other.config, other.seq, both_ways), wanted)


@pytest.mark.full
@pytest.mark.parametrize("name", TINY if os.environ.get("CJAX_TEST_ALL") == "1" else ["vit"])
def test_a_step_in_bfloat16_learns(name: str) -> None:
    row = TINY[name]
    step, peak = in_jax.make_step(row, row.batch_of(4, 0))
    first = float(step())
    last = [float(step()) for _ in range(4)][-1]
    assert np.isfinite(first) and last < first and peak() >= 0
