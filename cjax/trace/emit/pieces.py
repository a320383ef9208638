"""Sums over pieces, whose gradients are made together with them: a loss over some positions at a time.

An author who puts `jax.checkpoint` around what each turn adds asks for less memory: only one piece's logits are there
at a time. The price is to make them again in the backward pass. But the derivative of a sum by each of its parts is
one. So each turn can make the gradients of its part at once, of which the backward pass is told the factor (as in Hsu
et al., Liger Kernel, 2024, for a cross-entropy).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Equation, Jaxpr, Literal, Var
from cjax.trace.jaxpr.own_derivative import backward, scales
from cjax.trace.jaxpr.primitives import facts_of, name_of, named
from cjax.trace.jaxpr.view import every_equation, opened, scan_of

Values = list[jax.Array]
Gradients = list[jax.Array | None]  # None of what has none
T = TypeVar("T")

_ADDS = named("add")


def adds_up(eqn: Equation) -> bool:
    """Whether a loop does nothing but add up what it makes again in the backward pass.

    >>> import jax, jax.numpy as jnp
    >>> part = jax.checkpoint(lambda total, x: (total + jnp.sum(jnp.exp(x)), None))
    >>> jaxpr = jax.make_jaxpr(lambda xs: jax.lax.scan(part, jnp.zeros(()), xs)[0])(jnp.ones((3, 2)))
    >>> adds_up(jaxpr.eqns[-1])
    True
    """
    loop = scan_of(eqn)
    if loop.num_carry != 1 or len(eqn.outvars) != 1:
        return False
    (carry,) = loop.carries(loop.body.invars)
    is_number = carry.aval.shape == () and jnp.issubdtype(carry.aval.dtype, jnp.floating)
    makes_again = any(facts_of(each).remat for each in loop.body.eqns)
    return is_number and makes_again and _only_added(loop.body, carry) and all(map(_scales, every_equation(loop.body)))


def _scales(eqn: Equation) -> bool:
    """Whether an equation's derivative makes twice of twice what it is handed: a part's is handed one, and not what the
    sum's is. One that its author wrote, to clip what it is handed, makes other numbers of it."""
    if name_of(eqn) != "custom_vjp_call":
        return True
    closed = backward(eqn)
    return closed is None or all(scales(closed, len(eqn.invars)))


def _only_added(jaxpr: Jaxpr, var: Var) -> bool:
    """Whether the one result is a sum of `var` and of what does not depend on it."""
    (out,) = jaxpr.outvars
    # The first that reads it: where that makes the result, nothing else that reads it is part of the sum.
    reader = next((eqn for eqn in jaxpr.eqns if var in eqn.invars), None)
    if reader is None or isinstance(out, Literal) or list(reader.outvars) != [out]:
        return False
    places = [place for place, v in enumerate(reader.invars) if v is var]
    if len(places) != 1:
        return False
    if facts_of(reader).remat:
        inner = opened(reader.params["jaxpr"])
        return _only_added(inner, inner.invars[places[0]])
    return name_of(reader) in _ADDS


def summed(
    part: Callable[[Values, Values], jax.Array],
    initial: jax.Array,
    consts: Values,
    xs: Values,
    reverse: bool,
    length: int | None = None,
) -> jax.Array:
    """`initial` and the sum of `part(consts, x)` over the pieces `x` of `xs`; where its gradient is asked for, parts
    are made once.

    Args:
      part: a number, from what all pieces read and one piece; may not read anything else that has a gradient.
      initial: to begin with.
      consts: what all pieces read.
      xs: pieces, on dim 0 of each array.
      reverse: from the last piece to the first.
      length: how many pieces there are; needed where `xs` are none.

    >>> x = jnp.arange(3.0)
    >>> jax.grad(lambda w: summed(lambda c, x: c[0] * x[0], jnp.zeros(()), [w], [x], False) ** 2)(2.0).item()
    36.0
    """

    def plain(initial: jax.Array, consts: Values, xs: Values) -> jax.Array:
        return lax.scan(lambda total, x: (total + part(consts, x), None), initial, xs, length, reverse)[0]

    def forward(initial: jax.Array, consts: Values, xs: Values) -> tuple[jax.Array, tuple[Values, Values]]:
        real = _real(consts)

        def turn(carry: tuple[jax.Array, Values], x: Values) -> tuple[tuple[jax.Array, Values], Values]:
            own = _real(x)

            def of(weights: Values, piece: Values) -> jax.Array:
                return part(_with(consts, real, weights), _with(x, own, piece))

            value, pull = jax.vjp(of, [consts[i] for i in real], [x[i] for i in own])
            of_consts, of_x = pull(jnp.ones_like(value))
            total, sums = carry
            return (total + value, [a + b for a, b in zip(sums, of_consts, strict=True)]), of_x

        zeros = [jnp.zeros_like(consts[i]) for i in real]
        (total, sums), of_xs = lax.scan(turn, (initial, zeros), xs, length, reverse)
        return total, (sums, of_xs)

    def backward(made: tuple[Values, Values], factor: jax.Array) -> tuple[jax.Array, Gradients, Gradients]:
        def scaled(values: Values, gradients: Values) -> Gradients:
            times = [_times(factor, g) for g in gradients]
            return _with(list[jax.Array | None]([None]) * len(values), _real(values), times)

        return factor, scaled(consts, made[0]), scaled(xs, made[1])

    found = jax.custom_vjp(plain)
    found.defvjp(forward, backward)
    return found(initial, consts, xs)


def _times(factor: jax.Array, gradient: jax.Array) -> jax.Array:
    """A gradient times a number, in the wider of both dtypes; a complex one stays complex."""

    def width(dtype: np.dtype) -> tuple[bool, int]:
        return jnp.issubdtype(dtype, jnp.complexfloating), dtype.itemsize

    wide = max(factor.dtype, gradient.dtype, key=width)
    return (factor.astype(wide) * gradient.astype(wide)).astype(gradient.dtype)


def _real(values: Sequence[jax.Array]) -> list[int]:
    """Which of them have a gradient."""
    return [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _with(values: Sequence[T], places: Sequence[int], others: Sequence[T]) -> list[T]:
    found = list(values)
    for place, other in zip(places, others, strict=True):
        found[place] = other
    return found
