"""Leaves that come in pieces, and leaves that stay on disk until somebody reads them."""

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.checkpoint import LeafPiece, inspect, restore, save

from .conftest import assert_same, make_mesh

LAYERS = 3


def values() -> dict[str, Any]:
    """A list of layers, a leaf of all layers, keys, numbers of several kinds, and a leaf of no elements."""
    rng = np.random.default_rng(0)
    return {
        "list": [rng.normal(size=(8, 6)).astype("f") for _ in range(LAYERS)],
        "all": rng.normal(size=(LAYERS, 4, 6)).astype(jnp.bfloat16),
        "count": rng.integers(0, 9, LAYERS).astype("int32"),
        "keys": jax.random.split(jax.random.key(3), LAYERS),
        "none": np.zeros((LAYERS, 0), "f"),
        "outside": rng.normal(size=(5,)).astype("f"),
    }


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def rows_of(tree: dict[str, Any], seen: list[weakref.ref[jax.Array]] | None = None) -> Iterator[list[LeafPiece]]:
    mesh = make_mesh(4, 2)
    specs = {"list": P("a", "b"), "all": P("a"), "count": P(), "keys": P(), "none": P()}
    for layer in range(LAYERS):
        assert not any(ref() is not None for ref in seen or ()), "the row before is still there"
        row, array = [], None
        for name, spec in specs.items():
            array = jax.device_put(tree[name][layer], NamedSharding(mesh, spec))
            row.append(LeafPiece(f"list/{layer}" if name == "list" else name, None if name == "list" else layer, array))
            if seen is not None:
                seen.append(weakref.ref(array))
        del array
        yield row
        row.clear()


def test_pieces_are_an_array_like_any_other(tmp_path: Path) -> None:
    tree = values()
    seen: list[weakref.ref[jax.Array]] = []
    save(tmp_path / "c", {**shapes(tree), "outside": tree["outside"]}, {"step": 4}, rows_of(tree, seen))
    save(tmp_path / "whole", tree, {"step": 4})
    assert inspect(tmp_path / "c").arrays == inspect(tmp_path / "whole").arrays
    sharding = NamedSharding(make_mesh(2), P())
    like = {**{name: np.zeros_like(x) for name, x in tree.items() if name not in ("list", "keys")}}
    like["list"] = [
        jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(make_mesh(2), P(None, "a")))
    ] * LAYERS
    like["keys"] = jax.ShapeDtypeStruct((LAYERS,), tree["keys"].dtype, sharding=sharding)
    restored, meta = restore(tmp_path / "c", like)
    assert_same(restored, tree)
    assert meta["step"] == 4 and len(seen) == 5 * LAYERS


@pytest.mark.parametrize("in_pieces", [True, False])
def test_what_stays_on_disk_is_read_as_it_is_asked_for(tmp_path: Path, in_pieces: bool) -> None:
    """Also of a checkpoint whose leaves were written whole, as plans without layers in host memory do."""
    tree = values()
    if in_pieces:
        save(tmp_path / "c", {**shapes(tree), "outside": tree["outside"]}, {}, rows_of(tree))
    else:
        save(tmp_path / "c", tree, {})
    later = ("list", "all", "count", "keys")
    restored, _ = restore(tmp_path / "c", {**shapes(tree), "outside": np.zeros(5, "f")}, later=later)
    np.testing.assert_array_equal(restored["outside"], tree["outside"])
    mesh = make_mesh(2, 4)
    for layer in (2, 0):
        for name, spec in (("all", P("b")), ("count", P()), ("keys", P())):
            found = restored[name].placed(NamedSharding(mesh, spec), layer)
            assert_same(found, jnp.asarray(tree[name][layer]))
            assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), found.ndim)
        found = restored["list"][layer].placed(NamedSharding(mesh, P("a", None)))
        np.testing.assert_array_equal(found, tree["list"][layer])
    assert_same(restored["all"].placed(NamedSharding(mesh, P(None, None, "a"))), jnp.asarray(tree["all"]))


def test_what_breaks_off_leaves_what_was_there(tmp_path: Path) -> None:
    tree = values()
    what = {**shapes(tree), "outside": tree["outside"]}
    save(tmp_path / "c", what, {"step": 1}, rows_of(tree))

    def broken() -> Iterator[list[LeafPiece]]:
        rows = rows_of(tree)
        yield next(rows)
        raise OSError(5, "the rows can't be read")

    with pytest.raises(OSError, match="could not be written.*the rows can't be read"):
        save(tmp_path / "c", what, {"step": 2}, broken())
    with pytest.raises(AssertionError, match="never came: all, count, keys, list/2$"):
        save(tmp_path / "c", what, {"step": 2}, itertools.islice(rows_of(tree), 2))
    with pytest.raises(ValueError, match="all is a shape without values; save arrays"):
        save(tmp_path / "c", what, {"step": 2})
    assert inspect(tmp_path / "c").step == 1
    save(tmp_path / "c", what, {"step": 3}, rows_of(tree))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
