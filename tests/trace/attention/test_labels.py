"""Labels follow elements: what an equation does to a dim of the scores is what it does to coordinates along it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from cjax.trace.attention.labels import Labels, incoming, outgoing

SIZES = {0: 2, 1: 3, 2: 5, 3: 7}


def equation(function: Any, *shapes: tuple[int, ...]) -> Any:
    """The last equation of a function of float arrays."""
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr.eqns[-1]


def shape_of(labels: Labels) -> tuple[int, ...]:
    return tuple(math.prod(SIZES[one] for one in label) for label in labels)


def coordinates(labels: Labels, along: int) -> np.ndarray:
    """Where each element is along a label; 0 throughout where no dim has it."""
    flat = [one for label in labels for one in label]
    found = np.indices([SIZES[one] for one in flat])[flat.index(along)] if along in flat else np.zeros(())
    return np.broadcast_to(found.reshape(shape_of(labels) if along in flat else (1,) * len(labels)), shape_of(labels))


def moved(eqn: Any, value: np.ndarray) -> np.ndarray:
    """The equation in NumPy."""
    shape = eqn.outvars[0].aval.shape
    match eqn.primitive.name:
        case "transpose":
            return value.transpose(eqn.params["permutation"])
        case "broadcast_in_dim":
            inner = [1] * len(shape)
            for dim, place in enumerate(eqn.params["broadcast_dimensions"]):
                inner[place] = value.shape[dim]
            return np.broadcast_to(value.reshape(inner), shape)
        case _:
            return value.reshape(shape)


# Each label at most once, in any order, some merged and some dims without one.
MATRICES = st.permutations(range(4)).flatmap(
    lambda order: st.lists(st.integers(0, 2), min_size=1, max_size=4).map(lambda cuts: _cut(order, cuts))
)


def _cut(order: Any, cuts: list[int]) -> Labels:
    rest, found = list(order), []
    for size in cuts:
        found.append(tuple(rest[:size]))
        rest = rest[size:]
    return tuple(found)


def views(draw: Any, labels: Labels) -> Any:
    """A view of an array with these dims, as (kind, function)."""
    shape = shape_of(labels)
    kind = draw(st.sampled_from(["transpose", "squeeze", "broadcast", "merge", "split"]))
    if kind == "transpose":
        order = draw(st.permutations(range(len(shape))))
        assume(order != sorted(order))
        return lambda x: lax.transpose(x, order)
    if kind == "squeeze":
        assume(1 in shape)
        return lambda x: lax.squeeze(x, [shape.index(1)])
    if kind == "broadcast":
        at = draw(st.integers(0, len(shape)))
        places = [dim + (dim >= at) for dim in range(len(shape))]
        return lambda x: lax.broadcast_in_dim(x, (*shape[:at], 4, *shape[at:]), places)
    if kind == "merge":
        assume(len(shape) > 1)
        at = draw(st.integers(0, len(shape) - 2))
        return lambda x: lax.reshape(x, (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))
    every = [SIZES[one] for label in labels for one in label]
    assume(every and tuple(every) != shape)
    return lambda x: lax.reshape(x, every)


@settings(max_examples=50)
@given(st.data(), MATRICES)
def test_labels_go_where_elements_go_and_back(data: Any, labels: Labels) -> None:
    eqn = equation(views(data.draw, labels), shape_of(labels))
    after = outgoing(eqn, {0: labels}, SIZES)
    assert after is not None and len(after) == len(eqn.outvars[0].aval.shape)
    for along in (one for label in labels for one in label):
        found = moved(eqn, coordinates(labels, along))
        plain = [n if label else 1 for label, n in zip(after, found.shape, strict=True)]
        wanted = coordinates(tuple(after), along).reshape(plain)
        np.testing.assert_array_equal(found, np.broadcast_to(wanted, found.shape))
    assert incoming(eqn, after, SIZES) == [labels]


def test_a_reshape_that_takes_a_label_apart_is_not_followed() -> None:
    eqn = equation(lambda x: x.reshape(3, 2, 5), (6, 5))
    sizes = {0: 6, 1: 5}
    assert outgoing(eqn, {0: ((0,), (1,))}, sizes) is None
    assert incoming(eqn, ((0,), (2,), (1,)), {0: 3, 1: 5, 2: 2}) == [((0, 2), (1,))]
    assert outgoing(equation(lambda x: x.reshape(10, 3), (6, 5)), {0: ((0,), (1,))}, sizes) is None
    assert outgoing(equation(lambda x: x.reshape(30), (6, 5)), {0: ((0,), ())}, sizes) is None, "a dim of another kind"


def test_dims_of_size_one_come_and_go() -> None:
    eqn = equation(lambda x: lax.reshape(x, (1, 3, 1, 5)), (3, 1, 5))
    assert outgoing(eqn, {0: ((1,), (), (2,))}, SIZES) == ((), (1,), (), (2,))


def test_element_by_element_operands_must_agree() -> None:
    eqn = equation(jnp.add, (3, 5), (3, 5))
    assert outgoing(eqn, {0: ((1,), (2,))}, SIZES) == ((1,), (2,))
    assert outgoing(eqn, {0: ((1,), ()), 1: ((), (2,))}, SIZES) == ((1,), (2,))
    assert outgoing(eqn, {0: ((1,), (2,)), 1: ((1,), (3,))}, SIZES) is None
    assert incoming(eqn, ((1,), (2,)), SIZES) == [((1,), (2,)), ((1,), (2,))]


def test_a_scalar_operand_is_on_no_dim() -> None:
    eqn = equation(lambda x: lax.select(jnp.bool_(True), x, x), (3, 5))
    assert incoming(eqn, ((1,), (2,)), SIZES) == [(), ((1,), (2,)), ((1,), (2,))]


def test_a_broadcast_dim_has_no_label_in_its_operand() -> None:
    eqn = equation(lambda x: lax.broadcast_in_dim(x, (3, 5), (0, 1)), (3, 1))
    assert incoming(eqn, ((1,), (2,)), SIZES) == [((1,), ())]


@pytest.mark.parametrize(
    "function", [lambda x: x[1:, :], lambda x: x[::-1], lambda x: lax.cumsum(x), lambda x: x.sum(0)]
)
def test_what_looks_at_other_places_is_not_followed(function: Any) -> None:
    eqn = equation(function, (3, 5))
    labels = ((1,), (2,))[: len(eqn.outvars[0].aval.shape)]
    assert outgoing(eqn, {0: ((1,), (2,))}, SIZES) is None
    assert incoming(eqn, labels, SIZES) is None


def test_what_is_made_of_nothing_can_be_made_again() -> None:
    eqn = equation(lambda: lax.broadcasted_iota(int, (3, 5), 1))
    assert incoming(eqn, ((1,), (2,)), SIZES) == []
