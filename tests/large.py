"""Models of the sizes that matmuls of a GPU need, compiled for devices that need not be here: what a step then does."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import cjax
from cjax.audit import Audit, audit
from cjax.mesh import compile_lowered
from cjax.models.gpt import GPT, GPTConfig
from cjax.models.gpt import loss as gpt_loss
from cjax.planner.hardware import hardware_of
from cjax.program import Program

ROWS = 8


class Layer(nn.Module):
    """Pre-norm, its feed-forward part gated, and wider inside than a transformer's."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(16, use_bias=False)(nn.RMSNorm()(x))
        h = nn.RMSNorm()(x)
        return x + nn.Dense(self.width)(nn.silu(nn.Dense(5 * self.width)(h)) * nn.Dense(5 * self.width)(h))


class PostLayer(nn.Module):
    """Norms behind what is added, so that a residual passes them."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(16)(x))
        return nn.LayerNorm()(x + nn.Dense(self.width)(nn.gelu(nn.Dense(5 * self.width)(x))))


class Own(nn.Module):
    width: int
    layers: int
    layer: Any = Layer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = self.layer(self.width)(x)
        return nn.Dense(3)(x)


def squares(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"])).mean()


def program_of(name: str, plan: str, width: int, layers: int, length: int, devices: Any) -> Program:
    if name in ("own", "post"):
        batch: Any = {"x": jax.ShapeDtypeStruct((ROWS, length, width), jnp.float32)}
        model = Own(width, layers, PostLayer if name == "post" else Layer)
        return cjax.parallelize(model, squares, optax.adam(1e-3), batch, plan, devices=devices)
    config = GPTConfig(layers, 16, width, vocab_size=4096, context=length)
    batch = {each: jax.ShapeDtypeStruct((ROWS, length), jnp.int32) for each in ("inputs", "targets")}
    build = lambda rngs: GPT(config, rngs=rngs)  # noqa: E731
    return cjax.parallelize(build, gpt_loss, optax.adam(1e-3), batch, plan, devices=devices)


@functools.cache
def audited(name: str, plan: str, width: int, layers: int, length: int, devices: str) -> tuple[Audit, list[Any], str]:
    program = program_of(name, plan, width, layers, length, devices or jax.devices())
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    return audit(compiled, program.mesh), list(program.mesh.devices.flat), compiled.as_text() or ""


def waited_for(facts: Audit, devices: list[Any], axis: str = "") -> tuple[float, float]:
    """Seconds that a step's transfers (along an axis) take at the links' rate, and of these what nothing is beside."""
    hardware, transfer, exposed = hardware_of(devices), 0.0, 0.0
    for each in facts.collectives:
        if axis and each.axis != axis:
            continue
        bandwidth = each.bandwidth(hardware) or math.nan
        transfer += each.total_bytes / bandwidth
        exposed += each.exposed_bytes(hardware) / bandwidth
    return transfer, exposed
