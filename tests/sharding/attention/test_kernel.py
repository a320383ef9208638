"""Attentions by a kernel: each is what its author wrote, or is left to its author's equations."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from kernels import plain

import cjax
from cjax.sharding.attention.kernel import attend_fused, fused_groups
from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.attention.form import NoForm, kernel_form
from cjax.trace.jaxpr.simplify import simplify

BATCH, LENGTH, HEADS, DEPTH = 2, 6, 4, 3
Function = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def found_in(function: Function, *args: Any) -> tuple[Any, Attention]:
    closed = simplify(jax.make_jaxpr(function)(*args))
    (attention,), _ = find_attentions(closed.jaxpr.eqns, closed.jaxpr.outvars)
    return closed, attention


def by_kernel(function: Function, *args: Any) -> Any:
    """A function whose one attention the kernel computes."""
    closed, attention = found_in(function, *args)
    (group,) = fused_groups([attention])
    inside = {id(eqn) for eqn in group.eqns}
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    done = False
    for eqn in closed.jaxpr.eqns:
        if id(eqn) not in inside:
            ins = [v.val if hasattr(v, "val") else values[v] for v in eqn.invars]
            outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
            values.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        if not done and all(var in values for var in group.ins):
            spec = PartitionSpec(*[None] * len(attention.query.labels))
            given = [values[v] for v in attention.group.ins]
            outs = attend_fused(group.of, given, {}, mesh=mesh, spec=spec, kernel=plain)
            assert not isinstance(outs, str), outs
            values.update(zip(group.outs, outs, strict=True))
            done = True
    return values[closed.jaxpr.outvars[0]]


PRESENT = jnp.arange(LENGTH) < jnp.array([[4], [6]])
FLAX: Any = nn.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=HEADS * DEPTH)


def of_flax(mask: Any) -> Function:
    params = FLAX.init(jax.random.key(0), draw(BATCH, LENGTH, 5))
    return lambda x: FLAX.apply(params, x[:, :, 0, :1].repeat(5, -1), mask=mask)


def by_hand(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """With a bias that depends on distance, scaled with the scores, and -inf in front of them."""
    distance = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)) * 0.1
    scores = (jnp.einsum("bqnh,bknh->nbqk", query, key) + distance) / 3.0
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    return jnp.einsum("nbqk,bknh->bqnh", jax.nn.softmax(scores), value)


def nnn(**options: Any) -> Function:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


PADDED = PRESENT[:, None, None, :]
CASES: dict[str, tuple[Function, int, tuple[bool, int | None]]] = {
    "plain": (nnn(scale=0.3), HEADS, (False, None)),
    "causal": (nnn(is_causal=True), HEADS, (True, None)),
    "grouped": (nnn(is_causal=True), 2, (True, None)),
    "window": (lambda *qkv: cjax.attention(*qkv, causal=True, window=2), 2, (True, 3)),
    "padded": (nnn(mask=PADDED), HEADS, (False, None)),
    "padded and causal": (nnn(mask=PADDED, is_causal=True), 2, (True, None)),
    "bias": (nnn(bias=draw(1, HEADS, LENGTH, LENGTH, seed=4)), HEADS, (False, None)),
    "bias by rows": (nnn(bias=draw(BATCH, 1, LENGTH, LENGTH, seed=4), is_causal=True), HEADS, (True, None)),
    "segments": (
        lambda *qkv: cjax.attention(*qkv, segment_ids=jnp.arange(LENGTH)[None] // jnp.array([[2], [3]])),
        2, (False, None),
    ),
    "by hand": (by_hand, HEADS, (True, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_the_author_wrote(name: str) -> None:
    function, key_heads, wanted = CASES[name]
    with jax.enable_x64(True):
        query, key, value = (
            jnp.asarray(draw(BATCH, LENGTH, n, DEPTH, seed=i), jnp.float64)
            for i, n in enumerate((HEADS, key_heads, key_heads))
        )
        form = kernel_form(found_in(function, query, key, value)[1])
        assert (form.causal, form.window) == wanted

        def total(how: Function) -> Function:
            return lambda *qkv: jnp.sin(how(*qkv)).sum()

        grads = [
            jax.jit(jax.grad(total(how), argnums=(0, 1, 2)))(query, key, value)
            for how in (function, lambda *qkv: by_kernel(function, *qkv))
        ]
        # jax.nn.dot_product_attention itself computes its softmax in float32.
        for mine, theirs in zip(*grads, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.full("None", "mask1")
@pytest.mark.parametrize("mask", [None, nn.make_causal_mask(PRESENT), nn.make_attention_mask(PRESENT, PRESENT)])
def test_flax_attention_too(mask: Any) -> None:
    x, function = draw(BATCH, LENGTH, HEADS, DEPTH), of_flax(mask)
    np.testing.assert_allclose(by_kernel(function, x), function(x), rtol=1e-5, atol=1e-6)


REFUSED: dict[str, Function] = {
    "tanh": lambda s: jax.nn.softmax(jnp.tanh(s)),
    "numbers that count": lambda s: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), s, -1.0)),
    "dropout": lambda s: jax.nn.softmax(s) * jax.random.bernoulli(jax.random.key(0), 0.9, s.shape),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_scaled_masked_softmax_is_left_alone(why: str) -> None:
    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        weights = REFUSED[why](jnp.einsum("bqnh,bknh->bnqk", query, key))
        return jnp.einsum("bnqk,bknh->bqnh", weights, value)

    args = [draw(BATCH, LENGTH, HEADS, DEPTH, seed=i) for i in range(3)]
    _, attention = found_in(function, *args)
    with pytest.raises(NoForm, match=why):
        kernel_form(attention)
    assert not fused_groups([attention])


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 12), st.integers(-3, 3))
def test_a_mask_is_called_causal_only_if_it_is(queries: int, keys: int, window: int, shift: int) -> None:
    def function(query: jax.Array, key: jax.Array) -> jax.Array:
        rows, columns = jnp.indices((queries, keys))
        seen = (columns <= rows + shift) & (columns > rows - window)
        return jax.nn.softmax(jnp.where(seen, query @ key.T, -1e9)) @ key

    _, attention = found_in(function, draw(queries, DEPTH), draw(keys, DEPTH))
    form = kernel_form(attention)
    rows, columns = np.indices((queries, keys))
    seen = (columns <= rows + shift) & (columns > rows - window)
    wanted = (columns <= rows) & (columns > rows - (form.window or queries))
    assert form.causal or form.masks or seen.all()
    if form.causal:
        np.testing.assert_array_equal(seen, wanted)
