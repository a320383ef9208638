"""Equations of equal layers are equal, and a derivative by hand counts with all that it can read."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cjax.trace.jaxpr.identity import equation_key
from cjax.trace.jaxpr.simplify import simplify

Function = Callable[[Any], Any]


def keys(function: Function) -> list[Any]:
    """Of all equations of a function applied twice, which JAX traces anew each time."""
    return [equation_key(eqn) for eqn in simplify(jax.make_jaxpr(lambda x: function(function(x)))(jnp.ones(4))).eqns]


def by_vjp(bwd: Any) -> Function:
    function = jax.custom_vjp(lambda x: x * 2.0)
    function.defvjp(lambda x: (x * 2.0, None), bwd)
    return function


def by_jvp(rule: Any) -> Function:
    function = jax.custom_jvp(lambda x: x * 2.0)
    function.defjvp(lambda primals, tangents: (primals[0] * 2.0, rule(None, tangents[0])[0]))
    return function


def bwd_of(scale: float, _: None, g: Any) -> Any:
    return (g * scale,)


def from_a_number(scale: float) -> Any:
    return lambda _, g: (g * scale,)


def from_a_dict(scale: float) -> Any:
    how = {"scale": scale}
    return lambda _, g: (g * how["scale"],)


def from_a_default(scale: float) -> Any:
    return lambda _, g, scale=scale: (g * scale,)


def from_a_keyword(scale: float) -> Any:
    def bwd(_: None, g: Any, *, scale: float = scale) -> Any:
        return (g * scale,)

    return bwd


def from_a_partial(scale: float) -> Any:
    return functools.partial(bwd_of, scale)


def from_a_partial_by_name(scale: float) -> Any:
    return functools.partial(lambda _, g, scale: (g * scale,), scale=scale)


def from_another_derivative(scale: float) -> Any:
    inner = jax.custom_jvp(lambda x: x)
    inner.defjvp(lambda primals, tangents: (primals[0], tangents[0] * scale))
    return lambda _, g: jax.vjp(inner, g)[1](g)


SOURCES = [
    from_a_number, from_a_dict, from_a_default, from_a_keyword, from_a_partial, from_a_partial_by_name,
    from_another_derivative,
]  # fmt: skip


@pytest.mark.parametrize("kind", [by_vjp, by_jvp])
@pytest.mark.parametrize("source", SOURCES)
def test_a_derivative_counts_with_what_it_closes_over(kind: Any, source: Any) -> None:
    first, same, other = (keys(kind(source(scale))) for scale in (1.0, 1.0, 3.0))
    assert first[0] == first[1] and len(first) == 2
    assert first == same and first != other


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x: Any, scale: Any) -> Any:
    return x * 2.0


scaled.defvjp(lambda x, scale: (x * 2.0, None), lambda scale, _, g: (g * scale,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def turned(x: Any, scale: Any) -> Any:
    return x * 2.0


turned.defjvp(lambda scale, primals, tangents: (primals[0] * 2.0, tangents[0] * scale))


@pytest.mark.parametrize("function", [scaled, turned])
@pytest.mark.parametrize("other", [3.0, -1.0, True, 1])
def test_arguments_that_are_not_differentiated_count(function: Any, other: Any) -> None:
    """A gradient that is reversed, or scaled layer by layer, shows nowhere but there."""
    first, same, second = (keys(lambda x, scale=scale: function(x, scale)) for scale in (1.0, 1.0, other))
    assert first[0] == first[1] and first == same and first != second


@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, lambda f: lambda x: jax.lax.scan(lambda y, _: (f(y), None), x, None, 2)[0]]
)
def test_numbers_within_bodies_count(wrap: Any) -> None:
    """Of an equation alone, literals are left to whoever rolls layers; what is in a body nobody can change."""
    first, same, other = (keys(wrap(lambda x, rate=rate: jnp.sin(x) * rate)) for rate in (0.5, 0.5, 0.25))
    assert first == same != other
    assert keys(lambda x: x * 0.5) == keys(lambda x: x * 0.25)


def test_keys_and_arrays_count_by_identity() -> None:
    for make in (lambda seed: jax.random.key(seed), lambda seed: jnp.full(4, seed)):
        held = make(1)
        first, same, other = (keys(by_vjp(lambda _, g, held=held: (held, g)[1:])) for held in (held, held, make(2)))
        assert first == same != other


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.selu, jax.nn.log_softmax, jnp.sinc,
        lambda x: x / jnp.linalg.norm(x), lambda x: jnp.logaddexp(x, 1.0), lambda x: jax.scipy.special.xlogy(x, x),
        jax.custom_gradient(lambda x: (x, jnp.sin)),
        lambda x: jax.vmap(jax.nn.relu)(x), lambda x: jax.jit(jax.nn.relu)(x), lambda x: jax.checkpoint(jax.nn.relu)(x),
        lambda x: jax.vmap(lambda y: scaled(y, 2.0))(x), lambda x: jax.grad(lambda y: jax.nn.relu(y).sum())(x),
        lambda x: jax.lax.scan(lambda y, _: (scaled(turned(y, 2.0), 2.0), None), x, None, length=2)[0],
        lambda x: jax.nn.dot_product_attention(*[x[None, :, None, None]] * 3)[0, :, 0, 0],
    ],
)  # fmt: skip
def test_layers_that_are_equal_have_equal_keys(function: Function) -> None:
    found = keys(function)
    assert found and found[: len(found) // 2] == found[len(found) // 2 :]
