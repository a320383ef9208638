"""Attention found in traces, and what it is said to be made of."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from contract import trace_of
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from zoo import MODELS

from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.simplify import simplify

B, S, H, D = 2, 12, 6, 5
Q = jnp.ones((B, S, H, D))
FEW = jnp.ones((B, S, 3, D))


def found_in(function: Any, *args: Any, **options: Any) -> tuple[list[Attention], list[str]]:
    jaxpr = simplify(jax.make_jaxpr(function)(*args)).jaxpr
    return find_attentions(jaxpr.eqns, jaxpr.outvars, **options)


def only(function: Any, *args: Any) -> Attention:
    (found,), reasons = found_in(function, *args)
    assert not reasons
    return found


def everywhere(jaxpr: Any) -> tuple[int, list[str]]:
    found, reasons = find_attentions(jaxpr.eqns, jaxpr.outvars, weights=jaxpr.invars)
    count = len(found)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" or facts_of(eqn).remat:
            inner = eqn.params["jaxpr"]
            more, others = everywhere(getattr(inner, "jaxpr", inner))
            count, reasons = count + more * eqn.params.get("length", 1), reasons + others
    return count, reasons


COUNTS = {
    "linen_decoder": 4, "linen_encoder": 3, "linen_scan": 4, "linen_remat": 4, "linen_tied": 4, "linen_packed_qkv": 4,
    "linen_masked_mean": 3, "linen_encoder_decoder": 3 + 2 * 4, "linen_moe_soft": 3, "linen_moe_capacity": 3,
    "linen_vit": 4, "nnx_decoder": 4, "nnx_encoder": 3, "nnx_scan": 4, "nnx_llama": 4, "cjax_gpt": 4, "cjax_bert": 4,
    "cjax_vit": 4, "cjax_t5": 3 + 2 * 2, "cjax_llama": 4,
}  # fmt: skip


@pytest.mark.full("linen_encoder_decoder")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    count, reasons = everywhere(trace_of(name).closed.jaxpr)
    assert count == COUNTS.get(name, 0)
    assert not reasons


def test_dims() -> None:
    found = only(lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, bias=b), Q, FEW, FEW, jnp.ones((1, H, S, S)))
    assert found.dims_of(found.query.var) == ("batch", "query", "heads", "heads", "depth")
    assert found.dims_of(found.key.var) == ("batch", "key", "heads", "depth")
    assert found.dims_of(found.value.var) == ("batch", "key", "heads", "depth")
    assert sorted(filter(None, found.dims_of(found.out.var))) == ["batch", "depth", "heads", "heads", "query"]
    (bias,) = found.leaves
    assert found.dims_of(bias.var) == (None, "heads", "heads", "query", "key") or found.dims_of(bias.var) == (
        None, "heads", "query", "key",
    )  # fmt: skip

    def heads_first(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.transpose(0, 1, 3, 2)) @ v

    x = jnp.ones((B, H, S, D))
    found = only(heads_first, x, x, x)
    assert found.dims_of(found.query.var) == ("batch", "heads", "query", "depth")
    found = only(heads_first, jnp.ones((B, H, 7, D)), x, x)
    assert found.sizes[found.label("query")] == 7 and found.sizes[found.label("key")] == S


def test_masks_by_position_need_no_input() -> None:
    found = only(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), Q, Q, Q)
    assert found.leaves == ()
    assert len(found.group.ins) == 3


def test_weights_that_have_a_name() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", checkpoint_name(weights, "weights"), v)

    assert len(only(function, Q, Q, Q).group.ins) == 3


def test_one_variable_in_two_places() -> None:
    """Tokens' segments are read along queries and along keys; the values are the keys."""

    def function(x: Any, ids: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", x, x)
        seen = (ids[:, :, None] == ids[:, None, :])[:, None]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), x)

    found = only(function, Q, jnp.ones((B, S), int))
    assert {node.labels for node in found.leaves} and len(found.leaves) == 2
    assert len(found.group.ins) == 3 and len(found.operands) == 5


def test_a_mask_made_before_the_layer_is_made_again() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        mask = nn.make_causal_mask(jnp.ones((B, S)))
        for _ in range(2):
            q = nn.dot_product_attention(q, k, v, mask=mask)
        return q

    jaxpr = simplify(jax.make_jaxpr(function)(Q, Q, Q)).jaxpr
    cut = [eqn.primitive.name for eqn in jaxpr.eqns].index("dot_general")
    before, eqns = jaxpr.eqns[:cut], jaxpr.eqns[cut:]
    square = (B, 1, S, S)
    found, _ = find_attentions(eqns, jaxpr.outvars)
    assert len(found) == 2 and all(square in [n.var.aval.shape for n in one.leaves] for one in found)
    found, _ = find_attentions(eqns, jaxpr.outvars, before=before)
    assert len(found) == 2 and all(n.var.aval.size <= B * S for one in found for n in one.leaves)


def test_sown_weights() -> None:
    layer = nn.MultiHeadDotProductAttention(2, qkv_features=8)
    x = jnp.ones((B, S, 8))
    params = {"params": layer.init(jax.random.key(0), x)["params"]}

    def function(x: Any, sow: bool) -> Any:
        return layer.apply(params, x, sow_weights=sow, mutable=["intermediates"])

    assert len(found_in(lambda x: function(x, False), x)[0]) == 1
    found, (reason,) = found_in(lambda x: function(x, True), x)
    assert not found and "read elsewhere as well (sown" in reason

    def loss(x: Any) -> Any:  # a penalty on the weights is a use of them too
        out, state = function(x, True)
        return out.sum() + sum((leaf**2).sum() for leaf in jax.tree.leaves(state))

    found, (reason,) = found_in(loss, x)
    assert not found and "neither dropout nor a product with values" in reason


def normalised(
    shift: Any = lambda most: most,
    terms: Any = lambda x: x,
    numerator: Any = lambda x: x,
    divisor: Any = lambda x, m: x,
) -> Any:
    """An attention: exponentials relative to `shift(maximum)`, by what `divisor(sum, that)` makes of their sum."""

    def function(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        off = shift(scores.max(-1, keepdims=True))
        exps = jnp.exp(scores - off)
        weights = numerator(exps) / divisor(terms(exps).sum(-1, keepdims=True), off)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return function


STOP = jax.lax.stop_gradient
ONE_MORE = {
    "one": lambda x, m: x + jnp.exp(-m),
    "in front": lambda x, m: jnp.exp(2.0 - m) + x,
    "two": lambda x, m: x + jnp.exp(2.0 - m) + jnp.exp(-m),
}
ANYTHING = {
    "plus one": lambda x, m: 1 + x,
    "a guard": lambda x, m: x + 1e-3,
    "a root": lambda x, m: jnp.sqrt(x),
    "no gradient": lambda x, m: STOP(x),
    "of another number": lambda x, m: x + jnp.exp(1 - 2 * m),
    "one without a gradient": lambda x, m: x + STOP(jnp.exp(-m)),
    "twice the maximum": lambda x, m: x + jnp.exp(m - m),
    "its reciprocal": lambda x, m: 1 / x,
    "its reciprocal as well": lambda x, m: x + 1 / x,
}


@pytest.mark.parametrize("divisor", [*ONE_MORE, *ANYTHING])
def test_what_is_taken_off_cancels_or_has_no_gradient(divisor: str) -> None:
    """By blocks another number is taken off, which has none: so must the author's, or it is nothing in all."""
    given = (ONE_MORE | ANYTHING)[divisor]
    found, reasons = found_in(normalised(divisor=given), Q, Q, Q)
    assert bool(found) == (divisor in ONE_MORE)
    assert found or "jax.lax.stop_gradient around it" in reasons[0]
    for shift in (STOP, lambda most: STOP(2 * jnp.maximum(most, 1.0))):
        (one,), reasons = found_in(normalised(shift, divisor=given), Q, Q, Q)
        assert not reasons and not one.divides_by_sum


def test_a_gradient_that_is_stopped_halfway_does_not_cancel() -> None:
    for options, is_one in (
        ({"terms": STOP}, False),
        ({"numerator": STOP}, False),
        ({"terms": STOP, "numerator": STOP}, True),
    ):
        found, reasons = found_in(normalised(**options), Q, Q, Q)
        assert bool(found) == is_one and (is_one or "jax.lax.stop_gradient around it" in reasons[0])
        found, reasons = found_in(normalised(divisor=ONE_MORE["one"], **options), Q, Q, Q)
        assert not found
        (one,), reasons = found_in(normalised(STOP, **options), Q, Q, Q)
        assert not reasons and one.divides_by_sum


def test_weights_that_are_multiplied_with_the_sum() -> None:
    def function(q: Any, k: Any, v: Any, by: Any, shift: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        exps = jnp.exp(scores - shift(scores.max(-1, keepdims=True)))
        return jnp.einsum("bhqk,bkhd->bqhd", exps * by(exps.sum(-1, keepdims=True)), v)

    for by, cancels in ((lambda x: x, False), (lambda x: 1 / x, True), (lambda x: 1 / (1 / x), False)):
        found, _ = found_in(lambda q, k, v, by=by: function(q, k, v, by, lambda most: most), Q, Q, Q)
        assert bool(found) == cancels
        (one,), _ = found_in(lambda q, k, v, by=by: function(q, k, v, by, STOP), Q, Q, Q)
        assert one.multiplies and not one.divides_by_sum


def test_a_divisor_without_a_maximum() -> None:
    def added(q: Any, k: Any, v: Any, divisor: Any = lambda exps, scores: 1 + exps) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        exps = jnp.exp(scores)
        return jnp.einsum("bhqk,bkhd->bqhd", exps / divisor(exps.sum(-1, keepdims=True), scores), v)

    (one,), reasons = found_in(added, Q, Q, Q)
    assert not reasons and one.shift is None and not one.divides_by_sum

    def of_maximum(q: Any, k: Any, v: Any) -> Any:
        return added(q, k, v, lambda exps, scores: exps + jnp.exp(scores.max(-1, keepdims=True)))

    found, (reason,) = found_in(of_maximum, Q, Q, Q)
    assert not found and "not taken off" in reason


def test_what_is_no_attention() -> None:
    def router(x: Any, w: Any, values: Any) -> Any:
        return jnp.einsum("bse,bsed->bsd", jax.nn.softmax(x @ w), values)

    args = (jnp.ones((B, S, D)), jnp.ones((D, 4)), jnp.ones((B, S, 4, 7)))
    found, (reason,) = found_in(router, *args)
    assert not found and "values of its own" in reason
    jaxpr = simplify(jax.make_jaxpr(router)(*args)).jaxpr
    assert find_attentions(jaxpr.eqns, jaxpr.outvars, weights=[jaxpr.invars[1]]) == ([], [])

    def detached(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.lax.stop_gradient(weights), v)

    found, (reason,) = found_in(detached, Q, Q, Q)
    assert not found and "go through `stop_gradient`" in reason

    def squared(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)) ** 2, v)

    found, (reason,) = found_in(squared, Q, Q, Q)
    assert not found and "neither dropout" in reason
    assert found_in(lambda x: jax.nn.log_softmax(x @ x.T).sum(), jnp.ones((4, 3))) == ([], [])
    assert found_in(lambda x, w: jax.nn.gelu(x @ w) @ w.T, jnp.ones((4, 3)), jnp.ones((3, 5))) == ([], [])


def test_layers_of_flax_and_jax() -> None:
    mask = jnp.ones((B, 1, S, S), bool)
    key = jax.random.key(0)
    options: dict[str, Any] = {"dropout_rng": key, "dropout_rate": 0.1}
    for function in (
        lambda q, k, v: nn.dot_product_attention(q, k, v, mask=mask, broadcast_dropout=False, **options),
        lambda q, k, v: nn.dot_product_attention(q, k, v, bias=jnp.ones((H, S, S)), force_fp32_for_softmax=True),
        lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=mask, is_causal=True),
        lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=mask, **options),
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, local_window_size=4),
    ):
        only(function, Q, Q, Q)
        only(function, *(x.astype(jnp.bfloat16) for x in (Q, Q, Q)))
    only(lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=mask, **options), Q, FEW, FEW)
    only(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, bias=jnp.ones((1, H, S, S))), Q, FEW, FEW)
