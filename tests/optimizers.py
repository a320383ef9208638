"""The optimizers that must do under every plan what they do on one device: all of cjax.optim, and many of optax's.

A row is a function, so that importing the table makes nothing. Trees are told apart by path and by shape, so that each
row suits every model of the zoo.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np
import optax

from cjax.optim import lamb, lars, params_ema, scale_by_trust_ratio
from cjax.tree import PyTree

Optimizer = optax.GradientTransformation


def run(tx: Optimizer, params: PyTree, grads: Iterable[PyTree]) -> PyTree:
    """The parameters after a step for each of the gradients, by optax alone."""
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def draw(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """A small tree, float64: a kernel, a bias, an embedding."""
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (5, 7), "bias": (7,), "embedding": (3, 4, 6)}
    return {name: scale * rng.standard_normal(shape) for name, shape in shapes.items()}


def by_path(tree: PyTree) -> PyTree:
    """Labels by path; some layers of a stack are slow, and others not."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "slow" if "1" in str(path) else "fast", tree)


def not_vectors(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


OURS: dict[str, Callable[[], Optimizer]] = {
    "lamb": lambda: lamb(1e-2),
    "lamb, clipped, not debiased": lambda: lamb(1e-2, bias_correction=False, trust_clip=(0.1, 2.0), mask="."),
    "lamb, as Lamb": lambda: lamb(1e-2, colossal_compat="Lamb"),
    "lamb, as DistributedLamb": lambda: lamb(1e-2, colossal_compat="DistributedLamb"),
    "lamb, as FusedLAMB": lambda: lamb(1e-2, colossal_compat="FusedLAMB"),
    "lars": lambda: lars(1.0, weight_decay=1e-2),
    "lars, nesterov, all adapted": lambda: lars(1.0, weight_decay=1e-2, nesterov=True, mask="."),
    "lars, as Lars": lambda: lars(1.0, weight_decay=1e-2, colossal_compat=True),
    "average of parameters": lambda: optax.chain(optax.adamw(1e-2), params_ema(0.9, warm_up=True)),
    "trust ratio of momentum": lambda: optax.chain(optax.trace(0.9), scale_by_trust_ratio(), optax.scale(-1e-2)),
}

OPTAX: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adamw, vectors not decayed": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=not_vectors),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lamb of optax": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "lars of optax": lambda: optax.lars(1e-2, weight_decay=0.1),
    "novograd": lambda: optax.novograd(1e-2, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "adaptive clipping": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)),
    "global clipping": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "labelled by path": lambda: optax.multi_transform({"fast": optax.adam(1e-1), "slow": optax.sgd(1e-3)}, by_path),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "on a plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}

OPTIMIZERS = OURS | OPTAX
