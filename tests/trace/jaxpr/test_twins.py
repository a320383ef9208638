"""Which equation of a trace takes the place of one in another: the one that does the same with the same."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import ClosedJaxpr
from cjax.trace.jaxpr.twins import Twins


def trace(function: Callable[..., jax.Array], rows: int) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(jnp.ones((rows, 3)))


def found(one: ClosedJaxpr, two: ClosedJaxpr) -> list[str | None]:
    """For each equation, the name of its twin's primitive."""
    twins = Twins(one, two)
    return [None if (twin := twins[eqn]) is None else twin.primitive.name for eqn in one.eqns]


def test_equations_differ_in_shapes_and_numbers() -> None:
    one, two = (trace(lambda x: (x.sum() / len(x)).reshape(1), rows) for rows in (4, 2))
    twins = Twins(one, two)
    assert all(twins[eqn] is other for eqn, other in zip(one.eqns, two.eqns, strict=True))


def test_what_sums_over_other_dims_is_no_twin() -> None:
    one, two = trace(lambda x: jnp.sin(x.sum(0)), 3), trace(lambda x: jnp.sin(x.sum(1)), 3)
    assert found(one, two) == [None, "sin"]


def test_what_reads_one_value_is_no_twin_of_what_reads_two() -> None:
    def twice(x: jax.Array) -> jax.Array:
        y = jnp.sin(x)
        return y * y

    one, two = trace(twice, 4), trace(lambda x: jnp.sin(x) * jnp.sin(x), 2)
    assert [eqn.primitive.name for eqn in two.eqns] == ["sin", "sin", "mul"]
    assert found(one, two)[-1] is None


def test_inputs_that_change_places_tear_what_reads_them() -> None:
    x, y = jnp.ones(3), jnp.ones(3)
    one, two = jax.make_jaxpr(lambda x, y: x - y)(x, y), jax.make_jaxpr(lambda x, y: y - x)(x, y)
    assert found(one, one) == ["sub"] and found(one, two) == [None]


def test_constants_have_twins_too() -> None:
    numbers = [jnp.arange(rows, dtype=jnp.float32)[:, None] for rows in (4, 2)]
    one, two = (trace(lambda x, n=n: x * n, len(n)) for n in numbers)
    (const,) = one.jaxpr.constvars
    assert Twins(one, two).const(const) is two.consts[0]
