"""Functions traced once and replayed, without what their results do not depend on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from cjax.jax_compat.core import jaxpr_as_fun, make_jaxpr
from cjax.jax_compat.jaxprs import live
from cjax.tree import PyTree, leaf_names

Key = jax.Array


@dataclass(frozen=True)
class Replay:
    """A function of arrays, traced.

    Args:
        shapes: its result, as `jax.ShapeDtypeStruct`s.
        used: for each argument, whether the result depends on it.
        run: the result's leaves, from the arguments that are used.
        leaks: whether some of it was made within a loop, and is known there alone.
    """

    shapes: PyTree
    used: list[bool]
    run: Callable[..., list[jax.Array]]
    leaks: bool = False

    def __call__(self, *args: jax.Array) -> PyTree:
        leaves = self.run(*[arg for arg, use in zip(args, self.used, strict=True) if use])
        return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)


def trace_live(function: Callable[..., PyTree], args: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Replay:
    """Traces `function(*args)`, where args are arrays or shapes, and leaves out dead equations and arguments."""
    closed, shapes = make_jaxpr(function, return_shape=True)(*args)
    needed, used = live(closed)
    return Replay(shapes, used, jaxpr_as_fun(needed), any(isinstance(x, core.Tracer) for x in needed.consts))


def replayed(make: Callable[[Key, PyTree], PyTree], batch: PyTree) -> tuple[Callable[[Key], PyTree], PyTree]:
    """`init(key)` and its shapes, from a function that builds the model and runs the loss.

    Running a model's Python is the slow part of tracing, so `init` replays what the first trace left behind, without
    the loss: what only the loss needs is dead there, and the batch usually with it.
    """
    leaves, treedef = jax.tree.flatten(batch)
    batch_shape = jax.tree.leaves(jax.eval_shape(lambda batch: batch, batch))
    traced: dict[np.dtype, Replay] = {}

    def trace(dtype: np.dtype) -> Replay:
        args = [jax.ShapeDtypeStruct((), dtype), *batch_shape]

        def made(key: Key, *leaves: jax.Array) -> PyTree:
            return make(key, treedef.unflatten(leaves))

        replay = trace_live(made, args)
        if replay.leaks:  # a module that is first called within a loop; one that Python runs hands out what it makes
            with jax.disable_jit():
                replay = trace_live(made, args)
        if replay.leaks:
            raise ValueError(
                "The model makes its parameters within a loop of JAX's (scan, while_loop), where they can't be had: "
                "call it once before the loop, as in `model(batch)`."
            )
        if any(replay.used[1:]):
            missing = [n for n, x in zip(leaf_names(batch), leaves, strict=True) if isinstance(x, jax.ShapeDtypeStruct)]
            if missing:
                raise ValueError(
                    f"The model's initial values depend on the data, and {', '.join(missing)} has only a shape. "
                    "Pass a batch of arrays."
                )
        return replay

    default = jax.eval_shape(lambda: jax.random.key(0)).dtype
    traced[default] = trace(default)
    shapes = traced[default].shapes

    def init(key: Key) -> PyTree:
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        if key.dtype not in traced:
            traced[key.dtype] = trace(key.dtype)
        trees = traced[key.dtype](key, *leaves)
        # Metadata made anew in each trace (an initializer written as a lambda) must not make two treedefs of one.
        return jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(trees))

    return init, shapes
