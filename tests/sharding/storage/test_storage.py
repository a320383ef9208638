"""The user's tree and the stored one: nothing is lost on the way there and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cjax.mesh import build_mesh
from cjax.sharding.storage.storage import Slot, StageRows, Storage, make_storage, stackable

SIZES = {"data": 2, "tensor": 4}


def shape_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], Storage]:
    """Leaves of a few shapes; equal ones stacked, dims split (and so padded) or made of parts at will."""
    shapes = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
    tree, groups, specs, forms = {}, [], {}, {}
    for k, shape in enumerate(shapes):
        number = draw(st.integers(1, 3))
        first = len(tree)
        entries = [None] * len(shape)
        if draw(st.booleans()):
            axes = draw(st.sampled_from(["tensor", "data", ("tensor", "data")]))
            entries[draw(st.integers(0, len(shape) - 1))] = axes
        parts = draw(st.integers(1, 3)) if draw(st.booleans()) else 1
        logical = (shape[0] * parts, *shape[1:])
        for i in range(number):
            tree[f"{k}{i}"] = np.random.default_rng(len(tree)).standard_normal(logical).astype(np.float32)
        for leaf in range(first, first + number):
            specs[leaf] = P(None, *entries) if parts > 1 else P(*entries)
            forms[leaf] = (parts, *(1,) * (len(shape) - 1))
        if number > 1:
            groups.append(tuple(draw(st.permutations(range(first, first + number)))))
    return tree, make_storage(shape_of(tree), groups, specs.__getitem__, SIZES, forms.__getitem__)


@pytest.mark.full
@settings(max_examples=40)
@given(trees())
def test_there_and_back(case: tuple[dict[str, np.ndarray], Storage]) -> None:
    tree, storage = case
    stored = storage.store(tree)
    assert [(a.shape, a.dtype) for a in stored] == [(s.shape, s.dtype) for s in storage.shape()]
    jax.tree.map(np.testing.assert_array_equal, storage.load(stored), tree)
    jax.tree.map(np.testing.assert_array_equal, storage.load(storage.fill(storage.trim(stored))), tree)
    assert storage.leaf_shapes() == shape_of(tree)
    for slot in storage.slots:
        shards = [int(np.prod([SIZES[a] for a in np.ravel(e)])) if e else 1 for e in slot.spec]
        assert all(n % s == 0 for n, s in zip(slot.padded, shards, strict=True)), "a shard is no whole number"
        assert all(p - n < s for n, p, s in zip(slot.shape, slot.padded, shards, strict=True)), "too much padding"


def test_padding_is_zero_and_at_the_end() -> None:
    storage = make_storage(
        {"w": jax.ShapeDtypeStruct((5, 2), jnp.float32)}, [], lambda i: P("tensor", None), SIZES, lambda i: None
    )
    (stored,) = storage.store({"w": np.ones((5, 2), np.float32)})
    assert stored.shape == (8, 2) and float(stored[5:].sum()) == 0 and float(stored.sum()) == 10


def test_layers_are_stacked_in_their_order() -> None:
    tree = {name: np.full((2,), i, np.float32) for i, name in enumerate("abc")}
    storage = make_storage(shape_of(tree), [(2, 0, 1)], lambda i: P(None), SIZES, lambda i: None)
    (stored,) = storage.store(tree)
    np.testing.assert_array_equal(stored[:, 0], [2, 0, 1])
    assert storage.slots[0].stored_spec == P(None, None)


def test_what_comes_out_is_placed_where_it_divides() -> None:
    mesh = build_mesh({"data": 2, "tensor": 4}, jax.devices())
    tree = {"even": jax.ShapeDtypeStruct((8, 3), jnp.float32), "odd": jax.ShapeDtypeStruct((5, 4), jnp.float32)}
    specs = [P("tensor", None), P("tensor", "data")]
    storage = make_storage(tree, [], specs.__getitem__, SIZES, lambda i: None)
    found = storage.leaf_shardings(mesh)
    assert found["even"].spec == P("tensor", None) and found["odd"].spec == P(None, "data")


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([(0, 1, 2)], [(0, 1, 2)]),
        ([(0, 1), (1, 2)], [(0, 1)]),  # a leaf is kept once
        ([(0, 0)], []),  # one weight tied to itself
        ([(0, 3)], []),  # other shapes
        ([(0,)], []),  # alone
    ],
)
def test_stackable(groups: list[tuple[int, ...]], wanted: list[tuple[int, ...]]) -> None:
    leaves = [jax.ShapeDtypeStruct((2, 3), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((2,), jnp.float32)]
    assert stackable(groups, leaves) == wanted


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (0, 2, -1, 1), (0, 1, 2, -1)])
def test_layers_of_stages_come_back_in_the_models_order(order: tuple[int, ...]) -> None:
    """Of a leaf that holds all layers, and of a stack whose leaves are in the order of their rows."""
    x, rows = np.arange(12.0, dtype=np.float32).reshape(3, 4), StageRows("pipe", order)
    whole = Slot((0,), (3, 4), np.float32, (len(order), 4), P("pipe", None), (1, 1), rows)
    stored = np.asarray(whole.store(jnp.asarray(x)))
    for row, layer in enumerate(order):
        np.testing.assert_array_equal(stored[row], x[layer] if layer >= 0 else 0)
    np.testing.assert_array_equal(whole.load(jnp.asarray(stored)), x)
    stack = Slot(rows.layers, (4,), np.float32, (4,), P(None), (1,), rows)
    tree = Storage(jax.tree.structure([0] * 3), (stack,))
    arrays = tree.store(list(map(jnp.asarray, x)))
    np.testing.assert_array_equal(arrays[0], stored)
    np.testing.assert_array_equal(tree.in_layer_order(arrays)[0], x)
    wide = Slot(rows.layers, (4,), np.float32, (6,), P(None), (1,), rows)
    (padded,) = Storage(tree.treedef, (wide,)).store(list(map(jnp.asarray, x)))
    kept = wide.trim(padded)
    np.testing.assert_array_equal(kept, stored)  # rows without a layer stay, where there are some
    np.testing.assert_array_equal(wide.fill(kept), padded)
    np.testing.assert_array_equal(np.stack(tree.load(arrays)), x)
