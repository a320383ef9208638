"""The trust ratio: how far a layer may move, by the norm of its weights."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cjax.optim.masks import Mask, PyTree, chosen, path_names, weights_only

Split = Mapping[str, int | tuple[int, int]]


def scale_by_trust_ratio(
    *,
    mask: Mask = weights_only,
    trust_clip: tuple[float, float] = (0.0, math.inf),
    norm_clip: tuple[float, float] = (0.0, math.inf),
    split: Split | None = None,
) -> optax.GradientTransformation:
    r"""Scales the update u of each layer with weights w by r = clip(phi(||w||) / ||u||), phi a clip of its own.

    r is 1 where either norm is 0, so that a layer that starts at zero can leave it. Norms are of whole layers, whatever
    devices hold their parts.

    Args:
      mask: which parameters; the others' updates stay as they are. All but norms and biases by default.
      trust_clip: least and greatest r.
      norm_clip: least and greatest ||w|| that counts: the paper's gamma_l and gamma_u.
      split: parameters that hold several layers, by a regex of their path: `{"qkv/kernel": (1, 3)}` if dim 1 holds
        three of equal size, `{"blocks/": 0}` if each index of dim 0 is one. Each layer has its own r.

    Raises:
      ValueError: limits that leave nothing between them; a mask or a split that matches nothing, or does not divide.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_trust_ratio()
    >>> w, u = {"kernel": jnp.full((2, 2), 3.0)}, {"kernel": jnp.full((2, 2), 2.0)}
    >>> tx.update(u, tx.init(w), w)[0]["kernel"][0]
    Array([3., 3.], dtype=float32)

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019, arXiv:1904.00962.
    """
    for name, (low, high) in {"trust_clip": trust_clip, "norm_clip": norm_clip}.items():
        if not 0 <= low < high:
            raise ValueError(f"{name}=({low}, {high}) leaves nothing between; write 0 <= low < high, such as (0, 10)")
    is_scaled = chosen(mask, "mask")

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        params = need_params(params)

        def scaled(u: jax.Array, w: jax.Array, on: bool, dim: SplitDim) -> jax.Array:
            if not on:
                return u
            weight, step = jnp.clip(layer_norm(w, dim), *norm_clip), layer_norm(u, dim)
            return scale_layers(u, safe_ratio(weight, step, trust_clip), dim)

        return jax.tree.map(scaled, updates, params, is_scaled(params), split_dims(params, split)), state

    def init(params: PyTree) -> optax.EmptyState:
        for check in (is_scaled, lambda tree: split_dims(tree, split)):
            check(params)  # what matches nothing is refused before anything runs
        return optax.EmptyState()

    return optax.GradientTransformation(init, update)


def need_params(params: PyTree | None) -> PyTree:
    if params is None:
        raise ValueError("this optimizer looks at the parameters: give them, tx.update(grads, state, params)")
    return params


class SplitDim(tuple[int, ...]):
    """(dim, number of layers along it) of a parameter; () for one layer. A leaf, where a tuple would be a tree."""


def split_dims(params: PyTree, split: Split | None) -> PyTree:
    """For each parameter, which of its dims holds several layers.

    Raises:
      ValueError: a regex that matches nothing, or layers that do not divide the dim.
    """
    names, leaves = path_names(params), jax.tree.leaves(params)
    found = [SplitDim()] * len(leaves)
    for pattern, given in (split or {}).items():
        matches = [i for i, name in enumerate(names) if re.search(pattern, name)]
        if not matches:
            raise ValueError(f"split: no parameter's path matches {pattern!r}; they are such as {', '.join(names[:4])}")
        dim, parts = given if isinstance(given, tuple) else (given, None)
        for i in matches:
            shape = jnp.shape(leaves[i])
            if not -len(shape) <= dim < len(shape) or shape[dim] % (parts or 1):
                raise ValueError(
                    f"split {pattern!r}: {names[i]} is {list(shape)}, whose dim {dim} does not hold "
                    f"{parts or 'several'} layers; write (dim, number), such as {{{pattern!r}: (1, 3)}}"
                )
            found[i] = SplitDim((dim % len(shape), parts or shape[dim]))
    return jax.tree.unflatten(jax.tree.structure(params), found)


def layer_norm(x: jax.Array, dim: Sequence[int]) -> jax.Array:
    """The norm of each layer in `x`, [] or [layers]; sums are float32 at least."""
    x = jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if not dim:
        return jnp.sqrt(jnp.sum((x * x.conj()).real))
    rows = _by_layer(x, dim)
    return jnp.sqrt(jnp.sum((rows * rows.conj()).real, axis=[i for i in range(rows.ndim) if i != dim[0]]))


def scale_layers(x: jax.Array, factor: jax.Array, dim: Sequence[int]) -> jax.Array:
    """`x` times the factor of each of its layers, in its own dtype."""
    if not dim:
        return (x * factor).astype(x.dtype)
    rows = _by_layer(x, dim)
    each = factor.reshape([-1 if i == dim[0] else 1 for i in range(rows.ndim)])
    return (rows * each).astype(x.dtype).reshape(x.shape)


def _by_layer(x: jax.Array, dim: Sequence[int]) -> jax.Array:
    place, parts = dim
    return x.reshape(*x.shape[:place], parts, x.shape[place] // parts, *x.shape[place + 1 :])


def safe_ratio(weight: jax.Array, step: jax.Array, clip: tuple[float, float]) -> jax.Array:
    """`clip(weight / step)`, and 1 where either is 0."""
    is_zero = (weight == 0) | (step == 0)
    return jnp.where(is_zero, 1, jnp.clip(weight / jnp.where(is_zero, 1, step), *clip))
