"""How large the logits of a block can be: intervals that hold whatever the values, and tight where they can be."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.trace.attention.bounds import _RULES, bounds
from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.simplify import simplify

B, QUERIES, KEYS, H, D = 2, 6, 12, 3, 5
Q, K = jnp.ones((B, QUERIES, H, D)), jnp.ones((B, KEYS, H, D))


def only(function: Any, *args: Any) -> Attention:
    jaxpr = simplify(jax.make_jaxpr(function)(*args)).jaxpr
    (found,), reasons = find_attentions(jaxpr.eqns, jaxpr.outvars)
    assert not reasons
    return found


def masked_by(mask: Any, low: float = -1e9) -> Any:
    def function(q: Any, k: Any, v: Any) -> Any:
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
        scores = jnp.where(mask(i, j), jnp.einsum("bqhd,bkhd->bhqk", q, k), low)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return function


def check(mask: Any, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that bounds call empty are empty; returns which blocks they call so, and which are."""
    above = bounds(only(masked_by(mask), Q, K, K), num_queries, num_keys, ())
    assert above.shape == (num_queries, num_keys)
    seen = np.asarray(mask(np.arange(QUERIES)[:, None], np.arange(KEYS)[None, :]))
    blocks = seen.reshape(num_queries, QUERIES // num_queries, num_keys, KEYS // num_keys)
    assert not blocks.any((1, 3))[above < np.inf].any()
    np.testing.assert_allclose(above[above < np.inf], -1e9, rtol=1e-5)
    return above < np.inf, ~blocks.any((1, 3))


FOLLOWED = [
    lambda i, j: i >= j,
    lambda i, j: j < i,
    lambda i, j: ~(j > i),
    lambda i, j: i + 3 > j,
    lambda i, j: (i >= j) & (i - j < 4),
    lambda i, j: abs(i - j) <= 2,
    lambda i, j: (i == j) | (j == 0),
    lambda i, j: jnp.maximum(i, 3) * 2 >= j + 6,
    lambda i, j: -i <= -2 * j,
]
NOT_FOLLOWED = [
    lambda i, j: i // 4 == j // 4,
    lambda i, j: jnp.minimum(i, 5) >= 2 * j - i,  # the two of i are taken to be any two
]


@pytest.mark.parametrize("num_queries, num_keys", [(2, 3), (3, 6), (6, 4)])
@pytest.mark.parametrize("mask", FOLLOWED + NOT_FOLLOWED)
def test_blocks_that_bounds_call_empty_are_empty(mask: Any, num_queries: int, num_keys: int) -> None:
    called, empty = check(mask, num_queries, num_keys)
    if mask in FOLLOWED:
        assert empty.any()
        np.testing.assert_array_equal(called, empty, "and the others are not")


# Masks of positions, as sums and comparisons that are drawn.
TERMS = st.recursive(
    st.sampled_from(["i", "j"]) | st.integers(-5, 9).map(str),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["({} + {})", "({} - {})", "({} * {})"]), inner, inner),
        st.tuples(st.sampled_from(["np.minimum({}, {})", "np.maximum({}, {})"]), inner, inner),
        st.tuples(st.sampled_from(["abs({})", "(-{})"]), inner),
    ).map(lambda parts: parts[0].format(*parts[1:])),
    max_leaves=4,
)
TESTS = st.tuples(TERMS, st.sampled_from([">=", "<=", ">", "<", "==", "!="]), TERMS).map(
    "({0[0]} {0[1]} {0[2]})".format
)
MASKS = st.recursive(
    TESTS,
    lambda inner: (
        st.tuples(inner, st.sampled_from("&|"), inner).map("({0[0]} {0[1]} {0[2]})".format) | inner.map("(~{})".format)
    ),
    max_leaves=3,
)


@settings(max_examples=25)
@given(MASKS)
def test_no_mask_makes_them_call_empty_what_is_not(text: str) -> None:
    def mask(i: Any, j: Any) -> Any:
        numpy = np if isinstance(i, np.ndarray) else jnp
        found = eval(text, {"i": i, "j": j, "np": numpy, "abs": numpy.abs})
        return numpy.broadcast_to(found if numpy.ndim(found) else numpy.asarray(bool(found)), (len(i), j.shape[1]))

    if "i" in text and "j" in text:
        check(mask, 3, 4)


def test_bounds_of_a_causal_mask_are_tight() -> None:
    q = jnp.ones((B, KEYS, H, D))
    for function in (
        masked_by(lambda i, j: i >= j),
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones((B, KEYS)))),
    ):
        above = bounds(only(function, q, q, q), 4, 4, ())
        np.testing.assert_array_equal(above < -1000, np.arange(4)[:, None] < np.arange(4))
    assert np.isinf(bounds(only(nn.dot_product_attention, q, q, q), 4, 4, ())).all()


def test_what_is_added_to_hidden_scores_is_in_their_bound() -> None:
    """Not only the mask counts: what comes between it and the softmax does."""

    def function(q: Any, k: Any, v: Any) -> Any:
        i, j = jnp.arange(QUERIES)[:, None], jnp.arange(KEYS)[None, :]
        scores = jnp.where(i >= j, jnp.einsum("bqhd,bkhd->bhqk", q, k), -100.0) - 2.0 * abs(i - j)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    above = bounds(only(function, Q, K, K), 2, 3, ())
    np.testing.assert_allclose(above[0, 1:], [-100 - 2 * 2, -100 - 2 * 6], rtol=1e-5)
    assert np.isinf(above[0, 0]) and np.isinf(above[1, 0]) and np.isinf(above[1, 1])


def test_a_literal_that_differs_by_layer_bounds_nothing() -> None:
    found = only(masked_by(lambda i, j: i - 1 >= j), Q, K, K)
    literals = [
        (id(eqn), at)
        for eqn, _ in {**found.steps, **found.sources}.values()
        for at, atom in enumerate(eqn.invars)
        if hasattr(atom, "val") and np.ndim(atom.val) == 0 and atom.val == 1
    ]
    assert literals
    assert (bounds(found, 3, 4, ()) < 0).any() and not (bounds(found, 3, 4, literals) < 0).any()


def test_integers_that_may_wrap_around_bound_nothing() -> None:
    def narrow(i: Any, j: Any) -> Any:
        return (i.astype(jnp.int8) * 100 + 0 >= j.astype(jnp.int8) * 100) & (i >= 0)

    assert np.isinf(bounds(only(masked_by(narrow), Q, K, K), 3, 4, ())).all()
    unsigned = masked_by(lambda i, j: i.astype(jnp.uint32) - j.astype(jnp.uint32) < 3)
    assert np.isinf(bounds(only(unsigned, Q, K, K), 3, 4, ())).all()


# -- the rules: whatever lies in the operands' intervals, the result lies in the result's ------------------------------
ENDS = st.integers(-6, 6).map(float)
INTERVALS = st.tuples(ENDS, ENDS).map(lambda pair: (min(pair), max(pair)))
OF_TRUTH = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}


@pytest.mark.parametrize("name", sorted(set(_RULES) - set(OF_TRUTH) - {"select_n"}))
@settings(max_examples=30)
@given(data=st.data())
def test_a_rule_holds_for_all_that_operands_can_be(name: str, data: Any) -> None:
    primitive = getattr(jax.lax, f"{name}_p")
    facts = facts_of(jax.make_jaxpr(lambda *xs: primitive.bind(*xs))(*[1.0] * _arity(name)).eqns[0])
    assert facts.numpy is not None, "its NumPy is what it is held against"
    spans = [data.draw(INTERVALS) for _ in range(_arity(name))]
    low, high = _RULES[name](*spans)
    points = np.meshgrid(*(np.linspace(*span, 5) for span in spans))
    values = np.asarray(facts.numpy(*points), float)
    assert (low <= values).all() and (values <= high).all()
    if name in ("add", "sub", "mul", "neg", "max", "min"):
        assert (values.min(), values.max()) == (low, high), "and no wider than that"


def _arity(name: str) -> int:
    return 1 if name in ("neg", "abs", "not") else 2


@pytest.mark.parametrize("name", OF_TRUTH)
def test_rules_of_truth_are_of_truth_alone(name: str) -> None:
    spans = [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
    for x in spans:
        for y in spans[: 1 if name == "not" else 3]:
            given = (x,) if name == "not" else (x, y)
            ends = np.meshgrid(*map(np.array, given))
            values = OF_TRUTH[name](*(end.astype(bool) for end in ends))
            assert _RULES[name](*given) == (values.min(), values.max())
    bits = [(0.0, 2.0), (0.0, 1.0)][: _arity(name)]
    assert _RULES[name](*bits) == (-np.inf, np.inf), "of bits nothing is known"


def test_a_choice_that_is_known_is_the_case_chosen() -> None:
    choice = _RULES["select_n"]
    assert choice((0.0, 0.0), (1.0, 2.0), (5.0, 9.0)) == (1.0, 2.0)
    assert choice((1.0, 1.0), (1.0, 2.0), (5.0, 9.0)) == (5.0, 9.0)
    assert choice((0.0, 1.0), (1.0, 2.0), (5.0, 9.0)) == (1.0, 9.0)
    assert choice((2.0, 2.0), (1.0, 2.0), (5.0, 9.0)) == (1.0, 9.0), "JAX does not say what is chosen then"
