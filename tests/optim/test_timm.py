"""Step by step beside timm 1.0.31 on PyTorch 2.13, whose LAMB has variants that others call by other names.

`timm.json` holds six steps of each from the same parameters and gradients, float32; gradients grow 100,000-fold.
Left out: without decay timm's LAMB has no ratio either, which the paper's has.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cjax.optim import lamb, lars

RUNS = json.loads((Path(__file__).parent / "timm.json").read_text())
ALL = "."  # timm leaves norms and biases to its users' parameter groups
RULES: dict[str, optax.GradientTransformation] = {
    "Lamb": lamb(2e-2, b1=0.8, b2=0.99, weight_decay=0.05, mask=ALL),
    "Lamb, bias_correction=False": lamb(2e-2, weight_decay=0.05, mask=ALL, bias_correction=False),
    "Lamb, max_grad_norm=1": optax.chain(optax.clip_by_global_norm(1.0), lamb(2e-2, weight_decay=0.05, mask=ALL)),
    "Lars": lars(0.5, weight_decay=1e-2, trust_coefficient=0.01, mask=ALL),
    "Lars, nesterov": lars(0.5, weight_decay=1e-2, trust_coefficient=0.01, mask=ALL, nesterov=True),
}


@pytest.mark.full("Lamb")
@pytest.mark.parametrize("name", RULES)
def test_every_step_is_timms(name: str) -> None:
    tx, params = RULES[name], {k: jnp.array(v, jnp.float32) for k, v in RUNS["params"].items()}
    state = tx.init(params)
    for number, (grads, wanted) in enumerate(zip(RUNS["gradients"], RUNS[name], strict=True)):
        updates, state = tx.update({k: jnp.array(v, jnp.float32) for k, v in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
        for k, value in wanted.items():
            off = np.linalg.norm(params[k] - np.array(value)) / np.linalg.norm(value)
            assert off <= 1e-6, f"step {number}, {k}: off by {off:.1e}"
