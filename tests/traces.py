"""Traces of plain functions, read as the traces of a model and its loss are: nothing is compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.trace.reading import Leaf, Trace, Traced, read
from cjax.tree import leaf_names

KINDS = ("params", "frozen", "model_state", "batch", "key", "index")


def plain_trace(function: Callable[..., Any], **trees: Any) -> Trace:
    """The trace of `function(params, frozen, model_state, batch, key, index) -> (loss, aux, new model_state)`.

    Trees that are left out are empty; arrays, or shapes, are the leaves of the others.
    """
    trees = {kind: trees.get(kind, {}) for kind in KINDS[:4]}
    trees |= {"key": jax.eval_shape(lambda: jax.random.key(0)), "index": jax.ShapeDtypeStruct((), jnp.int32)}
    closed, (loss, aux, _) = jax.make_jaxpr(function, return_shape=True)(*trees.values())
    leaves = [
        Leaf(name or kind, kind, tuple(leaf.shape), leaf.dtype)
        for kind, tree in trees.items()
        for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    ]
    return read(Traced(closed, tuple(leaves), len(jax.tree.leaves(loss)), aux), {})


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that are all different, as wide as the shape says."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


# -- layers, written as functions: no two dims are of one size --------------------------------------------------------
ROWS, FEATURES, WIDTH, HIDDEN, DEPTH = 5, 7, 4, 6, 3
Weights = dict[str, Any]


def weights(depth: int = DEPTH, seed: int = 0) -> list[Weights]:
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return [{name: numbers(*shape, seed=seed + i) for name, shape in shapes.items()} for i in range(depth)]


def stacked(layers: list[Weights]) -> Weights:
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


def hidden(x: Any, layer: Weights) -> Any:
    return jnp.tanh(x @ layer["up"]) @ layer["down"]


def ends(**more: Any) -> dict[str, Any]:
    """Parameters around the layers, and others."""
    return {"in": numbers(FEATURES, WIDTH), "out": numbers(WIDTH), **more}


BATCH = {"x": numbers(ROWS, FEATURES)}
