"""What is trained: `wrt` as a question about one leaf."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cjax.tree import PyTree, leaf_names

# What is trained: a regex on paths, a function of a path and a leaf, one of NNX's filters, or None for all.
Wrt = object


def is_path_rule(wrt: Wrt) -> bool:
    """Whether `wrt` speaks of paths (a regex, a function) rather than being one of NNX's filters."""
    is_filter = isinstance(wrt, type) or type(wrt).__module__.startswith("flax.")
    return isinstance(wrt, str) or (callable(wrt) and not is_filter)


def matcher(wrt: Wrt) -> Callable[[str, PyTree], bool]:
    """`wrt` as a function of a leaf's path and the leaf. None accepts every leaf."""
    if wrt is None:
        return lambda path, leaf: True
    if not is_path_rule(wrt):
        raise TypeError(f"`wrt` is {wrt!r}: pass a regex on the path, `(path, leaf) -> bool`, or for NNX a filter.")
    if isinstance(wrt, str):
        try:
            pattern = re.compile(wrt)
        except re.error as error:
            raise ValueError(f"`wrt` = {wrt!r} is not a regular expression: {error}.") from error
        return lambda path, leaf: pattern.search(path) is not None
    assert callable(wrt)
    return lambda path, leaf: bool(wrt(path, leaf))


def check_trained(wrt: Wrt, params_shape: PyTree, frozen_shape: PyTree) -> None:
    """Raises ValueError if nothing is trained, or something that has no gradient."""
    if not jax.tree.leaves(params_shape):
        if wrt is None:
            raise ValueError(
                "The model has no parameters to train: create them with self.param (Linen), or as nnx.Param (NNX)."
            )
        names = leaf_names(frozen_shape)
        some = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise ValueError(f"`wrt` = {wrt!r} matches no parameter. The parameters are: {some or 'none'}.")
    for name, leaf in zip(leaf_names(params_shape), jax.tree.leaves(params_shape), strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(f"Parameter {name} has dtype {leaf.dtype} and can't be trained: leave it out with `wrt`.")
