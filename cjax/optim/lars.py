"""LARS."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cjax.optim.checks import check_learning_rate
from cjax.optim.masks import Mask, PyTree, chosen, weights_only
from cjax.optim.trust import Split, SplitDim, layer_norm, need_params, safe_ratio, scale_layers, split_dims

COLOSSAL_CLIP = 50.0  # the greatest trust ratio of Colossal-AI's rule
COLOSSAL_LIMIT = 10.0  # of each number of its decayed gradient


def lars(
    learning_rate: float | optax.Schedule,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    trust_coefficient: float = 1e-3,
    eps: float = 0.0,
    *,
    nesterov: bool = False,
    mask: Mask = weights_only,
    adapt: Mask | None = None,
    trust_clip: tuple[float, float] = (0.0, math.inf),
    split: Split | None = None,
    colossal_compat: bool = False,
) -> optax.GradientTransformation:
    r"""Momentum, each layer with a rate of its own.

    r = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + eps), 1 where ||w|| or ||g|| is 0;
    v <- momentum v + learning_rate r (g + weight_decay w);  w <- w - v.

    Args:
      learning_rate: a number above 0, or a schedule. The papers' are large, 1 to 30, since r is small.
      momentum: decay of v.
      weight_decay: added to the gradient.
      trust_coefficient: eta, the part of a layer that a step of rate 1 may be.
      eps: added to the denominator.
      nesterov: look ahead by one step of momentum.
      mask: which parameters are decayed: a regex of paths, a function of the tree, or a tree of bools. All but norms
        and biases by default.
      adapt: which have a rate of their own; as `mask` by default. The others take `learning_rate` as it is.
      trust_clip: least and greatest r.
      split: parameters that hold several layers; see `scale_by_trust_ratio`.
      colossal_compat: Colossal-AI's rule: every parameter is decayed and has its own r, at most 50; each number of
        g + weight_decay w is clipped to [-10, 10]; and the present r and rate scale v as a whole.

    Raises:
      ValueError: a rate of 0 or below; a mask or a split that matches nothing (at `init`).

    >>> import jax.numpy as jnp
    >>> tx = lars(1.0, weight_decay=0.0)
    >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    >>> grads = {"kernel": jnp.full((2, 2), 5.0), "bias": jnp.ones(2)}
    >>> tx.update(grads, tx.init(params), params)[0]["kernel"][0]
    Array([-0.001, -0.001], dtype=float32)

    You et al., "Large Batch Training of Convolutional Networks", 2017, arXiv:1708.03888.
    """
    check_learning_rate(learning_rate)
    rate = optax.scale_by_learning_rate(learning_rate)
    if colossal_compat:
        return optax.chain(_scale_by_colossal_lars(momentum, weight_decay, trust_coefficient, eps), rate)
    is_decayed, is_adapted = chosen(mask, "mask"), chosen(mask if adapt is None else adapt, "adapt")

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        params = need_params(params)

        def scaled(g: jax.Array, w: jax.Array, decays: bool, adapts: bool, dim: SplitDim) -> jax.Array:
            decay = weight_decay if decays else 0.0
            step = g + decay * w if decay else g
            if not adapts:
                return step
            ratio = _ratio(g, w, decay, trust_coefficient, eps, trust_clip, dim)
            return scale_layers(step, ratio, dim)

        trees = is_decayed(params), is_adapted(params), split_dims(params, split)
        return jax.tree.map(scaled, updates, params, *trees), state

    def init(params: PyTree) -> optax.EmptyState:
        for check in (is_decayed, is_adapted, lambda tree: split_dims(tree, split)):
            check(params)  # what matches nothing is refused before anything runs
        return optax.EmptyState()

    layers = optax.GradientTransformation(init, update)
    return optax.chain(layers, rate, optax.trace(momentum, nesterov))


def _ratio(
    g: jax.Array, w: jax.Array, decay: float, coefficient: float, eps: float, clip: tuple[float, float], dim: SplitDim
) -> jax.Array:
    weight, grad = layer_norm(w, dim), layer_norm(g, dim)
    # 0 for a gradient of 0 whatever the decay, which is then the whole step.
    length = jnp.where(grad == 0, 0, grad + decay * weight + eps)
    return safe_ratio(coefficient * weight, length, clip)


def _scale_by_colossal_lars(
    momentum: float, weight_decay: float, coefficient: float, eps: float
) -> optax.GradientTransformation:
    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        params = need_params(params)
        steps = jax.tree.map(
            lambda g, w: jnp.clip(g + weight_decay * w, -COLOSSAL_LIMIT, COLOSSAL_LIMIT), updates, params
        )
        trace = jax.tree.map(lambda v, d: momentum * v + d, state.trace, steps)

        def scaled(v: jax.Array, g: jax.Array, w: jax.Array) -> jax.Array:
            one = SplitDim()
            return scale_layers(v, _ratio(g, w, weight_decay, coefficient, eps, (0.0, COLOSSAL_CLIP), one), one)

        return jax.tree.map(scaled, trace, updates, params), optax.TraceState(trace)

    return optax.GradientTransformation(optax.trace(momentum).init, update)
