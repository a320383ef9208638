"""Lookups in split tables and picks from a split dim, against the same gather on one device; and gradients of gathers
that nothing splits."""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from starts import begin

import cjax
from cjax.audit import audit
from cjax.mesh import build_mesh
from cjax.sharding.products import lookup
from cjax.sharding.products.lookup import (
    find_across,
    find_among,
    find_own,
    find_rows,
    in_int32,
    is_lookup,
    look_up,
    look_up_whole,
    pick,
    picked_dim,
)

BATCH, SEQ, VOCAB, EMBED = 8, 6, 101, 10  # the vocabulary divides by nothing


def mesh() -> Mesh:
    return build_mesh({"row": 2, "col": 2}, jax.devices()[:4])


def walk(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, and of those within."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from walk(getattr(inner, "jaxpr", inner))


def gathers(function: Callable[..., Any], *shapes: Any) -> list[Any]:
    """The gather equations of a function's jaxpr."""

    return [e for e in walk(jax.make_jaxpr(function)(*shapes).jaxpr) if e.primitive.name == "gather"]


def some_indices(size: int, *shape: int, outside: bool) -> np.ndarray:
    """Indices that hit the first, the last and, where asked for, what is not there, on both sides."""
    found = np.random.default_rng(2).integers(0, size, shape).astype(np.int32)
    corners = [0, size - 1, *([-1, -300, size, size + 1, 3 * size] if outside else [])]
    found.reshape(-1)[: len(corners)] = corners
    return found


def assert_same(eqn: Any, ours: Callable[..., Any], operand: np.ndarray, indices: np.ndarray) -> None:
    """Value and gradient against the equation itself."""

    def plain(operand: jax.Array) -> jax.Array:
        return eqn.primitive.bind(operand, indices, **eqn.primitive.get_bind_params(eqn.params))

    with jax.enable_x64(True):
        wanted, pull_wanted = jax.vjp(plain, operand)
        found, pull = jax.vjp(jax.jit(lambda operand: ours(operand, jnp.asarray(indices))), operand)
        seed = np.random.default_rng(1).standard_normal(wanted.shape)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_allclose(pull(jnp.asarray(seed))[0], pull_wanted(jnp.asarray(seed))[0], rtol=1e-12)


MODES = ["clip", "fill", "promise_in_bounds"]


# -- rows of a table --------------------------------------------------------------------------------------------------
def take(axis: int, mode: str, length: int = SEQ) -> Any:
    shape = (VOCAB, EMBED) if axis == 0 else (EMBED, VOCAB)
    with jax.enable_x64(True):
        ids, table = jax.ShapeDtypeStruct((BATCH, length), np.int32), jax.ShapeDtypeStruct(shape, np.float64)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [P("col", "row", None), P(None, ("col", "row"), None), P("row", None, None)])
def test_who_shares_a_table_looks_for_all_rows_that_its_axes_split(rows: P, mode: str) -> None:
    eqn, size, length = take(0, mode, 8), VOCAB, 8
    table = np.random.default_rng(0).standard_normal((size, EMBED))
    indices = some_indices(size, BATCH, length, outside=mode != "promise_in_bounds")[..., None]
    split, copies = P("row", None), P("col", "row", None)
    assert_same(eqn, lambda t, i: find_rows(eqn, t, i, split, rows, mesh()), table, indices)
    if rows[0] == "col":  # whoever has a copy has rows of its own
        each = lambda t: jnp.broadcast_to(t, (2, *t.shape))  # noqa: E731
        assert_same(eqn, lambda t, i: find_own(eqn, each(t), 1, i, copies, rows, mesh()), table, indices)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [P("row", None, None), P(None, ("depth", "row"), None)])
def test_rows_change_places_across_a_grid(axis: int, rows: P, mode: str) -> None:
    """The table is split by `col` where it is looked up, the result by `row` there, and neither divides."""
    eqn, length = take(axis, mode, 8), 8
    table = np.random.default_rng(0).standard_normal(eqn.invars[0].aval.shape)
    indices = some_indices(VOCAB, BATCH, length, outside=mode != "promise_in_bounds")[..., None]
    spec = P("col", "row") if axis == 0 else P("row", "col")
    grid = build_mesh({"depth": 2, "row": 2, "col": 2}, jax.devices())
    assert_same(eqn, lambda t, i: find_across(eqn, t, i, spec, rows, grid), table, indices)


def test_a_table_stays_where_rows_change_places() -> None:
    eqn = take(0, "fill", 8)

    def loss(table: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.tanh(find_across(eqn, table, indices, P("col", "row"), P("row", None, None), mesh())).sum()

    size, length = 104, 8
    shapes = jax.ShapeDtypeStruct((size, EMBED), np.float32), jax.ShapeDtypeStruct((BATCH, length, 1), np.int32)
    places = [jax.NamedSharding(mesh(), spec) for spec in (P("col", "row"), P("row", None, None))]
    step = jax.jit(jax.grad(loss), in_shardings=places, out_shardings=places[0])
    facts = audit(step.lower(*shapes).compile(), mesh())
    found = 4 * BATCH * length * EMBED / 4
    ids = 4 * BATCH * length / 2
    assert facts.moved("collective-permute") == 2 * found
    assert found < facts.moved(axes=["col"]) <= 2 * found and facts.moved(axes=["row"]) <= 2 * ids


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
    found = jax.jit(lambda x, i: pick(eqn, x, i, P("row", None, "col"), 2, mesh()))(numbers, indices)
    np.testing.assert_array_equal(found, eqn.primitive.bind(numbers, indices, **eqn.params))


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


# -- gathers that nothing splits --------------------------------------------------------------------------------------
def whole(eqn: Any, operand: Any, indices: Any) -> jax.Array:
    (found,) = look_up_whole(eqn, (operand, indices), eqn.params)
    return found


def as_it_stands(eqn: Any, operand: Any, indices: Any) -> jax.Array:
    return eqn.primitive.bind(operand, indices, **eqn.primitive.get_bind_params(eqn.params))


def pulled(function: Callable[[jax.Array], jax.Array], operand: Any, seed: Any) -> tuple[jax.Array, jax.Array]:
    """The value, and the gradient of what `seed` weighs it by."""
    found, pull = jax.vjp(function, operand)
    return found, pull(jnp.asarray(seed, found.dtype))[0]


def wide(x: Any) -> np.ndarray:
    """In float32: NumPy does not know the NaN of bfloat16 for one."""
    return np.asarray(x, np.float32)


def scatters(function: Callable[..., Any], *args: Any) -> int:
    return str(jax.make_jaxpr(jax.grad(lambda *args: function(*args).sum()))(*args)).count(" scatter-add[")


@pytest.mark.full("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_gradient_of_a_row_that_is_looked_up_often_is_rounded_once(dtype: Any) -> None:
    """Alone in bfloat16, a sum of equal numbers stands still at 256 of them."""
    number, size = 16384, 3e-3
    shapes = jax.ShapeDtypeStruct((2, 4), dtype), jax.ShapeDtypeStruct((number,), np.int32)
    (eqn,) = gathers(lambda table, ids: table[ids], *shapes)
    table, ids, seed = jnp.ones((2, 4), dtype), jnp.zeros((number, 1), np.int32), jnp.full((number, 4), size, dtype)
    _, plain = pulled(lambda table: as_it_stands(eqn, table, ids), table, seed)
    value, gradient = pulled(lambda table: whole(eqn, table, ids), table, seed)
    wanted = number * float(seed[0, 0])
    assert value.dtype == gradient.dtype == dtype
    assert np.abs(np.asarray(gradient, np.float64)[0] / wanted - 1).max() < 1e-2 and not np.any(gradient[1])
    assert np.abs(np.asarray(plain, np.float64)[0] / wanted - 1).max() > 0.1, "or this asks for nothing"


@pytest.mark.full
@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.integers(0, 2),
    st.sampled_from(MODES),
    st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32]),
)
def test_any_lookup_has_the_gradient_of_its_gather_in_float32(
    shape: list[int], rows: list[int], axis: int, mode: str, dtype: Any
) -> None:
    axis, rng = axis % len(shape), np.random.default_rng(0)
    outside = 0 if mode == "promise_in_bounds" else 3
    ids = rng.integers(-outside, shape[axis] + outside, rows).astype(np.int32)
    (eqn,) = gathers(
        lambda table, ids: table.at[(*[slice(None)] * axis, ids)].get(mode=mode, wrap_negative_indices=False),
        jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(rows, np.int32),
    )  # fmt: skip
    assert is_lookup(eqn)
    table, ids = jnp.asarray(rng.standard_normal(shape), dtype), ids[..., None]
    seed = jnp.asarray(rng.standard_normal(eqn.outvars[0].aval.shape), dtype)
    value, gradient = pulled(lambda table: whole(eqn, table, ids), table, seed)
    _, wanted = pulled(lambda table: as_it_stands(eqn, table, ids), table.astype(jnp.float32), seed)
    np.testing.assert_array_equal(wide(value), wide(as_it_stands(eqn, table, ids)))
    assert gradient.dtype == dtype
    # Sums in another order differ by a rounding of float32, which may be one of the dtype.
    rounding = 1e-6 if dtype == jnp.float32 else 8e-3
    np.testing.assert_allclose(wide(gradient), wide(wanted.astype(dtype)), rtol=rounding, atol=1e-6)


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 6),
    st.sampled_from(MODES),
    st.sampled_from([jnp.bfloat16, jnp.float32]),
    st.booleans(),
)
def test_any_pick_has_the_gradient_of_its_gather(
    rows: list[int], classes: int, mode: str, dtype: Any, remat: bool
) -> None:
    """Also where an index is outside: filled, it moves nothing; clipped, the first entry or the last."""
    rng, outside = np.random.default_rng(0), 0 if mode == "promise_in_bounds" else 9
    ids = rng.integers(-outside, classes + outside, (*rows, 1)).astype(np.int32)
    shapes = jax.ShapeDtypeStruct((*rows, classes), dtype), jax.ShapeDtypeStruct(ids.shape, np.int32)
    (eqn,) = gathers(lambda x, i: jnp.take_along_axis(x, i, axis=-1, mode=mode), *shapes)
    logits, ids = jnp.asarray(rng.standard_normal(shapes[0].shape), dtype), ids.reshape(eqn.invars[1].aval.shape)
    seed = jnp.asarray(rng.standard_normal(eqn.outvars[0].aval.shape), dtype)

    def ours(x: jax.Array) -> jax.Array:
        return whole(eqn, x, ids)

    value, gradient = pulled(jax.checkpoint(ours) if remat else ours, logits, seed)
    found, wanted = pulled(lambda x: as_it_stands(eqn, x, ids), logits, seed)
    np.testing.assert_array_equal(wide(value), wide(found))
    np.testing.assert_array_equal(wide(gradient), wide(wanted))  # at most one number comes to each place
    assert gradient.dtype == dtype
    inside = (ids >= 0) & (ids < classes)
    if mode == "fill" and not inside.all():
        assert np.isnan(wide(value)).any() and np.isfinite(wide(gradient)).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_a_pick_by_small_integers_counts_further_than_they_do(dtype: Any) -> None:
    """Of 300 classes, none but the one picked has a gradient."""
    ids = np.asarray([[3], [100], [0], [44]], dtype)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 300)), jnp.float32)
    (eqn,) = gathers(lambda x, i: jnp.take_along_axis(x, i, axis=-1, mode="promise_in_bounds"), logits, ids)
    ids = ids.reshape(eqn.invars[1].aval.shape)
    _, gradient = pulled(lambda x: whole(eqn, x, ids), logits, np.ones(eqn.outvars[0].aval.shape))
    np.testing.assert_array_equal(np.argwhere(gradient), [[0, 3], [1, 100], [2, 0], [3, 44]])


def test_a_pick_is_compared_for_and_not_scattered() -> None:
    shapes = jnp.ones((BATCH, SEQ, VOCAB)), jnp.ones((BATCH, SEQ, 1), np.int32)
    (eqn,) = gathers(lambda x, i: jnp.take_along_axis(x, i, axis=-1), *shapes)
    ids = jnp.ones(eqn.invars[1].aval.shape, np.int32)
    assert scatters(lambda x: as_it_stands(eqn, x, ids), shapes[0]) == 1
    assert scatters(lambda x: whole(eqn, x, ids), shapes[0]) == 0


def test_other_gathers_stay_as_they_are() -> None:
    """Several entries of each row, tables of float32, and integers."""
    logits, table = jnp.arange(24.0).reshape(4, 6), jnp.arange(12, dtype=np.int32).reshape(4, 3)
    few = np.asarray([[0, 0, 5]] * 4, np.int32)
    (several,) = gathers(lambda x, i: jnp.take_along_axis(x, i, axis=-1), logits, few)
    few = few.reshape(several.invars[1].aval.shape)
    assert picked_dim(several) == 1 and scatters(lambda x: whole(several, x, few), logits) == 1
    _, gradient = pulled(lambda x: whole(several, x, few), logits, np.ones((4, 3)))
    np.testing.assert_array_equal(gradient, [[2, 0, 0, 0, 0, 1]] * 4)
    (of_integers,) = gathers(lambda table, ids: table[ids], table, np.asarray([1, 3]))
    np.testing.assert_array_equal(whole(of_integers, table, jnp.asarray([[1], [3]])), table[np.asarray([1, 3])])


@pytest.mark.parametrize("features", [None, "col"])
def test_each_row_finds_another_of_the_batch(features: str | None) -> None:
    """As where tokens are put in order for experts: some found twice, and some not at all."""
    with jax.enable_x64(True):
        values, indices = np.random.default_rng(0).normal(size=(24, 10)), some_indices(24, 16, outside=True)
        (eqn,) = gathers(lambda values, at: values.at[at].get(mode="fill"), values, indices)
    spec, rows = P("row", features), P("row", None)
    assert_same(eqn, lambda x, at: find_among(eqn, x, at, spec, rows, mesh()), values, indices[:, None])


def test_the_gradient_of_rows_in_order_is_added_up_in_float32_and_sent_in_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs are told to; on CPUs all of it is wide."""
    monkeypatch.setattr(lookup, "raised_on_cpu", lambda values, mesh: values)
    values, indices = jnp.ones((8, 4), jnp.bfloat16), jnp.zeros((16, 1), jnp.int32)
    (eqn,) = gathers(lambda values, at: values.at[at].get(mode="fill"), values, indices[:, 0])
    total = lambda x: find_among(eqn, x, indices, P("row", None), P("row", None), mesh()).sum()  # noqa: E731
    found = {e.primitive.name: e.outvars[0].aval.dtype for e in walk(jax.make_jaxpr(jax.grad(total))(values).jaxpr)}
    assert found["scatter-add"] == jnp.float32 and found["reduce_scatter"] == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32"])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_indices_of_any_type_find_the_same_as_int32(dtype: str, mode: str) -> None:
    """Those outside of the table too, and of int32."""
    outside = np.iinfo(dtype).max
    indices = np.asarray([3, 0, VOCAB - 1, outside, 7], dtype)
    table = np.arange(VOCAB * 3, dtype=np.float32).reshape(VOCAB, 3)
    closed = jax.make_jaxpr(lambda table, ids: jnp.take(table, ids, axis=0, mode=mode))(table, indices)
    (eqn,) = (each for each in walk(closed.jaxpr) if each.primitive.name == "gather")
    # What JAX makes of ids before: a gather's own mode decides on those that are outside.
    raw = indices.reshape(-1, 1)
    operand, found = in_int32(eqn, [table, raw])
    assert found.dtype == jnp.int32
    bound = [eqn.primitive.bind(jnp.asarray(operand), jnp.asarray(ids), **eqn.params) for ids in (found, raw)]
    np.testing.assert_array_equal(*bound)


def test_tokens_of_16_bits_at_a_length_that_is_filled_up() -> None:
    """Of which XLA ended the process."""

    class Words(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(20, 16)(ids)
            return nn.Dense(20)(x + nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_causal_mask(ids)))

    def loss(model: Any, batch: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    ids = np.random.default_rng(0).integers(0, 20, (4, 5))
    found = []
    for dtype in (np.int32, np.uint16):
        batch = {"x": ids.astype(dtype), "y": ids.astype(np.int32)}
        program = cjax.parallelize(Words(), loss, None, batch, "data=1 sequence=ring:2", devices=jax.devices()[:2])
        found.append(program.value_and_grad(begin(program), batch))
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, found))
