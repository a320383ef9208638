"""The parts of transformers in NumPy, float64, one row at a time: what the models are checked against."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Array = np.ndarray


def generic(build: Callable[[], nnx.Module], size: float = 0.3) -> Any:
    """The model with no parameter zero or one, so that none can be left out unseen; its own init is not compiled."""
    graph, state = nnx.split(nnx.eval_shape(build))
    rng = np.random.default_rng(3)

    def value(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        middle = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(middle + size * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(value, state))


def read(variable: Any) -> Array:
    return np.asarray(variable[...], np.float64)


def linear(layer: Any, x: Array) -> Array:
    """A Linear or LinearGeneral: all dimensions of x that its kernel consumes, the last ones."""
    kernel = read(layer.kernel)
    consumed = next(n for n in range(1, kernel.ndim) if kernel.shape[:n] == x.shape[x.ndim - n :])
    y = np.tensordot(x, kernel, axes=consumed)
    return y if layer.bias is None else y + read(layer.bias)


def layer_norm(layer: Any, x: Array, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return scaled * read(layer.scale) + read(layer.bias)


def rms_norm(layer: Any, x: Array, epsilon: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * read(layer.scale)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def tanh_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(query: Array, key: Array, value: Array, scale: float, bias: Any = 0.0, seen: Any = None) -> Array:
    """[queries, heads, width] for queries, one head and one query at a time.

    Args:
        bias: [heads, queries, keys], added to the scores.
        seen: bool[queries, keys]; all when None.
    """
    bias = np.broadcast_to(bias, (query.shape[1], len(query), len(key)))
    mixed = np.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        for t in range(len(query)):
            scores = np.exp(key[:, head // group] @ query[t, head] * scale + bias[head, t])
            scores = scores if seen is None else scores * seen[t]
            mixed[t, head] = scores / scores.sum() @ value[:, head // group]
    return mixed


def log_probabilities(logits: Array) -> Array:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def mean_loss(logits: Array, labels: Array) -> float:
    """Mean cross-entropy over the labels that are not -100."""
    picked = np.take_along_axis(log_probabilities(logits), np.maximum(labels, 0)[..., None], -1)[..., 0]
    return -picked[labels != -100].mean()
