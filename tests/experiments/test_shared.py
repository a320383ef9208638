"""Baselines of benchmarks are the same models as cjax's: same weights, same loss, same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from shared import plain_gpt
from tensor_modes import timed
from tensor_modes.models import Case

import cjax
from cjax.models.gpt import GPT, GPTConfig, loss
from cjax.tree import leaf_names

SIZES = plain_gpt.Sizes(num_layers=2, num_heads=4, embed=24, vocab=40, seq=10, batch=8)

LAYER = {
    "q": "attention/query/kernel", "k": "attention/key/kernel", "v": "attention/value/kernel",
    "q_bias": "attention/query/bias", "k_bias": "attention/key/bias", "v_bias": "attention/value/bias",
    "out": "attention/out/kernel", "out_bias": "attention/out/bias", "up": "mlp/up/kernel", "up_bias": "mlp/up/bias",
    "down": "mlp/down/kernel", "down_bias": "mlp/down/bias", "ln1_scale": "attention_norm/scale",
    "ln1_bias": "attention_norm/bias", "ln2_scale": "mlp_norm/scale", "ln2_bias": "mlp_norm/bias",
}  # fmt: skip


@pytest.mark.full
def test_the_baseline_is_the_same_model() -> None:
    config = GPTConfig(num_layers=2, num_heads=4, embed_dim=24, context=10, vocab_size=40)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 40, (8, 10), dtype=np.int32) for name in ("inputs", "targets")}
    program = cjax.parallelize(lambda rngs: GPT(config, rngs=rngs), loss, optax.adam(1e-3), batch, "data=2 tensor=4")
    state = program.init(0)
    params = program.params(state)
    named = dict(zip(leaf_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    step, held_shape, _ = plain_gpt.make_step(SIZES, mesh, zero=0)
    weights, opt = plain_gpt.fresh(held_shape)
    top = {"wte": "token_embed", "wpe": "position_embed", "norm_scale": "norm/scale", "norm_bias": "norm/bias"}
    for mine, theirs in top.items():
        theirs = theirs if "/" in theirs else f"{theirs}/embedding"
        weights[mine] = jax.device_put(named[theirs], weights[mine].sharding)
    for mine, theirs in LAYER.items():
        value = jnp.stack([named[f"blocks/{i}/{theirs}"] for i in range(2)])
        weights[mine] = jax.device_put(value, weights[mine].sharding)

    _, ours = program.step(state, batch)
    _, by_hand = step((weights, opt), batch)
    np.testing.assert_allclose(ours["loss"], by_hand["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours["grad_norm"], by_hand["grad_norm"], rtol=1e-5)


MODES = ["tensor=2d:4", "tensor=4", "tensor=2.5d:8/2", "tensor=3d:8"]


@pytest.mark.parametrize("plan", MODES)
@pytest.mark.full
def test_layers_by_gspmd_alone_are_the_same_layers(plan: str) -> None:
    case = Case("", "blocks", width=32, heads=4, layers=3, length=6, batch=8)
    batch = {"x": np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)}
    devices = jax.devices()[: 4 if ":4" in plan or plan == "tensor=4" else 8]
    program = cjax.parallelize(case.build, case.loss, optax.adam(1e-3), batch, plan, devices=devices)
    state = program.init(0)
    params = program.params(state)
    named = dict(zip(leaf_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))

    step, held_shape, batch_shape = timed.make_step(case, plan, devices, jnp.float32)
    weights, opt = timed.fresh(held_shape)
    for mine in weights:
        value = named["scale"] if mine == "scale" else np.stack([named[f"blocks/{i}/{LAYER[mine]}"] for i in range(3)])
        assert value.shape == weights[mine].shape
        weights[mine] = jax.device_put(value, weights[mine].sharding)
    placed = {"x": jax.device_put(batch["x"], batch_shape["x"].sharding)}

    _, ours = program.step(state, batch)
    _, alone = step((weights, opt), placed)
    np.testing.assert_allclose(ours["loss"], alone["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours["grad_norm"], alone["grad_norm"], rtol=1e-5)
