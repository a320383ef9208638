"""Dims: what each primitive relates, written as in einsum: `ab,bc->ac` names operands' and results' classes."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from cjax.trace.dims.find import Dims, find_dims
from cjax.trace.dims.rules import RULES
from cjax.trace.jaxpr.primitives import FACTS
from cjax.trace.jaxpr.simplify import simplify

Shape = tuple[int, ...]
INT = np.int32


def traced(function: Callable[..., Any], shapes: Sequence[Any], num_weights: int = 0) -> tuple[Any, Dims]:
    """The flat trace of a function of arrays of these shapes (or ShapeDtypeStructs), and its dims."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) if isinstance(s, tuple) else s for s in shapes]
    closed = simplify(jax.make_jaxpr(function)(*args))
    return closed, find_dims(closed, num_weights)


def relation(function: Callable[..., Any], *shapes: Any) -> str:
    """The dims of operands and results, a letter for each class, in order of appearance."""
    closed, dims = traced(function, shapes)
    letters: dict[int, str] = {}

    def word(var: Any) -> str:
        return "".join(letters.setdefault(c, chr(ord("a") + len(letters))) for c in dims.of(var))

    ins, outs = (",".join(map(word, variables)) for variables in (closed.jaxpr.invars, closed.jaxpr.outvars))
    return f"{ins}->{outs}"


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, INT)


def conv(x: jax.Array, w: jax.Array, **kwargs: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

TABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "elementwise": (lambda x, y: jnp.exp(x) * y, ((4, 3), (4, 3)), "ab,ab->ab"),
    "scalar operand": (lambda x, y: x + y, ((4, 3), ()), "ab,->ab"),
    "broadcast": (lambda x, y: x + y, ((4, 3), (3,)), "ab,b->ab"),
    "broadcast of a row": (lambda x, y: x + y, ((4, 3), (4, 1)), "ab,ac->ab"),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (5, 4, 3), (2,)), ((3,),), "a->bca"),
    "transpose": (lambda x: x.transpose(2, 0, 1), ((4, 3, 5),), "abc->cab"),
    "squeeze": (lambda x: x[:, 0], ((4, 1, 3),), "abc->ac"),
    "expand_dims": (lambda x: x[:, None], ((4, 3),), "ab->acb"),
    "reduce": (lambda x: x.sum(1), ((4, 3, 5),), "abc->ac"),
    "argmax": (lambda x: x.argmax(-1), ((4, 3),), "ab->a"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), ((4, 3),), "ab->ab"),
    "softmax": (jax.nn.softmax, ((4, 3),), "ab->ab"),
    "reshape that splits": (lambda x: x.reshape(4, 3), ((12,),), "a->ab"),
    "reshape that merges": (lambda x: x.reshape(12, 5), ((4, 3, 5),), "abc->ac"),
    "reshape with ones": (lambda x: x.reshape(1, 4, 1, 3), ((4, 3),), "ab->cadb"),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), ((4, 3), (4, 5)), "ab,ac->ad"),
    "stack": (lambda x, y: jnp.stack([x, y]), ((4, 3), (4, 3)), "ab,ab->cab"),
    "slice": (lambda x: x[:, 1:3], ((4, 5),), "ab->ac"),
    "split": (lambda x: jnp.split(x, 3, 1), ((4, 15),), "ab->ac,ac,ac"),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1))), ((4, 3),), "ab->ac"),
    "tile": (lambda x: jnp.tile(x, (1, 2)), ((4, 3),), "ab->ac"),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), ((4, 5), ints()), "ab,->ac"),
    "dynamic_update_slice": (lambda x, y: x.at[:, :2].set(y), ((4, 5), (4, 2)), "ab,ac->ab"),
    "reverse": (lambda x: x[::-1], ((4, 3),), "ab->ab"),
    "where": (lambda c, x: jnp.where(c > 0, x, -1.0), ((4, 3), (4, 3)), "ab,ab->ab"),
    "matmul": (jnp.dot, ((4, 3), (3, 5)), "ab,bc->ac"),
    "batched matmul": (lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y), ((2, 3, 4, 5), (2, 6, 4, 5)),
                       "abcd,aecd->acbe"),
    "matmul that contracts two": (lambda x, w: jnp.einsum("bhd,hde->be", x, w), ((2, 3, 4), (3, 4, 5)), "abc,bcd->ad"),
    "conv": (conv, ((2, 8, 9, 3), (4, 5, 3, 6)), "abcd,efdg->ahig"),
    "depthwise conv": (lambda x, w: conv(x, w, feature_group_count=3), ((2, 8, 9, 3), (4, 5, 1, 3)), "abcd,efgd->ahid"),
    "pooling": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID"), ((4, 6, 3),), "abc->adc"),
    "lookup": (lambda table, ids: table[ids], ((7, 3), ints(4, 5)), "ab,cd->cdb"),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), ((4, 7), ints(4, 2)), "ab,ac->ac"),
    "scatter": (lambda x, i, u: x.at[i].add(u), ((7, 3), ints(4), (4, 3)), "ab,c,cb->ab"),
    "scatter max": (lambda x, i, u: x.at[i].max(u), ((3, 3), ints(3), (3, 3)), "ab,c,cb->ab"),
    "fft": (jnp.fft.rfft2, ((4, 5, 3, 6),), "abcd->abef"),
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), ((4, 3, 3),), "abc->ade"),
    "qr": (lambda x: lax.linalg.qr(x), ((4, 5, 3),), "abc->ade,afg"),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), ((4, 5, 3),), "abc->ad"),
    "triangular solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), ((4, 3, 3), (4, 3, 3)),
                         "abc,ade->afg"),
    "sort": (jnp.sort, ((4, 3),), "ab->ab"),
    "top_k": (lambda x: lax.top_k(x, 2), ((4, 3),), "ab->ac,ac"),
    "iota": (lambda x: lax.iota(INT, 4), ((4,),), "a->b"),
    "random bits": (lambda x: x + jax.random.normal(jax.random.key(0), (4, 3)), ((4, 3),), "ab->ab"),
    "keys": (lambda k: jax.vmap(lambda k: jax.random.bits(k, (3,)))(jax.random.wrap_key_data(k)),
             (jax.ShapeDtypeStruct((5, 2), np.uint32),), "ab->ac"),
    "custom_jvp": (jax.nn.relu, ((4, 3),), "ab->ab"),
    "custom_vjp": (doubled, ((4, 3),), "ab->ab"),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(x).T), ((4, 3),), "ab->ba"),
    "scan over steps": (lambda x, w: lax.scan(lambda c, r: (c + r @ w, c), jnp.zeros((2, 5)), x), ((6, 2, 3), (3, 5)),
                        "abc,cd->bd,abd"),
    "while": (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x), ((4, 3),), "ab->ab"),
    "cond": (lambda p, x, y: lax.cond(p > 0, lambda x, y: x, lambda x, y: y, x, y), (ints(), (4, 3), (4, 3)),
             ",ab,ab->ab"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_rule(name: str) -> None:
    function, shapes, wanted = TABLE[name]
    assert relation(function, *shapes) == wanted
    assert not traced(function, shapes)[1].unknown


def test_dims_of_one_size_are_not_one_dim() -> None:
    assert relation(lambda x, w: x @ w, (4, 4), (4, 4)) == "ab,bc->ac"
    assert relation(lambda x: x + x.T, (4, 4)) == "aa->aa"


@pytest.mark.parametrize("name", ["fft", "cholesky"])
def test_primitives_without_facts_relate_nothing_and_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = TABLE[name][0]
    assert relation(function, (5, 3, 3)) == "abc->ade"  # rows alone are the same
    monkeypatch.delitem(RULES, name)
    monkeypatch.delitem(FACTS, name)
    closed, dims = traced(function, [(5, 3, 3)])
    assert dict(dims.unknown) == {name: 1}
    assert not set(dims.of(closed.jaxpr.invars[0])) & set(dims.of(closed.jaxpr.outvars[0]))


def test_barriers_relate_each_operand_to_its_result_alone() -> None:
    assert relation(lambda x, y: lax.optimization_barrier((x, y)), (3, 4), (3, 4)) == "ab,cd->ab,cd"


# -- reshapes ---------------------------------------------------------------------------------------------------------
@st.composite
def shape_and_merge(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """A shape, and the shape after merging some neighbours."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    borders = draw(st.sets(st.integers(1, len(shape)), max_size=4))
    cuts = [0, *sorted(borders - {len(shape)}), len(shape)]
    return shape, tuple(math.prod(shape[a:b]) for a, b in itertools.pairwise(cuts))


@given(shape_and_merge())
def test_merging_and_splitting_again_keeps_classes(shapes: tuple[Shape, Shape]) -> None:
    shape, merged = shapes
    closed, dims = traced(lambda x: jnp.sin(x.reshape(merged)).reshape(shape), [shape])
    before, after = dims.of(closed.jaxpr.invars[0]), dims.of(closed.jaxpr.outvars[0])
    real = [i for i, size in enumerate(shape) if size > 1]
    assert [before[i] for i in real] == [after[i] for i in real]
    assert len({before[i] for i in real}) == len(real), "dims of one tensor became one"


@given(shape_and_merge())
def test_a_merged_dim_moves_with_its_major_factor(shapes: tuple[Shape, Shape]) -> None:
    shape, merged = shapes
    closed, dims = traced(lambda x: x.reshape(merged) * 2, [shape])
    before, after = dims.of(closed.jaxpr.invars[0]), dims.of(closed.jaxpr.outvars[0])
    position = 0
    for c, size in zip(after, merged, strict=True):
        group: list[int] = []
        while math.prod(shape[i] for i in group) != size or not group:
            group.append(position)
            position += 1
        majors = [i for i in group if shape[i] > 1]
        if majors:
            assert c == before[majors[0]]
        assert not majors or all(c != before[i] for i in majors[1:])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_any_reshape_is_read(shape: list[int], random: Any) -> None:
    factors = [f for n in shape for f in ([2, 2] if n == 4 else [n])]
    other = tuple(random.sample(factors, len(factors)))
    closed, dims = traced(lambda x: x.reshape(other) * 2, [tuple(shape)])
    out = dims.of(closed.jaxpr.outvars[0])
    assert len({c for c, size in zip(out, other, strict=True) if size > 1}) == sum(size > 1 for size in other)


def test_two_splits_of_one_dim_agree_where_their_factors_do() -> None:
    assert relation(lambda x: (x.reshape(4, 3, 5), x.reshape(4, 3, 5)), (60,)) == "a->abc,abc"
    assert relation(lambda x: (x.reshape(4, 15), x.reshape(4, 3, 5)), (60,)) == "a->ab,acd"


def test_splits_remember_sizes() -> None:
    _, dims = traced(lambda x: x.reshape(2, 8, 5), [(2, 40)])
    assert [(s.size, s.major_size, [dims.size[m] for m in s.minor]) for s in dims.splits] == [(40, 8, [5])]


# -- what a layout reads ----------------------------------------------------------------------------------------------
def test_matmuls_remember_which_operand_is_a_weight() -> None:
    _, dims = traced(lambda w, x: jnp.dot(x, w.reshape(3, 10)), [(3, 2, 5), (4, 3)], num_weights=1)
    (m,) = dims.matmuls
    assert (m.lhs_origin, m.rhs_origin) == (None, 0)
    assert [dims.size[d] for d in m.contracted] == [3] and [dims.size[d] for d in m.out] == [4, 10]


def test_matmuls_inside_loops_know_their_stacked_weight() -> None:
    def function(ws: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    closed, dims = traced(function, [(6, 3, 3), (4, 3)], num_weights=1)
    assert dims.matmuls[0].rhs_origin == 0
    assert {dims.class_of(d) for d in dims.layers} == {dims.of(closed.jaxpr.invars[0])[0]}
    assert [tuple(map(dims.class_of, ids)) for ids in dims.layer_carries] == [dims.of(closed.jaxpr.outvars[0])]


def test_lookups_remember_their_table() -> None:
    _, dims = traced(lambda table, ids: table[ids], [(7, 3), ints(4, 5)], num_weights=1)
    ((leaf, dim, rows),) = dims.tables
    assert (leaf, dims.size[dim], [dims.size[d] for d in rows]) == (0, 7, [4, 5])


def test_an_input_knows_its_own_sizes_where_a_class_holds_several() -> None:
    """Query heads and key-value heads are one class, split as far as each can be."""

    def function(wq: jax.Array, wk: jax.Array, x: jax.Array) -> jax.Array:
        q, k = jnp.einsum("bd,dhk->bhk", x, wq), jnp.einsum("bd,dgk->bgk", x, wk)
        return jnp.einsum("bgnk,bgk->bgn", q.reshape(4, 2, 4, 6), k)

    _, dims = traced(function, [(5, 8, 6), (5, 2, 6), (4, 5)], num_weights=2)
    query, key = dims.inputs[0][1], dims.inputs[1][1]
    assert dims.class_of(query) == dims.class_of(key)
    assert (dims.size[query], dims.size[key]) == (8, 2)


@pytest.mark.parametrize("cut", [lambda x: jnp.split(x, 3, 1), lambda x: [x[:, 5 * i : 5 * i + 5] for i in range(3)]])
def test_packed_dims_are_found(cut: Callable[..., Any]) -> None:
    closed, dims = traced(cut, [(4, 15)])
    assert {dims.class_of(d): n for d, n in dims.packed.items()} == {dims.of(closed.jaxpr.invars[0])[1]: 3}
