"""Whose a value is, and behind how many passes it is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.jax_compat.core import ClosedJaxpr, Literal, make_jaxpr
from cjax.trace.jaxpr.simplify import simplify
from cjax.walk.owners import Owned, own


def owned(function: object, *shapes: tuple[int, ...]) -> tuple[ClosedJaxpr, Owned]:
    """Of as many layers as there are shapes, and a number outside."""
    closed = simplify(make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes), 1.0))  # type: ignore[arg-type]
    owner_of = {var: (0, layer) for layer, var in enumerate(closed.jaxpr.invars[:-1])}
    return closed, own(closed, owner_of, [atom for atom in closed.jaxpr.outvars if not isinstance(atom, Literal)][-1:])


def clipped(*args: jax.Array) -> list[jax.Array]:
    *layers, limit = args
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in layers))
    return [x * jnp.minimum(1, limit / norm) for x in layers] + [norm]


def test_a_sum_over_many_layers_is_one_round_and_one_number_of_each() -> None:
    closed, found = owned(clipped, *[(2,)] * 5)
    assert found.num_rounds == 1
    assert {owner: [var.aval.shape for var in read] for owner, read in found.exports[1].items()} == {
        (0, layer): [()] for layer in range(5)
    }
    *outs, norm = closed.jaxpr.outvars
    assert [found.owner[out] for out in outs if not isinstance(out, Literal)] == [(0, layer) for layer in range(5)]
    assert not isinstance(norm, Literal) and found.owner[norm] is None and found.round_of[norm] == 1


def test_terms_of_a_layer_are_added_up_before_they_are_exported() -> None:
    def total(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return sum([x.sum(), y.sum(), x.max(), y.max(), z], start=jnp.float32(2))

    closed, found = owned(total, (2,), (2,))
    assert all(len(read) == 1 for read in found.exports[1].values())
    names = [eqn.primitive.name for eqn in {id(eqn): eqn for eqn in found.made.values()}.values()]
    assert names.count("add") == 5, "as many as in the trace"


def test_what_waits_for_a_round_is_of_the_next() -> None:
    def twice(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        first = x.sum() + y.sum()
        return (x / first).max() + (y / first).max()

    closed, found = owned(twice, (2,), (2,))
    assert found.num_rounds == 2 and {len(read) for of in found.exports.values() for read in of.values()} == {1}


def test_a_result_outside_that_one_layer_makes_is_exported() -> None:
    closed, found = owned(lambda x, y, z: [y * 2, x.sum()], (2,), (2,))
    (copied,) = found.copies.values()
    assert not isinstance(copied, Literal) and found.owner[copied] is None and found.num_rounds == 1
    assert list(found.exports[1]) == [(0, 0)]


def test_results_outside_of_one_shape_are_each_its_own() -> None:
    closed = simplify(make_jaxpr(lambda x, y: [x.sum(), y.sum()])(jnp.ones(2), jnp.ones(2)))
    owner_of = {var: (0, layer) for layer, var in enumerate(closed.jaxpr.invars)}
    found = own(closed, owner_of, [atom for atom in closed.jaxpr.outvars if not isinstance(atom, Literal)])
    assert len(set(found.copies.values())) == 2
    reads = {found.made[copy].invars[0] for copy in found.copies.values() if not isinstance(copy, Literal)}
    assert reads == set(closed.jaxpr.outvars)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_only_sums_that_may_be_added_up_in_another_order_are(dtype: type) -> None:
    def total(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        a, b = x.astype(dtype).sum(), y.astype(dtype).sum()
        return ((a + b) + a * 2) + b * 2

    closed, found = owned(total, (2,), (2,))
    assert max(len(read) for read in found.exports[max(found.exports)].values()) <= 2


def test_a_part_of_a_sum_that_others_read_too_is_made() -> None:
    def both(x: jax.Array, y: jax.Array, z: jax.Array) -> list[jax.Array]:
        part = x.sum() + y.sum()
        return [x * part, part + x.max() + y.max() + z]

    closed, found = owned(both, (2,), (2,))
    made = set(found.made)
    for eqn in found.made.values():
        read = {v for v in eqn.invars if not isinstance(v, Literal)}
        assert read <= made | set(closed.jaxpr.invars), f"{eqn} reads what nobody makes"
