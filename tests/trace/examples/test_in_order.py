"""Rows that are sorted for experts and put back are their examples' own; averages of micro-batches say whether so."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cjax.trace.examples.verdict import lift_mean
from cjax.trace.jaxpr.simplify import simplify

ROWS, LENGTH, WIDTH, EXPERTS = 8, 3, 4, 3
Layer = Callable[[jax.Array, jax.Array], jax.Array]


def sort(x: jax.Array, top: int = 2) -> Any:
    tokens = x.reshape(-1, WIDTH)
    gates, which = lax.top_k(tokens[:, :EXPERTS], top)
    keys = which.reshape(-1)
    order = jnp.argsort(keys)
    return tokens, gates, keys, order, jnp.bincount(keys, length=EXPERTS)


def put_back(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens, gates, _, order, sizes = sort(x)
    made = lax.ragged_dot(tokens[order // 2], w, sizes)[jnp.argsort(order)]
    return (made.reshape(-1, 2, WIDTH) * gates[..., None]).sum(1)


def with_biases(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens, _, keys, order, sizes = sort(x, 1)
    return (jnp.tanh(lax.ragged_dot(tokens[order], w, sizes)) + w[:, 0][keys[order]])[jnp.argsort(order)]


def added(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens, gates, _, order, sizes = sort(x)
    made = lax.ragged_dot(tokens[order // 2], w, sizes) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[order // 2].add(made)


def added_to_tokens(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens, _, _, order, sizes = sort(x)
    return tokens.at[order // 2].add(lax.ragged_dot(tokens[order // 2], w, sizes))


def onto_ones(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens, _, _, order, sizes = sort(x)
    return jnp.ones_like(tokens).at[order // 2].add(lax.ragged_dot(tokens[order // 2], w, sizes))


def positions_first(x: jax.Array, w: jax.Array) -> jax.Array:
    return put_back(x.transpose(1, 0, 2), w)


def of_means(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each token is less the batch's mean."""
    return put_back(x - x.mean(0), w)


def by_all_tokens(x: jax.Array, w: jax.Array) -> jax.Array:
    """How many rows an expert has of all says how much they count."""
    _, _, keys, _, sizes = sort(x, 1)
    return put_back(x, w) * sizes[keys][:, None]


def few_of_each(x: jax.Array, w: jax.Array) -> jax.Array:
    """An expert takes four rows, and no more."""
    tokens, _, keys, order, sizes = sort(x, 1)
    place = jnp.arange(len(tokens)) - (jnp.cumsum(sizes) - sizes)[keys[order]]
    return (lax.ragged_dot(tokens[order], w, sizes) * (place < 4)[:, None])[jnp.argsort(order)]


def other_weights(x: jax.Array, w: jax.Array) -> jax.Array:
    """Weights that all examples make."""
    tokens, _, _, order, sizes = sort(x)
    return lax.ragged_dot(tokens[order // 2], w * tokens.mean(), sizes)[jnp.argsort(order)]


def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    """Rows that the number of examples divides."""
    tokens, _, _, order, sizes = sort(x)
    return lax.ragged_dot(tokens[order // 2] / len(x), w, sizes)[jnp.argsort(order)]


def scaled_sums(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens, _, _, order, sizes = sort(x)
    made = lax.ragged_dot(tokens[order // 2], w, sizes) / len(x)
    return jnp.zeros_like(tokens).at[order // 2].add(made)


def in_turns(x: jax.Array, w: jax.Array) -> jax.Array:
    """From its second turn on a loop sorts by what all examples have made."""
    tokens = x.reshape(-1, WIDTH)

    def turn(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        keys = state[:, :EXPERTS].argmax(-1)
        order = jnp.argsort(keys)
        made = lax.ragged_dot(tokens[order], w, jnp.bincount(keys, length=EXPERTS))[jnp.argsort(order)]
        return jnp.sort(made, axis=0), made

    return lax.scan(turn, tokens, None, length=2)[1][-1]


TOLD = [put_back, with_biases, added, added_to_tokens, onto_ones, positions_first]
OTHERS = [of_means, by_all_tokens, few_of_each, other_weights, scaled, scaled_sums, in_turns]


def loss(layer: Layer) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda w, x: jnp.mean(jnp.sin(layer(x, w)))


def kind(layer: Layer) -> str:
    w = jnp.ones((EXPERTS, WIDTH, WIDTH))
    traces = [simplify(jax.make_jaxpr(loss(layer))(w, jnp.ones((n, LENGTH, WIDTH)))) for n in (ROWS // 2, ROWS)]
    lifted = lift_mean(*traces, {1}, 1)
    return "noted" if lifted.couplings and not lifted.refused else lifted.kind


def differs(layer: Layer) -> float:
    """How far the average over two micro-batches is from the whole batch's loss."""
    w, x = (jax.random.normal(jax.random.key(0), shape) for shape in ((EXPERTS, WIDTH, WIDTH), (ROWS, LENGTH, WIDTH)))
    both = [loss(layer)(w, x[half]) for half in (slice(0, ROWS // 2), slice(ROWS // 2, None))]
    return float(abs(loss(layer)(w, x) - sum(both) / 2))


@pytest.mark.parametrize("layer", TOLD, ids=lambda layer: layer.__name__)
def test_an_example_is_alone_with_its_rows(layer: Layer) -> None:
    assert kind(layer) == "mean" and differs(layer) < 1e-5


@pytest.mark.parametrize("layer", OTHERS, ids=lambda layer: layer.__name__)
def test_what_all_examples_have_a_part_in_is_not_hidden(layer: Layer) -> None:
    assert kind(layer) != "mean" and differs(layer) > 1e-4
