"""LARS against float64 written by hand, optax, and what peers make of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import draw, run

from cjax.optim import lars
from cjax.tree import PyTree

PEERS = json.loads((Path(__file__).parent / "peers.json").read_text())


def reference(params: PyTree, grads: list[PyTree], rate: Callable[[int], float], **rule: Any) -> PyTree:
    """The paper's rule in float64, leaf by leaf and step by step."""
    eta, decay, momentum = (
        rule.get(k, d) for k, d in (("trust_coefficient", 1e-3), ("weight_decay", 1e-4), ("momentum", 0.9))
    )
    low, high = rule.get("trust_clip", (0, np.inf))
    out = {}
    for name, w in params.items():
        v = np.zeros_like(w)
        for t, g in enumerate(grads):
            step, ratio = g[name], 1.0
            if name not in rule.get("plain", ("bias",)):
                weight, grad = np.linalg.norm(w), np.linalg.norm(step)
                if weight and grad:
                    ratio = np.clip(eta * weight / (grad + decay * weight + rule.get("eps", 0)), low, high)
                step = step + decay * w
            v = momentum * v + rate(t) * ratio * step
            w = w - (momentum * v + rate(t) * ratio * step if rule.get("nesterov") else v)
        out[name] = w
    return out


RULES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "other numbers": {"momentum": 0.5, "weight_decay": 0.3, "trust_coefficient": 0.02, "eps": 0.1},
    "nesterov": {"nesterov": True},
    "clipped": {"trust_clip": (5e-4, 8e-4)},
}


@pytest.mark.parametrize("name", RULES)
def test_is_the_rule(name: str) -> None:
    rule, grads = RULES[name], [draw(seed, 10.0 ** (seed - 2)) for seed in range(5)]
    schedule = optax.linear_schedule(3.0, 1.0, 4)
    with jax.enable_x64(True):
        given_ = run(lars(schedule, **rule), draw(9), grads)
        wanted = reference(draw(9), grads, lambda t: float(schedule(t)), **rule)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), given_, wanted)


def test_is_optax_lars_where_nothing_is_decayed() -> None:
    """With decay, optax divides by the norm of the decayed gradient, and the paper by a sum of norms."""
    grads = [draw(seed) for seed in range(5)]
    with jax.enable_x64(True):
        given_ = run(lars(2.0, weight_decay=0.0, mask="."), draw(9), grads)
        wanted = run(optax.lars(2.0), draw(9), grads)
        decayed, other = (
            run(lars(2.0, weight_decay=0.1, mask="."), draw(9), grads),
            run(optax.lars(2.0, 0.1), draw(9), grads),
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), given_, wanted)
    assert np.abs(decayed["kernel"] - other["kernel"]).max() > 1e-5


PEER_RULES: dict[str, optax.GradientTransformation] = {
    "timm.Lars mom=.9 wd=1e-4 tc=.001": lars(0.1, weight_decay=1e-4, mask="."),
    "colossalai.Lars mom=.9 wd=1e-4": lars(0.1, weight_decay=1e-4, colossal_compat=True),
}


@pytest.mark.parametrize("peer", PEER_RULES)
def test_agrees_with_peers(peer: str) -> None:
    params = {name: jnp.array(PEERS[name + "0"], jnp.float32) for name in ("w", "b")}
    grads = [{"w": jnp.array(w, jnp.float32), "b": jnp.array(b, jnp.float32)} for w, b in PEERS["gradients"]]
    given_ = run(PEER_RULES[peer], params, grads)
    for name in ("w", "b"):
        np.testing.assert_allclose(given_[name], np.array(PEERS["ends"][peer][name]), rtol=1e-6, atol=1e-7)


def test_colossal_clips_ratio_and_gradients() -> None:
    tx = lars(1.0, momentum=0.0, weight_decay=0.0, colossal_compat=True)
    w = {"kernel": jnp.full((2, 2), 1e4)}
    small, _ = tx.update({"kernel": jnp.full((2, 2), 1e-4)}, tx.init(w), w)
    np.testing.assert_allclose(small["kernel"], -50 * 1e-4, rtol=1e-6)  # the ratio would be 1e5
    large, _ = tx.update({"kernel": jnp.full((2, 2), 1e3)}, tx.init(w), w)
    np.testing.assert_allclose(large["kernel"], -10 * 1e-3 * 1e4 / 1e3, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-3, 1e3))
def test_a_step_forgets_how_large_gradients_are(scale: float) -> None:
    tx = lars(2.0, weight_decay=0.0)
    with jax.enable_x64(True):
        w, g = draw(1), draw(2)
        one, _ = tx.update(g, tx.init(w), w)
        other, _ = tx.update(jax.tree.map(lambda x: scale * x, g), tx.init(w), w)
    one, other = jax.tree.map(np.asarray, (one, other))
    np.testing.assert_allclose(one["kernel"], other["kernel"], rtol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(one["kernel"]), 2e-3 * np.linalg.norm(w["kernel"]), rtol=1e-6)
    np.testing.assert_allclose(other["bias"], scale * one["bias"], rtol=1e-9)  # takes the rate as it is


def test_split_layers_have_their_own_ratio() -> None:
    """A packed kernel does what its parts would."""
    with jax.enable_x64(True):
        parts, grads = [draw(i)["kernel"] for i in range(3)], [10.0**i * draw(i + 5)["kernel"] for i in range(3)]
        packed, all_grads = {"qkv/kernel": np.concatenate(parts, 1)}, {"qkv/kernel": np.concatenate(grads, 1)}
        tx = lars(1.0, split={"qkv": (1, 3)})
        together = run(tx, packed, [all_grads, all_grads])
        alone = [
            run(lars(1.0), {"kernel": w}, [{"kernel": g}] * 2)["kernel"] for w, g in zip(parts, grads, strict=True)
        ]
        np.testing.assert_allclose(together["qkv/kernel"], np.concatenate(alone, 1), rtol=1e-12)
        mixed = run(lars(1.0), packed, [all_grads, all_grads])
        assert np.abs(mixed["qkv/kernel"] - together["qkv/kernel"]).max() > 1e-4
        stack, stack_grads = {"layers": np.stack(parts)}, {"layers": np.stack(grads)}
        stacked = run(lars(1.0, split={"layers": 0}), stack, [stack_grads, stack_grads])
        np.testing.assert_allclose(stacked["layers"], np.stack(alone), rtol=1e-12)


def test_descends_a_quadratic() -> None:
    curvature = jnp.linspace(1.0, 100.0, 35).reshape(5, 7)

    def loss(params: PyTree) -> jax.Array:
        return (curvature * (params["kernel"] - 0.5) ** 2).sum()

    params: PyTree = {"kernel": 3 * jnp.ones((5, 7))}
    tx = lars(optax.cosine_decay_schedule(20.0, 300), momentum=0.5, weight_decay=0.0)
    state, first = tx.init(params), loss(params)

    @jax.jit
    def step(params: PyTree, state: PyTree) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(300):
        params, state = step(params, state)
    assert loss(params) < 1e-3 * first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lars(0), "learning_rate is 0"),
        (lambda: lars(0.1, mask="kernal").init(draw(0)), "mask='kernal' matches none"),
        (lambda: lars(0.1, adapt="kernal").init(draw(0)), "adapt='kernal' matches none"),
    ],
)
def test_refuses(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
