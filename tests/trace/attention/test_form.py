"""Attentions as kernels take them: scale, what is added and what is masked come to the author's logits."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.attention.form import HIDDEN, KernelForm, NoForm, kernel_form
from cjax.trace.attention.labels import Node
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.simplify import simplify

B, H, S, KEYS, D = 2, 3, 6, 8, 4


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


Q, K, V = numbers(B, S, H, D), numbers(B, KEYS, H, D), numbers(B, KEYS, H, D + 1)
BIAS, ROW = numbers(H, S, KEYS), numbers(B, KEYS)
SEGMENTS = np.repeat([[0, 1, 1, 2, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 2]], 1, 0).astype(np.int32)
SEEN = SEGMENTS > 0
SQUARE = numbers(B, S, H, D), numbers(B, S, H, D), numbers(B, S, H, D + 1)


def with_logits(change: Any) -> Any:
    """An attention whose scores, [batch, heads, queries, keys], are changed before the softmax."""

    def function(q: Any, k: Any, v: Any, *more: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(change(scores, *more)), v)

    return function


def hiding(mask: Any) -> Any:
    """Logits where a mask of positions holds, made where they are: what comes from outside is a number like any."""

    def change(s: Any) -> Any:
        i, j = jnp.arange(s.shape[2])[:, None], jnp.arange(s.shape[3])
        return jnp.where(mask(i, j), s, -1e9)

    return change


def taken(function: Any, *args: Any) -> tuple[Attention, dict[Any, np.ndarray]]:
    """The one attention of a function, and the value of each of its variables."""
    closed = simplify(jax.make_jaxpr(function)(*args))
    (found,), reasons = find_attentions(closed.jaxpr.eqns, closed.jaxpr.outvars)
    assert not reasons
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, args, strict=True))
    for eqn in closed.jaxpr.eqns:
        ins = [atom.val if hasattr(atom, "val") else values[atom] for atom in eqn.invars]
        values.update(zip(eqn.outvars, bind(eqn, ins), strict=True))
    return found, {var: np.asarray(value) for var, value in values.items()}


def matrix(node: Node, values: dict[Any, np.ndarray]) -> np.ndarray:
    """A node's value with one dim for each label of the scores."""
    value = values[node.var]
    kept = [dim for dim, label in enumerate(node.labels) if label]
    value = value.reshape([value.shape[dim] for dim in kept])
    labels = [node.labels[dim][0] for dim in kept]
    shape = [1] * 4
    for label, size in zip(labels, value.shape, strict=True):
        shape[label] = size
    return value.transpose(np.argsort(labels)).reshape(shape)


def held(function: Any, *args: Any) -> KernelForm:
    """The form of an attention, held against its logits."""
    found, values = taken(function, *args)
    form = kernel_form(found)
    scores, logits = matrix(found.scores, values), matrix(found.logits, values)
    query, key = found.label("query"), found.label("key")
    assert (query, key) == (2, 3)
    formula = form.scale * scores + sum(factor * matrix(node, values) for node, factor in form.added)
    i, j = np.arange(logits.shape[2])[:, None], np.arange(logits.shape[3])
    seen = np.ones(logits.shape, bool)
    if form.causal:
        seen &= (j <= i) & (j > i - (form.window or len(j)))
    assert form.window is None or form.causal
    for node, inverted in form.masks:
        seen &= (matrix(node, values) != 0) != inverted
    np.testing.assert_allclose(np.where(seen, formula, 0), np.where(seen, logits, 0), rtol=1e-5, atol=1e-5)
    assert (logits[~seen] <= HIDDEN).all() and (formula[seen] > HIDDEN).all()
    return form


def test_scales_multiply() -> None:
    assert held(with_logits(lambda s: s / 4 * 6), Q, K, V).scale == 1.5
    assert held(with_logits(lambda s: 3 * s), Q, K, V) == KernelForm(3.0, False, None, (), ())


def test_what_is_added_is_scaled_with_what_comes_behind_it() -> None:
    form = held(with_logits(lambda s, b: (s / 2 + b) * 3), Q, K, V, BIAS)
    assert form.scale == 1.5 and [factor for _, factor in form.added] == [3.0]
    form = held(with_logits(lambda s, b, row: (b + s) / 4 + row[:, None, None]), Q, K, V, BIAS, ROW)
    assert form.scale == 0.25 and sorted(factor for _, factor in form.added) == [0.25, 1.0]
    assert {node.var.aval.shape for node, _ in form.added} <= {
        (H, S, KEYS),
        (B, KEYS),
        (B, 1, 1, KEYS),
        (1, H, S, KEYS),
    }


@pytest.mark.parametrize(
    ("mask", "causal", "window"),
    [
        (lambda i, j: i >= j, True, None),
        (lambda i, j: ~(j > i), True, None),
        (lambda i, j: (i >= j) & (i < j + 3), True, 3),
        (lambda i, j: (i >= j) & (i - j < 1), True, 1),
        (lambda i, j: (i >= j) & (i - j < S), True, None),  # a window of all there is
        (lambda i, j: i > j - 1, True, None),
        (lambda i, j: i + 1 >= j, False, None),
        (lambda i, j: i > j, False, None),
        (lambda i, j: abs(i - j) < 3, False, None),
        (lambda i, j: (i >= j) & (j != 2), False, None),
        (lambda i, j: (i >= j) & ((i < j + 3) | (i == 5)), False, None),
    ],
)
def test_masks_of_positions(mask: Any, causal: bool, window: int | None) -> None:
    form = held(with_logits(hiding(mask)), *SQUARE)
    assert (form.causal, form.window) == (causal, window) and bool(form.masks) != causal


def test_more_keys_than_queries_are_seen_from_the_first_on() -> None:
    """Query i sees keys up to i: a mask that is aligned at the ends is another."""
    for mask, causal in (
        (lambda i, j: i >= j, True),
        (lambda i, j: i + KEYS - S >= j, False),
        (lambda i, j: (i >= 0) & (j < 5), False),
    ):
        assert held(with_logits(hiding(mask)), Q, K, V).causal == causal


def test_masks_are_taken_apart_where_all_must_hold() -> None:
    def causal() -> Any:
        return jnp.arange(S)[:, None] >= jnp.arange(KEYS)

    def both(s: Any, seen: Any) -> Any:
        return jnp.where(causal() & (seen[:, None, None, :] != 0), s, -jnp.inf)

    form = held(with_logits(both), Q, K, V, np.maximum(SEGMENTS, [[1] + [0] * 7]))
    assert form.causal and [inverted for _, inverted in form.masks] == [False]

    def hidden(s: Any, seen: Any) -> Any:
        return jnp.where(~causal() | ~seen[:, None, None, :], -1e9, s)

    form = held(with_logits(hidden), Q, K, V, np.maximum(SEEN, [[True] + [False] * 7]))
    assert form.causal and [inverted for _, inverted in form.masks] == [True]

    def either(s: Any, seen: Any) -> Any:  # one mask: neither has to hold alone
        return jnp.where(causal() | seen[:, None, None, :], s, -1e9)

    form = held(with_logits(either), Q, K, V, SEEN)
    assert not form.causal and len(form.masks) == 1

    def product(s: Any, seen: Any) -> Any:
        return jnp.where(causal().astype(jnp.int32) * seen[:, None, None, :] == 0, -1e9, s)

    form = held(with_logits(product), Q, K, V, np.maximum(SEGMENTS, [[1] + [0] * 7]))
    assert form.causal and [inverted for _, inverted in form.masks] == [False]

    def numbers(s: Any, seen: Any) -> Any:
        return jnp.where((causal().astype(jnp.float32) * seen[:, None, None, :]).astype(bool), s, -1e9)

    form = held(with_logits(numbers), Q, K, V, np.maximum(SEGMENTS, [[1] + [0] * 7]))
    assert form.causal and [inverted for _, inverted in form.masks] == [False]


def test_segments_are_no_mask_of_positions() -> None:
    ids = SEGMENTS[:, :S]

    def function(q: Any, k: Any, v: Any, ids: Any) -> Any:
        seen = (ids[:, :, None] == ids[:, None, :])[:, None]
        return with_logits(lambda s: jnp.where(seen, s, -1e9))(q, k, v)

    form = held(function, *SQUARE, ids)
    assert not form.causal and len(form.masks) == 1


def test_layers_of_flax() -> None:
    """Which scale queries before the product, or scores behind it, and make masks of numbers."""

    def layer(q: Any, k: Any, v: Any) -> Any:
        return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones((B, S))))

    assert held(layer, *SQUARE) == KernelForm(1.0, True, None, (), ())

    def newer(q: Any, k: Any, v: Any) -> Any:
        return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(jnp.ones((B, S))))

    form = kernel_form(taken(newer, *SQUARE[:2], SQUARE[1])[0])
    assert form.causal and not form.masks


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: jnp.tanh(s), "go through `tanh`"),
        (lambda s: 1 / (s * s + 1), "go through"),
        (lambda s: s * s, "go through"),
        (lambda s: jax.lax.stop_gradient(s), "go through `stop_gradient`"),
        (lambda s: s + 1, "a number is added"),
        (lambda s: s * BIAS, "is not (one number|known)"),
        (lambda s: jnp.where(jnp.asarray(SEEN)[:, None, None], s, -3.0), "replaced by numbers that count"),
        (lambda s: jnp.where(s > 0, s, -1e9), "go through `select_n`|choose"),
    ],
)
def test_what_kernels_do_not_compute(change: Any, why: str) -> None:
    found, _ = taken(with_logits(change), Q, K, V)
    with pytest.raises(NoForm, match=why):
        kernel_form(found)


def test_softmaxes_that_kernels_do_not_compute() -> None:
    def attention(weigh: Any) -> Any:
        return lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", weigh(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)

    def one_more(s: Any) -> Any:
        exps = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
        return exps / (exps.sum(-1, keepdims=True) + 1)

    for weigh, why in (
        (one_more, "more than the sum"),
        (lambda s: jax.nn.softmax(s) * 2, "change on their way"),
        (lambda s: jnp.exp(s - s.max(-1, keepdims=True)) * 2 / jnp.exp(s).sum(-1, keepdims=True), ""),
    ):
        closed = simplify(jax.make_jaxpr(attention(weigh))(Q, K, V))
        attentions, _ = find_attentions(closed.jaxpr.eqns, closed.jaxpr.outvars)
        for found in attentions:
            with pytest.raises(NoForm, match=why):
                kernel_form(found)
        assert attentions or not why


def test_a_scale_that_differs_by_layer_is_no_one_number() -> None:
    found, _ = taken(with_logits(lambda s: s * 0.25), Q, K, V)
    literals = [
        (id(eqn), at) for eqn, _ in found.steps.values() for at, x in enumerate(eqn.invars) if hasattr(x, "val")
    ]
    assert kernel_form(found).scale == 0.25 and literals
    with pytest.raises(NoForm, match="differs from layer to layer"):
        kernel_form(found, literals)
