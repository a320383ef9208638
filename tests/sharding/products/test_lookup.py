"""Lookups in split tables and picks from a split dim, against the same gather on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cjax.audit import audit
from cjax.mesh import build_mesh
from cjax.sharding.products.lookup import is_lookup, look_up, pick, picked_dim

BATCH, SEQ, VOCAB, EMBED = 8, 6, 101, 10  # the vocabulary divides by nothing


def mesh() -> Mesh:
    return build_mesh({"row": 2, "col": 2}, jax.devices()[:4])


def gathers(function: Callable[..., Any], *shapes: Any) -> list[Any]:
    """The gather equations of a function's jaxpr."""

    def walk(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in jex.jaxprs_in_params(eqn.params):
                yield from walk(getattr(inner, "jaxpr", inner))

    return [e for e in walk(jax.make_jaxpr(function)(*shapes).jaxpr) if e.primitive.name == "gather"]


def some_indices(size: int, *shape: int, outside: bool) -> np.ndarray:
    """Indices that hit the first, the last and, where asked for, what is not there, on both sides."""
    found = np.random.default_rng(2).integers(0, size, shape).astype(np.int32)
    corners = [0, size - 1, *([-1, -300, size, size + 1, 3 * size] if outside else [])]
    found.reshape(-1)[: len(corners)] = corners
    return found


def assert_same(eqn: Any, given: Callable[..., Any], operand: np.ndarray, indices: np.ndarray) -> None:
    """Value and gradient against the equation itself."""

    def plain(operand: jax.Array) -> jax.Array:
        return eqn.primitive.bind(operand, indices, **eqn.primitive.get_bind_params(eqn.params))

    with jax.enable_x64(True):
        wanted, pull_wanted = jax.vjp(plain, operand)
        found, pull = jax.vjp(jax.jit(lambda operand: given(operand, jnp.asarray(indices))), operand)
        seed = np.random.default_rng(1).standard_normal(wanted.shape)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_allclose(pull(jnp.asarray(seed))[0], pull_wanted(jnp.asarray(seed))[0], rtol=1e-12)


MODES = ["clip", "fill", "promise_in_bounds"]


# -- rows of a table --------------------------------------------------------------------------------------------------
def take(axis: int, mode: str) -> Any:
    shape = (VOCAB, EMBED) if axis == 0 else (EMBED, VOCAB)
    with jax.enable_x64(True):
        ids, table = jax.ShapeDtypeStruct((BATCH, SEQ), np.int32), jax.ShapeDtypeStruct(shape, np.float64)
        (eqn,) = gathers(lambda t, i: t.at[(i,) if axis == 0 else (slice(None), i)].get(mode=mode), table, ids)
    return eqn


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("axis", "spec"), [(0, P("row", "col")), (0, P("row", None)), (0, P(("row", "col"), None)), (1, P("col", "row"))]
)
def test_rows_of_a_split_table(axis: int, spec: P, mode: str) -> None:
    eqn = take(axis, mode)
    assert is_lookup(eqn) and picked_dim(eqn) is None
    table = np.random.default_rng(0).standard_normal(eqn.invars[0].aval.shape)
    indices = some_indices(VOCAB, BATCH, SEQ, outside=mode != "promise_in_bounds")[..., None]
    rows = P("row", None, None)
    assert_same(eqn, lambda t, i: look_up(eqn, t, i, spec, rows, mesh()), table, indices)


def test_a_table_is_gathered_once_and_its_gradient_scattered() -> None:
    """Along the dim looked up, and no further: features stay where they are, and rows come from the own batch."""
    eqn, size = take(0, "fill"), 104

    def loss(table: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.tanh(look_up(eqn, table, indices, P("row", "col"), P("row", None, None), mesh())).sum()

    shapes = jax.ShapeDtypeStruct((size, EMBED), np.float32), jax.ShapeDtypeStruct((BATCH, SEQ, 1), np.int32)
    places = [jax.NamedSharding(mesh(), spec) for spec in (P("row", "col"), P("row", None, None))]
    step = jax.jit(jax.grad(loss), in_shardings=places, out_shardings=places[0])
    facts = audit(step.lower(*shapes).compile(), mesh())
    assert sorted((c.kind, c.axes) for c in facts.collectives) == [
        ("all-gather", ("row",)), ("reduce-scatter", ("row",)),
    ]  # fmt: skip
    assert facts.moved() == 2 * 4 * size * EMBED / 4


# -- one entry for each row -------------------------------------------------------------------------------------------
def along(mode: str, dtype: Any = np.float64, axis: int = -1) -> Any:
    shape = [BATCH, SEQ]
    shape.insert(axis % 3, VOCAB)
    targets = [1 if n == VOCAB else n for n in shape]
    with jax.enable_x64(True):
        (eqn,) = gathers(
            lambda x, i: jnp.take_along_axis(x, i, axis=axis, mode=mode),  # negative ones count from the end
            jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(targets, np.int32),
        )  # fmt: skip
    return eqn


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", [P("row", None, "col"), P(None, None, "col"), P(None, None, ("row", "col"))])
def test_one_entry_of_a_split_dim(spec: P, mode: str) -> None:
    eqn = along(mode)
    assert picked_dim(eqn) == 2 and not is_lookup(eqn)
    logits = np.random.default_rng(0).standard_normal((BATCH, SEQ, VOCAB))
    indices = some_indices(VOCAB, *eqn.invars[1].aval.shape, outside=mode != "promise_in_bounds")
    assert_same(eqn, lambda x, i: pick(eqn, x, i, spec, 2, mesh()), logits, indices)


def test_a_pick_from_a_dim_in_the_middle() -> None:
    eqn = along("fill", axis=1)
    assert picked_dim(eqn) == 1
    logits = np.random.default_rng(0).standard_normal((BATCH, VOCAB, SEQ))
    indices = some_indices(VOCAB, *eqn.invars[1].aval.shape, outside=True)
    assert_same(eqn, lambda x, i: pick(eqn, x, i, P("row", "col", None), 1, mesh()), logits, indices)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_a_pick_of_integers_is_filled_as_jax_fills_it(dtype: Any) -> None:
    eqn = along("fill", dtype)
    numbers = np.arange(BATCH * SEQ * VOCAB, dtype=dtype).reshape(BATCH, SEQ, VOCAB)
    indices = some_indices(VOCAB, *eqn.invars[1].aval.shape, outside=True)
    given = jax.jit(lambda x, i: pick(eqn, x, i, P("row", None, "col"), 2, mesh()))(numbers, indices)
    np.testing.assert_array_equal(given, eqn.primitive.bind(numbers, indices, **eqn.params))


def test_a_pick_moves_one_number_for_each_row() -> None:
    eqn = along("fill", np.float32)
    shapes = jax.ShapeDtypeStruct((BATCH, SEQ, 104), np.float32), eqn.invars[1].aval
    places = [jax.NamedSharding(mesh(), spec) for spec in (P("row", None, "col"), P("row", None, None))]
    step = jax.jit(lambda x, i: pick(eqn, x, i, P("row", None, "col"), 2, mesh()), in_shardings=places)
    facts = audit(step.lower(shapes[0], jax.ShapeDtypeStruct(shapes[1].shape, np.int32)).compile(), mesh())
    assert facts.moved(axes=["col"]) == facts.moved() == 2 * (1 / 2) * 4 * BATCH * SEQ / 2


# -- what is neither --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i, i],  # of two dims at once
        lambda x, i: jax.lax.dynamic_slice_in_dim(x, i[0, 0], 3),
        lambda x, i: jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, 3))(x[:BATCH], i[:, 0]),
    ],
)
def test_other_gathers_are_left_alone(function: Callable[..., Any]) -> None:
    shapes = jax.ShapeDtypeStruct((VOCAB, VOCAB), np.float32), jax.ShapeDtypeStruct((BATCH, SEQ), np.int32)
    for eqn in gathers(function, *shapes):
        assert not is_lookup(eqn) and picked_dim(eqn) is None
