"""A stranger on one device as its author would have it: Flax, JAX and the loss, and nothing of cjax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from strangers.common import Stranger

from cjax.tree import PyTree


def widened(tree: PyTree) -> PyTree:
    """float64 in the place of float32, where JAX is told to have it."""

    def widen(leaf: Any) -> Any:
        if leaf.dtype != jnp.float32 or not jax.config.jax_enable_x64:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float64)
        return leaf.astype(jnp.float64)

    return jax.tree.map(widen, tree)


def unsettled(tree: PyTree) -> PyTree:
    """Every weight moved a little: as they are born, zeros (of gates, last layers, biases) leave gradients at zero."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(1)
    moved = [leaf + jnp.asarray(0.05 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(treedef, moved)


def parts_of(batch: PyTree, number: int) -> list[PyTree]:
    """Micro-batch i of m is rows i, i + m, ..."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i::number], batch) for i in range(number)]


def value_and_grad(stranger: Stranger, params: PyTree, model_state: PyTree, parts: int) -> tuple[np.ndarray, PyTree]:
    """The loss and every gradient of the batch, or their means over batches of its parts."""
    run = jax.jit(jax.value_and_grad(_linen(stranger) if isinstance(stranger.model, nn.Module) else _nnx(stranger)))
    found = [run(params, model_state, rows) for rows in parts_of(stranger.batch, parts)]
    return jax.tree.map(lambda *leaves: np.mean([np.asarray(leaf) for leaf in leaves], axis=0), *found)


def narrow_floats(stranger: Stranger, params: PyTree, model_state: PyTree) -> bool:
    """Whether its author fixed a precision below float64 somewhere, so that rounding must be allowed for."""
    loss = _linen(stranger) if isinstance(stranger.model, nn.Module) else _nnx(stranger)
    text = str(jax.make_jaxpr(loss)(params, model_state, stranger.batch))
    return any(kind in text for kind in (":f32[", ":bf16[", ":f16[", ":c64["))


def _linen(stranger: Stranger) -> Any:
    def loss(params: PyTree, model_state: PyTree, batch: PyTree) -> Any:
        run = nn.apply(stranger.loss, stranger.model, mutable=list(model_state))
        return run({"params": params, **model_state}, batch, rngs={"dropout": jax.random.key(0)})[0]

    return loss


def _nnx(stranger: Stranger) -> Any:
    def loss(params: PyTree, model_state: PyTree, batch: PyTree) -> Any:
        graph = nnx.split(stranger.model, nnx.Param, ...)[0]
        return stranger.loss(nnx.merge(graph, params, model_state, copy=True), batch)

    return loss
