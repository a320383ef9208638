"""LAMB, and the rules that go by its name."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from cjax.optim.checks import check_choice, check_learning_rate
from cjax.optim.masks import Mask, PyTree, chosen, everything, weights_only
from cjax.optim.trust import Split, scale_by_trust_ratio

ColossalLamb = Literal["Lamb", "DistributedLamb", "FusedLAMB"]


def lamb(
    learning_rate: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    *,
    mask: Mask = weights_only,
    adapt: Mask | None = None,
    bias_correction: bool = True,
    trust_clip: tuple[float, float] = (0.0, math.inf),
    norm_clip: tuple[float, float] = (0.0, math.inf),
    split: Split | None = None,
    colossal_compat: ColossalLamb | None = None,
) -> optax.GradientTransformation:
    r"""Adam, each layer's step as long as a part of the layer.

    u = m / (sqrt(v) + eps) + weight_decay w, with Adam's moments m and v, debiased;
    w <- w - learning_rate (||w|| / ||u||) u.

    Args:
      learning_rate: a number above 0, or a schedule.
      b1, b2: decay of the two moments.
      eps: added to sqrt(v).
      weight_decay: inside of the ratio.
      mask: which parameters are decayed: a regex of paths, a function of the tree, or a tree of bools. All but norms
        and biases by default.
      adapt: which have a trust ratio; as `mask` by default. The others step as Adam does.
      bias_correction: whether the moments are debiased.
      trust_clip: least and greatest ratio.
      norm_clip: least and greatest ||w|| that counts.
      split: parameters that hold several layers; see `scale_by_trust_ratio`.
      colossal_compat: one of Colossal-AI's three rules in place of the paper's; `b1`, `b2`, `eps` and `weight_decay`
        keep their meaning, and every parameter is decayed and scaled, as there. "Lamb": moments are not debiased.
        "DistributedLamb": the rate is debiased, after the ratio. "FusedLAMB": gradients are clipped to a norm of 1,
        all together; moments are debiased, and without decay there is no ratio.

    Raises:
      ValueError: a rate of 0 or below, an unknown preset; a mask or a split that matches nothing (at `init`).

    >>> import jax.numpy as jnp
    >>> tx = lamb(0.01)
    >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    >>> grads = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    >>> tx.update(grads, tx.init(params), params)[0]["kernel"][0]
    Array([-0.01, -0.01], dtype=float32)

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019, arXiv:1904.00962.
    """
    check_learning_rate(learning_rate)
    if colossal_compat is not None:
        check_choice("colossal_compat", colossal_compat, get_args(ColossalLamb))
        return _colossal(colossal_compat, learning_rate, b1, b2, eps, weight_decay)
    moments = optax.scale_by_adam(b1, b2, eps) if bias_correction else _scale_by_raw_moments(b1, b2, eps)
    return optax.chain(
        moments,
        optax.add_decayed_weights(weight_decay, mask=chosen(mask, "mask")),
        scale_by_trust_ratio(
            mask=mask if adapt is None else adapt, trust_clip=trust_clip, norm_clip=norm_clip, split=split
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def _colossal(
    rule: ColossalLamb, learning_rate: float | optax.Schedule, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    ratio = scale_by_trust_ratio(mask=everything)
    rate = optax.scale_by_learning_rate(learning_rate)
    decay = optax.add_decayed_weights(weight_decay)
    if rule == "FusedLAMB":
        steps = [optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1, b2, eps), decay]
        return optax.chain(*steps, *([ratio] if weight_decay else []), rate)
    debias = [_debias_rate(b1, b2)] if rule == "DistributedLamb" else []
    return optax.chain(_scale_by_raw_moments(b1, b2, eps), decay, ratio, *debias, rate)


class MomentsState(NamedTuple):
    """Moving averages of gradients and of their squares, from zero."""

    mu: PyTree
    nu: PyTree


def _scale_by_raw_moments(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """m / (sqrt(v) + eps) of moments as they are: small at first, m more so than sqrt(v)."""

    def init(params: PyTree) -> MomentsState:
        return MomentsState(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, MomentsState]:
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu), MomentsState(mu, nu)

    return optax.GradientTransformation(init, update)


def _debias_rate(b1: float, b2: float) -> optax.GradientTransformation:
    """Scales by sqrt(1 - b2^t) / (1 - b1^t)."""
    return optax.scale_by_schedule(lambda count: jnp.sqrt(1 - b2 ** (count + 1)) / (1 - b1 ** (count + 1)))
