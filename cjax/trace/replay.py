"""A model's initializer: traced once, replayed without what only the loss needs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from cjax.tree import leaf_names

PyTree = Any
Key = jax.Array
Trees = tuple[PyTree, PyTree, PyTree]


def replayed(make: Callable[[Key, PyTree], Trees], batch: PyTree) -> tuple[Callable[[Key], Trees], Trees]:
    """`init(key)` and its shapes, from a function that builds the model and runs the loss.

    Running a model's Python is the slow part of tracing, so `init` replays what the first trace left behind, without
    the loss: what only the loss needs is dead there, and the batch usually with it.
    """
    treedef = None

    def flat(key: Key, batch: PyTree) -> list[Any]:
        nonlocal treedef
        leaves, treedef = jax.tree.flatten(make(key, batch))
        return leaves

    batch_shape = jax.eval_shape(lambda batch: batch, batch)
    traced: dict[Any, Callable[[Key], list[jax.Array]]] = {}

    def trace(key: Any) -> list[jax.ShapeDtypeStruct]:
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(jax.ShapeDtypeStruct((), key.dtype), batch_shape)
        num_batch = len(closed.jaxpr.invars) - 1
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(shapes), [True] + [False] * num_batch)
        values = _batch_values(batch, used[1:])
        run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
        traced[key.dtype] = lambda key: run(key, *values)
        return shapes

    shapes = trace(jax.eval_shape(lambda: jax.random.key(0)))
    shape_treedef = treedef
    assert shape_treedef is not None

    def init(key: Key) -> Trees:
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        if key.dtype not in traced:
            trace(key)
        return shape_treedef.unflatten(traced[key.dtype](key))

    return init, shape_treedef.unflatten(shapes)


def _batch_values(batch: PyTree, used: list[bool]) -> list[jax.Array]:
    leaves = [leaf for leaf, use in zip(jax.tree.leaves(batch), used, strict=True) if use]
    missing = [
        name
        for name, leaf in zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if leaves and missing:
        raise ValueError(
            f"The model's initial values depend on the data, and {', '.join(missing)} has only a shape. "
            "Pass a batch of arrays."
        )
    return leaves
