"""LAMB against float64 written by hand, optax, and the numbers of those who have a rule of that name."""

import functools
import itertools
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

from cjax.optim import lamb, lars, scale_by_trust_ratio, weights_only
from cjax.tree import PyTree

PEERS = json.loads((Path(__file__).parent / "peers.json").read_text())


def reference(params: PyTree, grads: list[PyTree], rate: Callable[[int], float], **rule: Any) -> PyTree:
    """The rule in float64, leaf by leaf and step by step."""
    b1, b2, eps = rule.get("b1", 0.9), rule.get("b2", 0.999), rule.get("eps", 1e-6)
    low, high = rule.get("trust_clip", (0, np.inf))
    floor, ceiling = rule.get("norm_clip", (0, np.inf))
    out = {}
    for name, w in params.items():
        m = v = np.zeros_like(w)
        for t, g in enumerate(grads):
            m, v = b1 * m + (1 - b1) * g[name], b2 * v + (1 - b2) * g[name] ** 2
            debias = (1 - b1 ** (t + 1), 1 - b2 ** (t + 1)) if rule.get("bias_correction", True) else (1, 1)
            u = m / debias[0] / (np.sqrt(v / debias[1]) + eps)
            ratio = 1.0
            if name not in rule.get("plain", ("bias",)):
                u = u + rule.get("weight_decay", 0.01) * w
                norms = np.clip(np.linalg.norm(w), floor, ceiling), np.linalg.norm(u)
                ratio = np.clip(norms[0] / norms[1], low, high) if norms[0] and norms[1] else 1.0
            w = w - rate(t) * ratio * u
        out[name] = w
    return out


RULES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "other moments": {"b1": 0.7, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.3},
    "no bias correction": {"bias_correction": False},
    "clipped ratio": {"trust_clip": (0.5, 1.5)},
    "clipped norm": {"norm_clip": (0.1, 2.0)},
    "no decay": {"weight_decay": 0.0},
}


@pytest.mark.full("defaults")
@pytest.mark.parametrize("name", RULES)
def test_is_the_rule(name: str) -> None:
    rule, grads = RULES[name], [draw(seed, 10.0 ** (seed - 2)) for seed in range(5)]
    schedule = optax.linear_schedule(0.1, 0.01, 4)
    with jax.enable_x64(True):
        given_ = run(lamb(schedule, **rule), draw(9), grads)
        wanted = reference(draw(9), grads, lambda t: float(schedule(t)), **rule)
    # optax counts steps, and so makes rates and debiases, in float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), given_, wanted)


def test_is_optax_lamb_where_all_is_decayed_and_scaled() -> None:
    grads = [draw(seed) for seed in range(5)]
    with jax.enable_x64(True):
        given_ = run(lamb(0.03, weight_decay=0.2, mask="."), draw(9), grads)
        wanted = run(optax.lamb(0.03, eps=1e-6, weight_decay=0.2), draw(9), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), given_, wanted)


PEER_RULES: dict[str, optax.GradientTransformation] = {
    "timm.Lamb wd=.01 (no max_grad_norm)": lamb(1e-2, weight_decay=0.01, mask="."),
    "timm.Lamb bias_correction=False": lamb(1e-2, weight_decay=0.01, mask=".", bias_correction=False),
    "optax.lamb wd=.01": lamb(1e-2, weight_decay=0.01, mask="."),
    "colossalai.Lamb wd=.01": lamb(1e-2, weight_decay=0.01, colossal_compat="Lamb"),
    "colossalai.DistributedLamb bias_corr": lamb(1e-2, weight_decay=0.01, colossal_compat="DistributedLamb"),
    "torch_optimizer.Lamb wd=.01": lamb(1e-2, weight_decay=0.01, colossal_compat="Lamb"),
    "torch_optimizer.Lamb debias": lamb(1e-2, weight_decay=0.01, colossal_compat="DistributedLamb"),
}


@pytest.mark.parametrize("peer", PEER_RULES)
def test_agrees_with_peers(peer: str) -> None:
    """Five steps on a matrix and a vector, whose end each peer was run to; float32."""
    params = {name: jnp.array(PEERS[name + "0"], jnp.float32) for name in ("w", "b")}
    grads = [{"w": jnp.array(w, jnp.float32), "b": jnp.array(b, jnp.float32)} for w, b in PEERS["gradients"]]
    given_ = run(PEER_RULES[peer], params, grads)
    for name in ("w", "b"):
        np.testing.assert_allclose(given_[name], np.array(PEERS["ends"][peer][name]), rtol=1e-6, atol=1e-6)


def test_peers_disagree_with_each_other() -> None:
    """So that no rule passes for another."""
    three = ("timm.Lamb wd=.01 (no max_grad_norm)", "colossalai.Lamb wd=.01", "colossalai.DistributedLamb bias_corr")
    for one, other in itertools.combinations(three, 2):
        assert np.abs(np.array(PEERS["ends"][one]["w"]) - np.array(PEERS["ends"][other]["w"])).max() > 2e-5


def test_fused_lamb_clips_all_gradients_together_and_without_decay_is_adam() -> None:
    grads = [draw(seed, 30.0) for seed in range(3)]
    with jax.enable_x64(True):
        norms = [np.sqrt(sum(np.sum(x**2) for x in g.values())) for g in grads]
        clipped = [jax.tree.map(lambda x, n=n: x / max(1, n), g) for g, n in zip(grads, norms, strict=True)]
        given_ = run(lamb(0.01, weight_decay=0.02, colossal_compat="FusedLAMB"), draw(9), grads)
        wanted = reference(draw(9), clipped, lambda _: 0.01, weight_decay=0.02, plain=())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), given_, wanted)
        plain = run(lamb(0.01, weight_decay=0.0, colossal_compat="FusedLAMB"), draw(9), grads)
        adam = run(optax.adam(0.01, eps=1e-6), draw(9), clipped)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), plain, adam)


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-3, 1e3), of_weights=st.floats(1e-2, 1e2))
def test_scales_of_gradients_and_weights(scale: float, of_weights: float) -> None:
    """The direction forgets how large gradients are; a step is as long as a part of the weights, `learning_rate`."""
    tx = lamb(0.02, eps=0.0, weight_decay=0.0)
    with jax.enable_x64(True):
        w, g = draw(1), draw(2)
        one, _ = tx.update(g, tx.init(w), w)
        larger = jax.tree.map(lambda x: scale * x, g)
        other, _ = tx.update(larger, tx.init(w), w)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), one, other)
        wide = jax.tree.map(lambda x: of_weights * x, w)
        for name, u in tx.update(g, tx.init(wide), wide)[0].items():
            if name != "bias":
                np.testing.assert_allclose(np.linalg.norm(u), 0.02 * of_weights * np.linalg.norm(w[name]), rtol=1e-9)


def test_same_bits_twice() -> None:
    grads = [jax.tree.map(np.float32, draw(seed)) for seed in range(4)]
    once, twice = (run(lamb(0.01), jax.tree.map(np.float32, draw(5)), grads) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, twice)


@pytest.mark.parametrize("preset", [None, "Lamb", "DistributedLamb", "FusedLAMB"])
def test_descends_a_quadratic(preset: Any) -> None:
    """From afar to a thousandth of the loss, with curvatures from 1 to 100."""
    curvature = jnp.linspace(1.0, 100.0, 35).reshape(5, 7)

    def loss(params: PyTree) -> jax.Array:
        return (curvature * (params["kernel"] - 0.5) ** 2).sum() + ((params["bias"] - 0.5) ** 2).sum()

    params: PyTree = {"kernel": 3 * jnp.ones((5, 7)), "bias": jnp.ones(7)}
    tx = lamb(optax.cosine_decay_schedule(0.05, 300), weight_decay=1e-4, colossal_compat=preset)
    state, first = tx.init(params), loss(params)

    @jax.jit
    def step(params: PyTree, state: PyTree) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(300):
        params, state = step(params, state)
    assert loss(params) < 1e-3 * first


@pytest.mark.parametrize("make", [lamb, functools.partial(lars, trust_coefficient=0.4)])
def test_trains_a_small_model(make: Callable[[Any], optax.GradientTransformation]) -> None:
    """Two layers learn a noisy XOR of signs, which no linear model can."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 6)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.float32)

    def loss(params: PyTree) -> jax.Array:
        hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
        logits = (hidden @ params["second"]["kernel"] + params["second"]["bias"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, y).mean()

    params: PyTree = {
        "first": {"kernel": jnp.array(rng.standard_normal((6, 32)) / 6**0.5, jnp.float32), "bias": jnp.zeros(32)},
        "second": {"kernel": jnp.array(rng.standard_normal((32, 1)) / 32**0.5, jnp.float32), "bias": jnp.zeros(1)},
    }
    tx = make(optax.warmup_cosine_decay_schedule(0.0, 0.05, 20, 300))

    @jax.jit
    def step(params: PyTree, state: PyTree) -> Any:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(300):
        params, state = step(params, state)
    assert loss(params) < 0.2, "chance is 0.69"


def test_layers_of_zeros_can_be_left() -> None:
    tx = lamb(0.1)
    params = {"kernel": jnp.zeros((2, 3))}
    updates, _ = tx.update({"kernel": jnp.ones((2, 3))}, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.1, rtol=1e-5)


def test_norms_and_biases_are_left_out() -> None:
    params = {
        "attention": {"query": {"kernel": np.ones((6, 2, 3)), "bias": np.ones((2, 3))}},
        "norms": {"scale": np.ones((4, 6)), "bias": np.ones((4, 6))},
        "embed": {"embedding": np.ones((9, 6))},
        "cls_token": np.ones((1, 1, 6)),
        "lora": np.ones(6),
    }
    on = weights_only(params)
    assert on["attention"]["query"] == {"kernel": True, "bias": False}
    assert on["norms"] == {"scale": False, "bias": False}
    assert on["embed"]["embedding"] and on["cls_token"] and not on["lora"]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "rate 0": (lambda: lamb(0.0), "learning_rate is 0, .*give a number above 0"),
    "rate below 0": (lambda: lamb(-1e-3), "learning_rate is -0.001"),
    "no number": (lambda: lamb(float("nan")), "learning_rate is nan"),
    "preset": (lambda: lamb(1e-3, colossal_compat="fusedlamb"), "did you mean 'FusedLAMB'"),  # type: ignore[arg-type]
    "mask": (lambda: lamb(1e-3, mask="kernal").init(draw(0)), "mask='kernal' matches none of the parameters"),
    "empty mask": (lambda: lamb(1e-3, mask=lambda p: jax.tree.map(lambda _: False, p)).init(draw(0)), "matches none"),
    "split": (lambda: lamb(1e-3, split={"qkv": 0}).init(draw(0)), "no parameter's path matches 'qkv'.*bias"),
    "split size": (lambda: lamb(1e-3, split={"kernel": (1, 3)}).init(draw(0)), r"kernel is \[5, 7\], whose dim 1"),
    "clip": (lambda: lamb(1e-3, trust_clip=(2.0, 1.0)), r"trust_clip=\(2.0, 1.0\) leaves nothing between"),
    "no parameters": (lambda: scale_by_trust_ratio().update(draw(0), optax.EmptyState()), "give them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case: str) -> None:
    act, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        act()
