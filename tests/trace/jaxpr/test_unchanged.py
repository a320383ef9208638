"""Results that are an operand as it is, through calls, loops and branches; and those that are not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cjax.trace.jaxpr.unchanged import unchanged

W, X = jnp.ones((3, 4)), jnp.ones(4)
HANDED: dict[str, Callable[..., Any]] = {
    "itself": lambda w, x: w,
    "a call": lambda w, x: jax.jit(lambda w, x: (w, x * 2))(w, x)[0],
    "remat": lambda w, x: jax.checkpoint(lambda w, x: (w, jnp.sin(x)))(w, x)[0],
    "rows of a loop": lambda w, x: lax.scan(lambda c, row: (c + row, row), x, w)[1],
    "rows the other way": lambda w, x: lax.scan(lambda c, row: (c + row, row), x, w, reverse=True)[1],
    "a carry": lambda w, x: lax.scan(lambda c, row: ((c[0], c[1] + row), None), (w, x), w)[0][0],
    "while": lambda w, x: lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0], c[1] * 2), (w, x))[0],
    "branches": lambda w, x: lax.cond(x.sum() > 0, lambda w, x: (w, x), lambda w, x: (w, x * 2), w, x)[0],
    "a barrier": lambda w, x: lax.optimization_barrier((w, x))[0],
}
CHANGED: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda w, x, v: w * 1.5,
    "a call": lambda w, x, v: jax.jit(lambda w, x: (w + x, x))(w, x)[0],
    "rows of a loop": lambda w, x, v: lax.scan(lambda c, row: (c, row * 2), x, w)[1],
    "rows in another place": lambda w, x, v: lax.scan(lambda c, row: (row, c), x, w)[1],
    "carries that change places": lambda w, x, v: lax.scan(lambda c, _: ((c[1], c[0]), None), (w, v), None, length=3)[
        0
    ][0],
    "the other branch": lambda w, x, v: lax.cond(x.sum() > 0, lambda w, v: w, lambda w, v: v, w, v),
    "one branch": lambda w, x, v: lax.cond(x.sum() > 0, lambda w: w * 2, lambda w: w, w),
    "while": lambda w, x, v: lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[1], c[0]), (w, v))[0],
}


@pytest.mark.parametrize("name", HANDED)
def test_what_is_handed_through(name: str) -> None:
    jaxpr = jax.make_jaxpr(HANDED[name])(W, X).jaxpr
    assert unchanged(jaxpr) == [jaxpr.invars[0]]


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_not(name: str) -> None:
    jaxpr = jax.make_jaxpr(CHANGED[name])(W, X, 2 * W).jaxpr
    assert unchanged(jaxpr)[0] not in jaxpr.invars
