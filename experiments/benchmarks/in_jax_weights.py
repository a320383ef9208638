"""The weights of `in_jax.py`: shapes, layers stacked on dim 0, and first values."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from .models import Row

Weights = dict[str, Any]
BIASED = ("gpt", "bert", "vit")


def shapes(row: Row) -> Weights:
    """Of every weight, those of layers stacked on dim 0."""
    config, kind, e = row.config, row.kind, row.config.embed_dim
    if kind == "vit":
        patch, classes = (config.patch_size, config.patch_size, 3), config.num_classes
        found: Weights = {"patches": (*patch, e), "patches_bias": (e,), "first": (e,), "positions": (row.tokens, e)}
        found |= {"norm": (e,), "norm_bias": (e,), "head": (e, classes), "head_bias": (classes,)}
        return found | {"layers": _layers(row, config.num_layers)}
    found = {"embed": (config.vocab_size, e), "norm": (e,), "layers": _layers(row, config.num_layers)}
    if not config.tied:
        found["head"] = (e, config.vocab_size)
    if kind in BIASED:
        found |= {"positions": (config.context, e), "norm_bias": (e,)}
    if kind == "bert":
        found |= {"types": (config.num_types, e), "dense": (e, e), "dense_bias": (e,), "head_norm": (e,)}
        found |= {"head_norm_bias": (e,), "head_bias": (config.vocab_size,)}
    if kind == "t5":
        table = (config.num_buckets, config.num_heads)
        found |= {"relative": table, "encoder_relative": table, "encoder_norm": (e,)}
        found |= {"encoder": found["layers"], "layers": _layers(row, config.decoder_layers, cross=True)}
    return found


def _layers(row: Row, count: int, cross: bool = False) -> Weights:
    config, e, h = row.config, row.config.embed_dim, row.config.num_heads
    d, k = getattr(config, "head_dim", None) or e // h, getattr(config, "num_kv_heads", h)
    f = config.mlp_dim or 4 * e
    attention = {"q": (e, h, d), "k": (e, k, d), "v": (e, k, d), "out": (h, d, e)}
    found = attention | {"norm1": (e,), "norm2": (e,), "up": (e, f), "down": (f, e)}
    if row.kind in BIASED:
        found |= {"q_bias": (h, d), "k_bias": (k, d), "v_bias": (k, d), "out_bias": (e,), "up_bias": (f,)}
        found |= {"down_bias": (e,), "norm1_bias": (e,), "norm2_bias": (e,)}
    if row.kind == "llama" or getattr(config, "gated", False):
        found["gate"] = (e, f)
    if row.kind == "mixture":
        x = config.num_experts
        found |= {"router": (e, x), "gate": (x, e, f), "up": (x, e, f), "down": (x, f, e)}
    if cross:
        found |= {f"cross_{name}": shape for name, shape in attention.items()} | {"norm3": (e,)}
    return {name: (count, *shape) for name, shape in found.items()}


def num_params(row: Row) -> int:
    return sum(math.prod(shape) for shape in jax.tree.leaves(shapes(row), is_leaf=lambda x: isinstance(x, tuple)))


def fresh(row: Row, key: jax.Array) -> Weights:
    """Small random numbers; ones for norms."""
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes(row), is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(paths))
    drawn = [
        jnp.ones(shape) if "norm" in path[-1].key and "bias" not in path[-1].key
        else 0.02 * jax.random.normal(each, shape)
        for each, (path, shape) in zip(keys, paths, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(tree, drawn)
