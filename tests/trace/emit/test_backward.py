"""A derivative taken apart gives what `jax.vjp` gives, and saves little; weights wait for the second half."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.trace.emit.backward import Derivative

ROWS, WIDTH, HIDDEN = 6, 4, 10
RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=s).astype(np.float32) for s in ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,))]
FIXED = [RNG.random((ROWS, 1)) > 0.3, np.int32(2)]
MOVING = [np.int32(5), RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)]  # what has no gradient comes first


def layer(weights: Any, fixed: Any, moving: Any) -> Any:
    up, bias, down, scale = weights
    mask, index = fixed
    count, x = moving
    normed = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * scale
    hidden = jax.nn.gelu(normed.astype(jnp.bfloat16).astype(jnp.float32) @ up + bias)
    return [count + 1, x + jnp.where(mask, hidden @ down, 0) * index]


def wanted(gradient: Any) -> Any:
    out, pull = jax.vjp(lambda w, x: layer(w, FIXED, [MOVING[0], x])[1], WEIGHTS, MOVING[1])
    return out, *pull(gradient)


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_both_ways_give_the_gradients(remat: bool) -> None:
    derivative = Derivative(jax.checkpoint(layer) if remat else layer, WEIGHTS, FIXED, MOVING)
    gradient = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
    out, weights, moving = wanted(gradient)
    given, saved = derivative.forward(WEIGHTS, FIXED, MOVING)
    np.testing.assert_allclose(given[1], out, rtol=1e-6)
    assert given[0] == 6
    assert [(s.shape, s.dtype) for s in derivative.saved] == [(s.shape, s.dtype) for s in saved]
    whole = derivative.both(WEIGHTS, FIXED, saved, [np.int32(0), gradient])
    first, crossing = derivative.backward(WEIGHTS, FIXED, saved, [np.int32(0), gradient])
    second = derivative.weight_gradients(WEIGHTS, FIXED, saved, crossing)
    for of_moving, of_weights in (whole, (first, second)):
        assert of_moving[0].shape == () and of_moving[0] == 0
        np.testing.assert_allclose(of_moving[1], moving, rtol=1e-5, atol=1e-6)
        for a, b in zip(of_weights, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def products(function: Any, *args: Any) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("dot_general")


def test_each_half_multiplies_its_own_matrices() -> None:
    derivative = Derivative(layer, WEIGHTS, FIXED, MOVING)
    _, saved = derivative.forward(WEIGHTS, FIXED, MOVING)
    gradient = [np.int32(0), np.ones((ROWS, WIDTH), np.float32)]
    assert products(lambda s, g: derivative.backward(WEIGHTS, FIXED, s, g), saved, gradient) == 2
    _, crossing = derivative.backward(WEIGHTS, FIXED, saved, gradient)
    assert products(lambda s, c: derivative.weight_gradients(WEIGHTS, FIXED, s, c), saved, crossing) == 2
    assert products(lambda s, g: derivative.both(WEIGHTS, FIXED, s, g), saved, gradient) == 4


def test_saves_what_was_handed_in_and_results_of_matmuls_and_reductions() -> None:
    """Of the hidden width, one array: not the gelu's own steps, nor a weight, nor a rounded copy of one."""
    shapes = [s.shape for s in Derivative(layer, WEIGHTS, FIXED, MOVING).saved]
    assert shapes.count((ROWS, HIDDEN)) == 1 and shapes.count((ROWS, WIDTH)) == 1
    assert not {w.shape for w in WEIGHTS} & set(shapes)
    assert sum(len(shape) > 1 and shape[1] > 1 for shape in shapes) == 2, shapes


@jax.custom_jvp
def bell(x: Any) -> Any:
    return jnp.exp(-x * x)


bell.defjvps(lambda t, out, x: -2 * x * out * t)


@jax.custom_jvp
def risen(x: Any) -> Any:
    """The integral of `bell`, whose derivative calls what has one of its own."""
    return jax.lax.erf(x) * np.float32(np.sqrt(np.pi) / 2)


risen.defjvps(lambda t, out, x: bell(x) * t)


def test_a_derivative_that_calls_what_goes_by_element_saves_none_of_it() -> None:
    """As the derivative of erfc does under JAX 0.12."""

    def of(weights: Any, fixed: Any, moving: Any) -> Any:
        up, _, down, _ = weights
        return [moving[0], risen(moving[1] @ up) @ down]

    derivative = Derivative(of, WEIGHTS, [], MOVING)
    assert [s.shape for s in derivative.saved] == [(ROWS, WIDTH), (ROWS, HIDDEN)]
    gradient = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
    _, saved = derivative.forward(WEIGHTS, [], MOVING)
    (_, x), weights = derivative.both(WEIGHTS, [], saved, [np.int32(0), gradient])
    _, pull = jax.vjp(lambda w, x: of(w, [], [MOVING[0], x])[1], WEIGHTS, MOVING[1])
    for given, right in zip([*weights, x], [*pull(gradient)[0], pull(gradient)[1]], strict=True):
        np.testing.assert_allclose(given, right, rtol=1e-5, atol=1e-6)


def crossing_of(layer: Any, shapes: Any) -> list[Any]:
    """What crosses over between the two halves of a layer's derivative, which make what both make at once."""
    weights = [RNG.normal(size=shape).astype(np.float32) for shape in shapes]
    moving = [RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)]
    derivative = Derivative(layer, weights, [], moving)
    _, saved = derivative.forward(weights, [], moving)
    gradient = [np.ones((ROWS, WIDTH), np.float32)]
    _, whole = derivative.both(weights, [], saved, gradient)
    _, handed = derivative.backward(weights, [], saved, gradient)
    for mine, theirs in zip(derivative.weight_gradients(weights, [], saved, handed), whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    return [(s.shape, s.dtype) for s in derivative.crossing]


def test_what_several_products_add_to_their_inputs_gradient_crosses_over_as_one() -> None:
    """Gradients of a scale and a shift take their sum: one by one, three would be kept, and reduced over devices."""

    def layer(weights: Any, fixed: Any, moving: Any) -> Any:
        scale, shift, *products, back = weights
        (x,) = moving
        read = (x * scale + shift).astype(jnp.bfloat16)
        query, key, value = ((read @ w.astype(jnp.bfloat16)).astype(jnp.float32) for w in products)
        return [x + (query * jnp.sin(key) + jnp.cos(value)) @ back]

    shapes = [(WIDTH,), (WIDTH,), *[(WIDTH, HIDDEN)] * 3, (HIDDEN, WIDTH)]
    crossing = crossing_of(layer, shapes)
    assert crossing.count(((ROWS, WIDTH), jnp.bfloat16)) == 1, crossing


def test_a_sum_crosses_over_where_it_takes_less_than_its_parts() -> None:
    """In float32 that of three products does, and that of one and what crosses over anyway does not."""

    def low(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    def layer(weights: Any, fixed: Any, moving: Any) -> Any:
        scales, shifts, products, back, up, down = weights
        x = moving[0] * scales[0] + shifts[0]
        query, key, value = (low(x, w) for w in products)
        x = (x + (query * jnp.sin(key) + jnp.cos(value)) @ back) * scales[1] + shifts[1]
        return [x + jnp.sin(low(x, up)) @ down]

    def split(weights: Any, fixed: Any, moving: Any) -> Any:
        return layer((weights[:2], weights[2:4], weights[4:7], *weights[7:]), fixed, moving)

    shapes = [*[(WIDTH,)] * 4, *[(WIDTH, HIDDEN)] * 3, (HIDDEN, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    crossing = crossing_of(split, shapes)
    assert crossing.count(((ROWS, WIDTH), jnp.bfloat16)) == 1, crossing
