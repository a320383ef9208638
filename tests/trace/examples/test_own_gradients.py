"""Gradients that an author wrote by hand: what of them would be another number on a part of the rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from cjax.trace.examples.verdict import lift_mean
from cjax.trace.jaxpr.simplify import simplify

Backward = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def is_refused(backward: Backward) -> bool:
    """The verdict on a mean of `tanh(weight * row)`, of which `backward(weight, rows, gradients)` is the derivative."""

    @jax.custom_vjp
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(w * x)

    layer.defvjp(lambda w, x: (jnp.tanh(w * x), (w, x)), lambda kept, g: backward(*kept, g))

    def trace(rows: int):
        shapes = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((rows, 3), jnp.float32)
        return simplify(jax.make_jaxpr(lambda w, x: layer(w, x).mean())(*shapes))

    lifted = lift_mean(trace(8), trace(4), {1}, 1)
    assert not lifted.refused or "its author's own" in lifted.reason
    return lifted.refused


def slope(w: jax.Array, x: jax.Array) -> jax.Array:
    return 1 - jnp.tanh(w * x) ** 2


def test_each_rows_own_and_the_sum_for_what_they_share() -> None:
    assert not is_refused(lambda w, x, g: ((g * slope(w, x) * x).sum(0), g * slope(w, x) * w))


def test_what_is_made_for_the_rows_there_are_needs_no_gradient() -> None:
    """As the first of CTC's sums, from which its recursion goes on."""

    def trace(rows: int):
        shapes = jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((rows, 3), jnp.float32)
        first = jnp.full(3, -1e5)
        return simplify(
            jax.make_jaxpr(lambda w, x: jnp.logaddexp(first + 0 * jnp.zeros_like(x), w * x).mean())(*shapes)
        )

    assert lift_mean(trace(8), trace(4), {1}, 1).kind == "mean"


def test_what_has_no_gradient_is_right() -> None:
    assert not is_refused(lambda w, x, g: (jnp.zeros_like(w), g * slope(w, x) * w))
    assert not is_refused(lambda w, x, g: ((g * slope(w, x) * x).sum(0), jnp.zeros_like(x)))


@pytest.mark.parametrize(
    "backward",
    [
        lambda w, x, g: ((g * slope(w, x) * x).mean(0), g * slope(w, x) * w),  # a mean of what is to be summed
        lambda w, x, g: ((g * slope(w, x) * x).sum(0), jnp.clip(g, -1, 1) * slope(w, x) * w),  # parts' are larger
        lambda w, x, g: ((jnp.sign(g) * slope(w, x) * x).sum(0), g * slope(w, x) * w),
        lambda w, x, g: ((g * slope(w, x) * x).sum(0), g.mean(0) * slope(w, x) * w),  # other rows' gradients
        lambda w, x, g: ((slope(w, x) * x).sum(0), g * slope(w, x) * w),  # whatever is handed to it
    ],
)
def test_what_parts_would_change(backward: Backward) -> None:
    assert is_refused(backward)


def same(backward: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The same number, with `backward(number, gradient)` for what comes back."""
    made = jax.custom_vjp(lambda x: x)
    made.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return made


clipped = same(lambda x, g: jnp.clip(g, -0.1, 0.1))  # as in JAX's own pages
halved = same(lambda x, g: g / 2)
by_itself = same(lambda x, g: g * x)


@pytest.mark.parametrize(
    "loss, refused",
    [
        (lambda w, x: jnp.tanh(clipped(w) * x).mean(), True),  # parts' gradients are clipped, not their sum
        (lambda w, x: clipped(jnp.tanh(w * x).sum()) / x.size, True),
        (lambda w, x: jnp.tanh(halved(w) * x).mean(), False),
        (lambda w, x: halved(jnp.tanh(w * x).sum()) / x.size, False),
        (lambda w, x: by_itself(jnp.tanh(w * x).mean()), True),  # of the part's own mean
        (lambda w, x: jnp.tanh(by_itself(w) * x).mean(), False),
    ],
    ids=["clipped weight", "clipped sum", "halved weight", "halved sum", "mean by itself", "weight by itself"],
)
def test_where_no_operand_has_rows(loss: Callable[[jax.Array, jax.Array], jax.Array], refused: bool) -> None:
    shapes = [[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3,), (rows, 3))] for rows in (8, 4)]
    lifted = lift_mean(*(simplify(jax.make_jaxpr(loss)(*given)) for given in shapes), {1}, 1)
    assert lifted.refused is refused, lifted.reason
    assert not refused or "its author's own" in lifted.reason
