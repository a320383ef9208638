"""Stacks of layers, found in the traces of models written as plain functions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.repeats import RepeatedLayers, find_runs

Weight = tuple[jax.Array, jax.Array]
WIDTH = 6


def layer(x: jax.Array, weight: Weight, rate: float = 0.5) -> jax.Array:
    kernel, bias = weight
    return x + rate * jnp.tanh(x @ kernel + bias)


def other(x: jax.Array, weight: Weight) -> jax.Array:
    kernel, bias = weight
    return x * jax.nn.sigmoid(x @ kernel - bias)


def weights(number: int) -> list[Weight]:
    return [(jnp.ones((WIDTH, WIDTH)), jnp.ones(WIDTH)) for _ in range(number)]


def runs_of(function: Callable[..., Any], *args: Any) -> tuple[tuple[RepeatedLayers, ...], Any]:
    closed = simplify(jax.make_jaxpr(function)(*args))
    return find_runs(closed), closed


def chain(layers: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def model(x: jax.Array, weights: Sequence[Weight]) -> jax.Array:
        for function, weight in zip(layers, weights, strict=True):
            x = function(x, weight)
        return x

    return model


X = jnp.ones((2, WIDTH))


@pytest.mark.parametrize("depth", [2, 4, 12])
def test_a_stack_is_one_run(depth: int) -> None:
    (run,), closed = runs_of(chain([layer] * depth), X, weights(depth))
    assert run.repeats == depth
    assert run.period * depth == len(closed.jaxpr.eqns)
    index = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    groups = sorted(tuple(index[var] for var in group) for group in run.stacked)
    assert groups == [tuple(range(k, 2 * depth + 1, 2)) for k in (1, 2)], "kernels together, biases together"
    ((read, _, _, last),) = run.carries
    assert (read, last) == (closed.jaxpr.invars[0], closed.jaxpr.outvars[0])
    assert not run.outputs and not run.last_only and not run.literals


def test_head_and_tail_stay_outside() -> None:
    def model(x: jax.Array, weights: Sequence[Weight], head: jax.Array) -> jax.Array:
        return jax.nn.softmax(chain([layer] * 4)(jnp.sin(x) - x.mean(), weights) @ head).sum()

    (run,), closed = runs_of(model, X, weights(4), jnp.ones((WIDTH, 9)))
    assert run.repeats == 4
    assert run.start > 0 and run.stop < len(closed.jaxpr.eqns)


def test_two_kinds_in_turn_have_a_period_of_two() -> None:
    (run,), closed = runs_of(chain([layer, other] * 3), X, weights(6))
    assert run.repeats == 3
    assert len(run.stacked) == 4
    assert run.period * 3 == len(closed.jaxpr.eqns)


def test_two_stacks_are_two_runs() -> None:
    runs, _ = runs_of(chain([layer] * 3 + [other] * 4), X, weights(7))
    assert [run.repeats for run in runs] == [3, 4]
    assert runs[0].stop <= runs[1].start


def test_different_widths_are_no_stack() -> None:
    def model(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight + 1) * 2
        return x

    widths = [6, 7, 8, 9, 10]
    assert not runs_of(model, X, [jnp.ones((a, b)) for a, b in zip(widths, widths[1:], strict=False)])[0]


def test_a_chain_without_weights_is_no_stack() -> None:
    def model(x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = jnp.tanh(x * 2) + jnp.sin(x) - 1
        return x

    assert not runs_of(model, X)[0]


def test_a_short_chain_of_adds_is_no_stack_even_with_weights() -> None:
    """A loop over them would cost more than it saves."""
    runs, _ = runs_of(lambda x, a, b, c: x + a + b + c, X, *[jnp.ones(WIDTH)] * 3)
    assert not runs


def test_what_all_layers_share_is_not_stacked() -> None:
    def model(x: jax.Array, weights: Sequence[Weight], shared: jax.Array, mask: jax.Array) -> jax.Array:
        for weight in weights:
            x = layer(x, weight) @ shared + mask
        return x

    (run,), _ = runs_of(model, X, weights(4), jnp.ones((WIDTH, WIDTH)), jnp.ones(WIDTH))
    assert run.repeats == 4 and len(run.stacked) == 2


def test_layers_that_share_weights_in_pairs() -> None:
    pairs = weights(2)
    closed = simplify(jax.make_jaxpr(lambda x, w: chain([layer] * 4)(x, [w[0], w[0], w[1], w[1]]))(X, pairs))
    (run,) = find_runs(closed)
    first, second = closed.jaxpr.invars[1], closed.jaxpr.invars[3]
    assert run.repeats == 4 and (first, first, second, second) in run.stacked


def test_literals_that_differ_are_listed() -> None:
    rates = [0.1, 0.2, 0.3, 0.4]

    def model(x: jax.Array, weights: Sequence[Weight]) -> jax.Array:
        for weight, rate in zip(weights, rates, strict=True):
            x = layer(x, weight, rate)
        return x

    (run,), _ = runs_of(model, X, weights(4))
    (values,) = run.literals.values()
    assert [float(v) for v in values] == pytest.approx(rates)


def test_a_checkpointed_layer_is_a_period_of_one() -> None:
    (run,), _ = runs_of(chain([jax.checkpoint(layer)] * 4), X, weights(4))
    assert (run.period, run.repeats) == (1, 4)


def test_checkpointed_layers_that_differ_inside_are_not_one_stack() -> None:
    def scaled(rate: float) -> Callable[..., Any]:
        return jax.checkpoint(lambda x, weight: layer(x, weight, rate))

    runs, _ = runs_of(chain([scaled(r) for r in (0.1, 0.2, 0.3, 0.4)]), X, weights(4))
    assert all(run.repeats == 1 for run in runs) or not runs


def test_what_each_layer_leaves_behind_is_an_output() -> None:
    def model(x: jax.Array, weights: Sequence[Weight]) -> Any:
        seen = []
        for weight in weights:
            x = layer(x, weight)
            seen.append(x.mean())
        return x, seen

    (run,), closed = runs_of(model, X, weights(4))
    assert tuple(closed.jaxpr.outvars[1:]) in run.outputs


def test_what_only_the_last_layer_leaves_behind_is_kept_once() -> None:
    def model(x: jax.Array, weights: Sequence[Weight]) -> Any:
        for weight in weights:
            x, inner = layer(x, weight), x @ weight[0]
            x = x + jnp.sin(inner)
        return x, inner

    (run,), closed = runs_of(model, X, weights(4))
    assert [group[-1] for group in run.last_only] == [closed.jaxpr.outvars[1]] and not run.outputs


def test_layers_that_look_two_back_are_left_alone_or_read_right() -> None:
    """A carry from two layers before is no loop over one; nothing may be claimed that is not so."""

    def model(x: jax.Array, weights: Sequence[Weight]) -> jax.Array:
        before = x
        for weight in weights:
            x, before = layer(x, weight) + before, x
        return x

    runs, closed = runs_of(model, X, weights(6))
    for run in runs:
        assert all(len(group) == run.repeats for group in run.stacked)
        assert run.stop <= len(closed.jaxpr.eqns)


def test_a_skip_from_the_first_input_to_every_layer() -> None:
    """What the first layer is handed, all of them read: two parts for one variable, told apart in the second layer."""

    def model(x: jax.Array, weights: Sequence[Weight]) -> jax.Array:
        start = x
        for weight in weights:
            x = layer(x, weight) + start
        return x

    (run,), closed = runs_of(model, X, weights(4))
    ((initial, read, _, _),) = run.carries
    assert run.repeats == 4 and run.template == 1
    assert initial is closed.jaxpr.invars[0] and read is not initial


def test_a_first_layer_whose_weight_all_others_read() -> None:
    def model(x: jax.Array, weights: Sequence[Weight]) -> jax.Array:
        for weight in weights:
            x = layer(x, weight) @ weights[0][0]
        return x

    (run,), _ = runs_of(model, X, weights(4))
    assert run.repeats == 4 and len(run.stacked) == 2 and run.template == 1
