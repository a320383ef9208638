from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cjax.models.cross_entropy import classification, cross_entropy
from cjax.trace.dims.parts import Taken
from cjax.trace.dims.tables import Limits, index_limits
from cjax.trace.jaxpr.simplify import simplify


def limits(function: Callable[..., Any], *shapes: tuple[int, ...]) -> dict[int, Limits]:
    """Of a function of indices [3, 2] and tables of these shapes, which says the same of all that it looks up."""
    return {i: replace(one, part=None) for i, (one,) in parted(function, *shapes).items()}


def parted(function: Callable[..., Any], *shapes: tuple[int, ...]) -> dict[int, tuple[Limits, ...]]:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return index_limits(simplify(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((3, 2), jnp.int32), *structs)), [0])


@jax.custom_jvp
def looked_up(table: Any, indices: Any) -> Any:
    return table[indices]


looked_up.defjvp(lambda primals, tangents: (looked_up(*primals), tangents[0][primals[1]]))

LOOKUPS: dict[str, Callable[..., Any]] = {
    "brackets": lambda i, t: t[i],
    "take": lambda i, t: jnp.take(t, i, axis=0),
    "a part": lambda i, t: t[i[:, 1:]],
    "reshaped": lambda i, t: t[i.reshape(-1)],
    "transposed and widened": lambda i, t: t[i.T.astype(jnp.uint32)],
    "one of its halves": lambda i, t: t[jnp.split(i, 2, axis=1)[1]],
    "one after the other": lambda i, t: t[jax.lax.dynamic_slice_in_dim(i, 1, 1)],
    "in a derivative of its own": lambda i, t: looked_up(t, i),
    "along an axis": lambda i, t: jnp.take_along_axis(t, i, axis=0),
    "jitted": lambda i, t: jax.jit(lambda i: t[i])(i),
    "the smallest counts": lambda i, t, big: (t[i], big[i]),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_is_found(name: str) -> None:
    tables = [(7, 5) if name != "along an axis" else (7, 2), (9, 5)]
    assert limits(LOOKUPS[name], *tables[: LOOKUPS[name].__code__.co_argcount - 1]) == {0: Limits(7, -7)}


@pytest.mark.parametrize("num_classes", [7])
def test_labels_of_a_cross_entropy_are_indices(num_classes: int) -> None:
    def cross_entropy(i: Any, logits: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), i[..., None], axis=-1)

    assert limits(cross_entropy, (3, 2, num_classes)) == {0: Limits(num_classes, -num_classes)}


REPLACED: dict[str, tuple[Callable[..., Any], Limits]] = {
    "one number": (lambda i, t: t[jnp.where(i == -100, 0, i)], Limits(7, -7, frozenset([-100]))),
    "all but it": (lambda i, t: t[jnp.where(i != -1, i, 3)], Limits(7, -7, frozenset([-1]))),
    "two numbers": (lambda i, t: t[jnp.where(i == 9, 0, jnp.where(i == -9, 0, i))], Limits(7, -7, frozenset([9, -9]))),
    "negative ones": (lambda i, t: t[jnp.where(i < 0, 0, i)], Limits(7, -(2**63))),
    "negative ones, by what is outside": (lambda i, t: t[jnp.where(i >= 0, i, 7)], Limits(7, 0)),
    "in one lookup of two": (lambda i, t: t[jnp.where(i == -9, 0, i)] + t[i], Limits(7, -7)),
    "in a loop": (
        lambda i, t: jax.lax.map(jax.checkpoint(lambda row: t[jnp.where(row == 8, 0, row)]), i),
        Limits(7, -7, frozenset([8])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_before_the_lookup_may_be_anything(name: str) -> None:
    function, wanted = REPLACED[name]
    assert limits(function, (7, 5)) == {0: wanted}


@pytest.mark.parametrize("chunk", [None, 1])
def test_labels_of_our_own_losses(chunk: int | None) -> None:
    def by_position(i: Any, hidden: Any, table: Any) -> Any:
        return cross_entropy(hidden, i, lambda h: h @ table, chunk=chunk)

    def by_example(i: Any, logits: Any) -> Any:
        return classification(logits, i[:, 0])

    assert limits(by_position, (3, 2, 5), (5, 7)) == {0: Limits(7, 0, frozenset([-100]))}
    assert limits(by_example, (3, 7)) == {0: Limits(7, 0)}


OTHERS: dict[str, Callable[..., Any]] = {
    "another index": lambda i, t: t[i + 2],  # positions that start at 2: limits of their own
    "one before": lambda i, t: t[i - 1],
    "made to fit": lambda i, t: t[jnp.clip(i, 0, 6)],
    "replaced where another says so": lambda i, t: t[jnp.where(t[:3, :2] > 0, 0, i)],
    "of which one number is left": lambda i, t: t[jnp.where(i == 3, i, 0)],
    "carried through a loop": lambda i, t: jax.lax.scan(lambda c, _: (7 - c, t[c]), i, None, length=2)[1],
    "clipped by the lookup": lambda i, t: jnp.take(t, i, axis=0, mode="clip"),
    "only compared": lambda i, t: t * (i == 3).any(),
    "arithmetic": lambda i, t: t.sum() * i,
    "another's index": lambda i, t: t[jnp.arange(3)] * i.sum(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_lookup_of_the_index_itself_has_no_limit(name: str) -> None:
    assert limits(OTHERS[name], (7, 5)) == {}


def test_inputs_that_were_not_asked_for_have_none() -> None:
    closed = simplify(jax.make_jaxpr(lambda t, i, j: t[i] + t[j])(jnp.ones(7), jnp.zeros(3, int), jnp.zeros(3, int)))
    assert index_limits(closed, [2]) == {2: (Limits(7, -7),)}
    assert index_limits(closed, []) == {}


# -- parts of an input -------------------------------------------------------------------------------------------------
def row_by_row(i: Any, t: Any, big: Any) -> Any:
    return jax.lax.map(lambda row: t[row[:1]] + big[row[1:]], i)


COLUMNS: dict[str, Callable[..., Any]] = {
    "slices": lambda i, t, big: t[i[:, 0]] + big[i[:, 1]],
    "halves": lambda i, t, big: t[jnp.split(i, 2, axis=1)[0]] + big[jnp.split(i, 2, axis=1)[1]],
    "unstacked": lambda i, t, big: t[jnp.unstack(i, axis=1)[0]] + big[jnp.unstack(i, axis=1)[1]],
    "of a transpose": lambda i, t, big: t[i.T[0]] + big[i.T[1]],
    "of what is reshaped": lambda i, t, big: t[i[:, None].reshape(3, 2, 1)[:, 0]] + big[i[..., None][:, 1]],
    "in steps, and backwards": lambda i, t, big: t[i[:, ::2][:, 0]] + big[i[:, -1]],
    "at a place": lambda i, t, big: (
        t[jax.lax.dynamic_slice_in_dim(i, 0, 1, 1)] + big[jax.lax.dynamic_slice_in_dim(i, 9, 1, 1)]
    ),
    "turn by turn": row_by_row,
    "of which one has a mark": lambda i, t, big: t[jnp.where(i[:, 0] == -5, 0, i[:, 0])] + big[i[:, 1]],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_have_tables_of_their_own(name: str) -> None:
    (found,) = parted(COLUMNS[name], (7, 5), (90, 5)).values()
    parts = [one.part.slices for one in found if one.part is not None]
    assert [[range(2)[by] for by in part[1:]] for part in parts] == [[range(1)], [range(1, 2)]]
    assert [one.size for one in found] == [7, 90] and all(part[0] == slice(None) for part in parts)
    assert [sorted(one.others) for one in found] == [[-5] if "mark" in name else [], []]


def test_a_slice_of_a_slice_counts_from_the_first() -> None:
    whole, once, twice = Taken.all_of(1), (1, 8, 2), (1, 3, 1)
    found = whole.cut(0, *once, 8).cut(0, *twice, len(range(*once)))
    assert range(8)[found.slices[0]] == range(8)[slice(*once)][slice(*twice)]


def test_of_a_part_that_is_not_known_the_largest_table_is_the_limit() -> None:
    def either(i: Any, t: Any, big: Any) -> Any:
        at = (t[0, 0] > 0).astype(jnp.int32)
        return t[jax.lax.dynamic_slice_in_dim(i, at, 1, 1)].sum() + big[i[:, 1]].sum()

    (found,) = parted(either, (7, 5), (90, 5)).values()
    assert [(one.size, one.part is None) for one in found] == [(90, True), (90, False)]


# -- negative ones ---------------------------------------------------------------------------------------------------
def masked(i: Any, t: Any, mask: Any) -> Any:
    return (jnp.take_along_axis(t, i, axis=0) * mask).sum()


LEAST: dict[str, tuple[Callable[..., Any], int]] = {
    "a token": (lambda i, t: t[i], 0),
    "its padding is 0": (lambda i, t: t[i] * (i != 0)[..., None], 0),
    "a label, masked": (lambda i, t: masked(i, t[:, :2], i >= 0), -7),
    "by what is above -1": (lambda i, t: masked(i, t[:, :2], (i > -1).astype(jnp.float32)), -7),
    "by what is below 0": (lambda i, t: jnp.where((i < 0).reshape(-1), 0, t[i].sum(-1).reshape(-1)), -7),
    "by what is above a class": (lambda i, t: masked(i, t[:, :2], i >= 3), 0),
    "in a loop": (lambda i, t: jax.lax.map(lambda row: masked(row[None], t[:, :2], row[None] >= 0), i), -7),
    "in a branch": (lambda i, t: t[i].sum() + jax.lax.cond(t[0, 0] > 0, lambda i: (i < 0).sum(), lambda i: 0, i), -7),
    "counted": (lambda i, t: (t[i], i >= 0, 1.0), -7),
    "replaced": (lambda i, t: t[jnp.where(i < 0, 0, i)], -(2**63)),
    "one number replaced": (lambda i, t: t[jnp.where(i == -100, 0, i)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAST)
def test_negative_ones_are_for_those_who_look_for_them(name: str) -> None:
    function, least = LEAST[name]
    assert limits(function, (7, 5))[0].least == least


def test_a_number_that_the_author_tells_apart_may_be() -> None:
    found = limits(lambda i, t: masked(i, t[:, :2], i != -1), (7, 5))[0]
    assert (found.least, found.others) == (0, {-1})
