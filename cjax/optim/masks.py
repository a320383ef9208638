"""Which parameters a rule applies to: by path, by a function, or all that are neither a norm nor a bias."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

PyTree: TypeAlias = Any  # `cjax.tree` has the same; this room imports nothing of the house
Mask = str | Callable[[PyTree], PyTree] | PyTree

# What Flax and others call the parameters of norms and biases. Shapes don't tell: the bias of an attention's query is
# [heads, head_dim], and a stack of norms [layers, embed].
NOT_WEIGHTS = re.compile(r"(^|/)(bias|scale|gain|gamma|beta|offset|b|[a-z_]*bias)$")


def path_names(tree: PyTree) -> list[str]:
    """The path of each leaf, such as `blocks/0/mlp/kernel`, in the order of `jax.tree.leaves`.

    >>> path_names({"dense": {"kernel": 1, "bias": 2}})
    ['dense/bias', 'dense/kernel']
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value") for path in paths]


def weights_only(params: PyTree) -> PyTree:
    """True for kernels and embeddings, False for norms, biases, and whatever has one dim or none.

    The default of `lamb` and `lars`, for decay and for the trust ratio, as both papers' own code has it.

    Args:
      params: a tree of arrays, or of anything that `jnp.ndim` takes.

    >>> import numpy as np
    >>> weights_only({"dense": {"kernel": np.ones((3, 4)), "bias": np.ones(4)}})
    {'dense': {'bias': False, 'kernel': True}}
    """
    chosen = [
        jnp.ndim(leaf) > 1 and not NOT_WEIGHTS.search(name)
        for name, leaf in zip(path_names(params), jax.tree.leaves(params), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), chosen)


def everything(params: PyTree) -> PyTree:
    """True for every parameter."""
    return jax.tree.map(lambda _: True, params)


def chosen(mask: Mask, what: str) -> Callable[[PyTree], PyTree]:
    """A mask as a function of the parameters, for optax's `mask` arguments.

    Args:
      mask: a regex that is searched for in each path, a function of the tree, or a tree of bools.
      what: the argument's name, for the error.

    Raises:
      ValueError: when called, if the mask matches nothing.

    >>> chosen("kernel", "mask")({"kernel": 1, "bias": 2})
    {'bias': False, 'kernel': True}
    """
    pattern = re.compile(mask) if isinstance(mask, str) else None

    def choose(params: PyTree) -> PyTree:
        if pattern is not None:
            found = [bool(pattern.search(name)) for name in path_names(params)]
            tree = jax.tree.unflatten(jax.tree.structure(params), found)
        else:
            tree = mask(params) if callable(mask) else mask
        if mask is not weights_only and not any(jax.tree.leaves(tree)):
            some = ", ".join(path_names(params)[:4])
            raise ValueError(
                f"{what}={mask!r} matches none of the parameters, which are such as {some}. "
                f'Give a regex of such paths ("kernel|embedding"), or leave {what} out for all but norms and biases.'
            )
        return tree

    return choose
