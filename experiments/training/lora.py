"""Low-rank adapters in a model that is there already: put in, trained by `wrt=nnx.LoRAParam`, merged back.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cjax.models import Llama

LAYERS = ("query", "key", "value", "out", "gate", "up", "down")


class AdaptedLinear(nnx.LinearGeneral):
    """A linear layer with its own kernel W, as x W + alpha / rank x A B. B starts at zero, so it starts as it was.

    The kernel keeps its path, so that weights by name go to the same place with and without adapters.
    """

    def __init__(self, linear: nnx.LinearGeneral, rank: int, alpha: float, *, rngs: nnx.Rngs):
        super().__init__(
            linear.in_features, linear.out_features, axis=linear.axis, use_bias=linear.use_bias, dtype=linear.dtype,
            kernel_init=nnx.initializers.zeros, rngs=rngs,
        )  # fmt: skip
        self.kernel, self.bias = linear.kernel, linear.bias
        self.scale = alpha / rank
        self.lora = nnx.LoRA(math.prod(self.in_features), rank, math.prod(self.out_features), rngs=rngs)

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        flat = x.reshape(*x.shape[: x.ndim - len(self.in_features)], -1)
        added = (self.scale * self.lora(flat)).reshape(*flat.shape[:-1], *self.out_features)
        return super().__call__(x, out_sharding) + added

    def merged(self) -> jax.Array:
        """The kernel of the layer without an adapter that gives the same."""
        low_rank = self.lora.lora_a[...] @ self.lora.lora_b[...]
        return self.kernel[...] + self.scale * low_rank.reshape(self.kernel.shape)


def adapt(model: Llama, rank: int, alpha: float, layers: Collection[str] = LAYERS, *, rngs: nnx.Rngs) -> Llama:
    """Puts an adapter into each of the `layers` of every block, in place.

    Args:
        model: a Llama, with weights or as a builder makes it.
        rank: of the product A B.
        alpha: scales it, by alpha / rank.
        layers: of `LAYERS`.
        rngs: a `params` stream, for A.

    >>> from cjax.models import llama
    >>> model = adapt(Llama(llama("llama-mini", num_layers=1), rngs=nnx.Rngs(0)), 4, 8, ["query"], rngs=nnx.Rngs(1))
    >>> sorted("/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    ['blocks/0/attention/query/lora/lora_a', 'blocks/0/attention/query/lora/lora_b']
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; write at least 1, such as 8")
    if unknown := [name for name in layers if name not in LAYERS] or not layers:
        raise ValueError(f"there is no layer {unknown} to adapt; write some of {', '.join(LAYERS)}")
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name in [name for name in layers if hasattr(part, name)]:
                setattr(part, name, AdaptedLinear(getattr(part, name), rank, alpha, rngs=rngs))
    return model


def merge(model: Llama) -> Llama:
    """A Llama without adapters that computes the same; `model` stays as it is."""
    kernels = {path: part.merged() for path, part in nnx.iter_modules(model) if isinstance(part, AdaptedLinear)}
    graph, _ = nnx.split(nnx.eval_shape(lambda: Llama(model.config, rngs=nnx.Rngs(0))))
    flat = []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.LoRAParam))):
        is_adapted = path[-1] == "kernel" and path[:-1] in kernels
        value = kernels[path[:-1]] if is_adapted else jnp.asarray(variable[...])
        flat.append((path, variable.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(flat))
