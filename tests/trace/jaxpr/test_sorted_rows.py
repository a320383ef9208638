"""Rows that are sorted and put back such that none sees another are told, and all others are not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.jaxpr.sorted_rows import sorted_rows

TOKENS, WIDTH, EXPERTS = 12, 4, 3
Layer = Callable[..., Any]


def sort(x: jax.Array, w: jax.Array, top: int = 2) -> Any:
    gates, which = lax.top_k(x[:, :EXPERTS], top)
    keys = which.reshape(-1)
    order = jnp.argsort(keys)
    return gates, keys, order, jnp.bincount(keys, length=EXPERTS), jnp.argsort(order)


def put_back(x: jax.Array, w: jax.Array) -> Any:
    gates, _, order, sizes, back = sort(x, w)
    return (lax.ragged_dot(x[order // 2], w, sizes)[back].reshape(TOKENS, 2, WIDTH) * gates[..., None]).sum(1)


def added(x: jax.Array, w: jax.Array) -> Any:
    gates, _, order, sizes, _ = sort(x, w)
    rows = jnp.tanh(lax.ragged_dot(x[order // 2], w, sizes)) * gates.reshape(-1)[order][:, None]
    return x.at[order // 2].add(rows)


def with_biases(x: jax.Array, w: jax.Array) -> Any:
    _, keys, order, sizes, back = sort(x, w)
    return (lax.ragged_dot(x[order // 2], w, sizes) + w[:, 0][keys[order]])[back]


def more_keys(x: jax.Array, w: jax.Array) -> Any:
    """Keys that have no weight are nobody's rows."""
    keys = lax.top_k(x, 1)[1].reshape(-1)
    order = jnp.argsort(keys)
    made = lax.ragged_dot(x[order], w, jnp.bincount(keys, length=EXPERTS))
    return jnp.where((keys < EXPERTS)[order][:, None], made, 0)[jnp.argsort(order)]


def counted_for_others(x: jax.Array, w: jax.Array) -> Any:
    """How many rows each key has is everybody's to read: all devices' together."""
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, sizes)[back] * sizes.max()


def other_rows(x: jax.Array, w: jax.Array) -> Any:
    """Rows in order meet rows as they come."""
    _, _, order, sizes, back = sort(x, w)
    return (lax.ragged_dot(x[order // 2], w, sizes) + jnp.repeat(x, 2, 0))[back]


def by_number(x: jax.Array, w: jax.Array) -> Any:
    """A row's place among all says what becomes of it, as where an expert takes so many and no more."""
    _, _, order, sizes, back = sort(x, w)
    return (lax.ragged_dot(x[order // 2], w, sizes) * (jnp.arange(2 * TOKENS) < 7)[:, None])[back]


def in_turn(x: jax.Array, w: jax.Array) -> Any:
    """A row sees those in front of it."""
    _, _, order, sizes, back = sort(x, w)
    return jnp.cumsum(lax.ragged_dot(x[order // 2], w, sizes), 0)[back]


def added_elsewhere(x: jax.Array, w: jax.Array) -> Any:
    """Rows are added to others than they came from."""
    _, _, order, sizes, _ = sort(x, w)
    return x.at[(order // 2 + 1) % TOKENS].add(lax.ragged_dot(x[order // 2], w, sizes))


def turned_round(x: jax.Array, w: jax.Array) -> Any:
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, sizes)[back[::-1]]


def not_put_back(x: jax.Array, w: jax.Array) -> Any:
    _, _, order, sizes, _ = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, sizes)


def put_back_elsewhere(x: jax.Array, w: jax.Array) -> Any:
    """To where the next row comes from."""
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, sizes)[(back + 1) % (2 * TOKENS)]


def order_read(x: jax.Array, w: jax.Array) -> Any:
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, sizes)[back] + order[:, None]


def places_meet_rows(x: jax.Array, w: jax.Array) -> Any:
    _, _, order, sizes, back = sort(x, w)
    return (lax.ragged_dot(x[order // 2], w, sizes) * order[:, None])[back]


def uncounted(x: jax.Array, w: jax.Array) -> Any:
    """Of how many bits a place has, nobody counts here where it is."""
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[lax.population_count(order) // 2], w, sizes)[back]


def order_handed_on(x: jax.Array, w: jax.Array) -> Any:
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, sizes)[back], order


def renamed(x: jax.Array, w: jax.Array) -> Any:
    """Keys below zero would be sorted in front of all groups."""
    keys = lax.top_k(x[:, :EXPERTS], 1)[1].reshape(-1) - 1
    order = jnp.argsort(keys)
    return lax.ragged_dot(x[order], w, jnp.bincount(keys, length=EXPERTS))[jnp.argsort(order)]


def other_sizes(x: jax.Array, w: jax.Array) -> Any:
    """An expert takes four rows at most."""
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, jnp.minimum(sizes, 4))[back]


def sizes_of_others(x: jax.Array, w: jax.Array) -> Any:
    """How many rows the keys of other numbers have."""
    _, keys, order, _, back = sort(x, w)
    return lax.ragged_dot(x[order // 2], w, jnp.bincount(EXPERTS - 1 - keys, length=EXPERTS))[back]


def clipped(x: jax.Array, w: jax.Array) -> Any:
    """Keys that have no weight count for the last that has one."""
    keys = lax.top_k(x, 1)[1].reshape(-1)
    order, sizes = jnp.argsort(keys), jnp.bincount(jnp.minimum(keys, EXPERTS - 1), length=EXPERTS)
    return lax.ragged_dot(x[order], w, sizes)[jnp.argsort(order)]


def clipped_where_they_are_added(x: jax.Array, w: jax.Array) -> Any:
    keys = lax.top_k(x, 1)[1].reshape(-1)
    order, sizes = jnp.argsort(keys), jnp.zeros(EXPERTS, int).at[keys].add(1, mode="clip")
    return lax.ragged_dot(x[order], w, sizes)[jnp.argsort(order)]


def by_a_number_of_the_batch(x: jax.Array, w: jax.Array) -> Any:
    _, _, order, sizes, back = sort(x, w)
    return lax.ragged_dot(x[(order + x[0, 0].astype(int)) // 2], w, sizes)[back]


def by_values(x: jax.Array, w: jax.Array) -> Any:
    order = jnp.argsort(x[:, 0])
    return lax.ragged_dot(x[order], w, jnp.array([4, 4, 4]))[jnp.argsort(order)]


TOLD = [put_back, added, with_biases, more_keys, counted_for_others]
NOT_TOLD = [
    other_rows, by_number, in_turn, added_elsewhere, not_put_back, put_back_elsewhere, order_read, order_handed_on,
    places_meet_rows, uncounted, clipped, clipped_where_they_are_added, by_a_number_of_the_batch, turned_round, renamed,
    other_sizes, sizes_of_others, by_values,
]  # fmt: skip


def found(layer: Layer) -> list[Any]:
    closed = simplify(jax.make_jaxpr(layer)(jnp.ones((TOKENS, WIDTH)), jnp.ones((EXPERTS, WIDTH, WIDTH))))
    return sorted_rows(closed.jaxpr.eqns, closed.jaxpr.outvars)


@pytest.mark.parametrize("layer", TOLD, ids=lambda layer: layer.__name__)
def test_no_row_sees_another(layer: Layer) -> None:
    (rows,) = found(layer)
    assert rows.num_keys == EXPERTS and len(rows.products) == 1 and rows.lookups
    assert bool(rows.additions) != bool(rows.inverses)


@pytest.mark.parametrize("layer", [put_back, added, with_biases, more_keys], ids=lambda layer: layer.__name__)
def test_a_part_of_the_tokens_comes_back_as_among_all(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (jax.random.normal(jax.random.key(0), shape) for shape in ((TOKENS, WIDTH), (EXPERTS, WIDTH, WIDTH)))
    whole = layer(x, w).reshape(TOKENS, -1)
    monkeypatch.setattr(f"{__name__}.TOKENS", 5)
    assert jnp.allclose(layer(x[3:8], w).reshape(5, -1), whole[3:8], atol=1e-5)


@pytest.mark.parametrize("layer", NOT_TOLD, ids=lambda layer: layer.__name__)
def test_a_row_may_see_another_or_its_place(layer: Layer) -> None:
    assert found(layer) == []
