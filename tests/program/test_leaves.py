"""States of walks, row by row: to a checkpoint and back, and from one plan to another."""

import gc
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import on_host, walking_program
from zoo import regression, regression_batch
from zoo_linen import Layered

import cjax
from cjax.program import Program, saving, walked
from cjax.program.leaves import pending_trees
from cjax.program.state import State
from cjax.walk.walk import in_turn

pytestmark = pytest.mark.usefixtures("settled")

DISK = "zero=1 offload=params+optimizer host=0B disk=10MB"


def is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def drawn(program: Program) -> Any:
    """Random bits for all that a state holds, so that no two elements are taken for each other."""
    rng = np.random.default_rng(0)

    def one(shape: Any) -> Any:
        if is_key(shape):
            return jax.vmap(jax.random.key)(np.arange(math.prod(shape.shape))).reshape(shape.shape)
        numbers = rng.standard_normal(shape.shape) if shape.dtype.kind == "f" else rng.integers(0, 100, shape.shape)
        return numbers.astype(shape.dtype)

    return jax.tree.map(one, program.abstract_state())


def assert_holds(program: Program, state: State, wanted: Any) -> None:
    assert state._shelves is program._composed.shelves
    jax.tree.map(np.testing.assert_array_equal, on_host(program.to_arrays(state)), on_host(wanted))


# One model with a list of layers, one whose author has all of them in each leaf.
@pytest.mark.full
@pytest.mark.parametrize("name", ["linen_tied", pytest.param("nnx_scan", marks=pytest.mark.full)])
def test_a_run_moves_between_walks_and_other_plans(name: str, tmp_path: Path) -> None:
    """By a checkpoint and from a live state; nowhere is a tree made whole on its way to rows."""
    plain, host = (walking_program(name, plan) for plan in ("zero=3", "data=8 offload=params+optimizer"))
    disk = walking_program(name, DISK, tmp_path / "rows")
    wanted = drawn(plain)
    first = plain.from_arrays(wanted)
    assert_holds(plain, first, wanted)
    plain.save(tmp_path / "plain", first)
    with pytest.MonkeyPatch.context() as patch:
        for room in (saving, walked):
            patch.delattr(room, "walked_trees")  # what makes a tree whole
        states = [host.restore(first), disk.restore(tmp_path / "plain")]
        host.save(tmp_path / "host", states[0])
        disk.save(tmp_path / "disk", states[1])
    for program, state in zip((host, disk), states, strict=True):
        assert_holds(program, state, wanted)
    tensor = walking_program(name, "tensor=2 data=4")
    for source in (states[0], states[1], tmp_path / "host", tmp_path / "disk"):
        moved = tensor.restore(source)
        assert_holds(tensor, moved, wanted)
        placed = jax.tree.map(
            lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), moved, tensor._composed.state_shardings
        )
        assert all(jax.tree.leaves(placed))
    assert_holds(host, host.restore(states[1]), wanted)
    assert_holds(disk, disk.restore(states[0]), wanted)
    again = disk.resume()  # what was restored is committed
    assert again is not None
    assert_holds(disk, again, wanted)
    assert_holds(disk, disk.restore(again), wanted)  # onto the place where it is
    with pytest.raises(ValueError, match="given up"):
        disk.save(tmp_path / "late", again)


@pytest.mark.parametrize("plan", ["zero=3", "data=8 offload=params+optimizer"])
def test_each_leaf_of_a_live_state_is_its_own(plan: str) -> None:
    """Layers' too, of which the program keeps one array for all."""
    batch = regression_batch()
    program = cjax.parallelize(Layered(3), regression, optax.adam(1e-2), batch, plan)
    wanted = drawn(program)
    trees = pending_trees(program.from_arrays(wanted))
    assert len(trees["params"]) and len(jax.tree.leaves(trees["opt_state"])) > len(jax.tree.leaves(trees["params"]))
    whole = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec())

    def compare(leaf: Any, value: Any) -> None:
        np.testing.assert_array_equal(leaf.placed(whole), value)

    for name, tree in trees.items():
        jax.tree.map(compare, tree, wanted[name])


def test_what_breaks_off_is_closed_before_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "linen_tied"
    program = walking_program(name, DISK, tmp_path / "rows")
    wanted = drawn(program)
    state = program.from_arrays(wanted)
    folder = state._held.folder
    assert folder is not None
    taken, threads, first = folder.num_bytes, list[int](), list[int]()

    def broken(*arguments: Any) -> Any:
        threads.append(len(threading.enumerate()))
        if len(threads) > 20:
            raise OSError(5, "the checkpoint can't be read")
        return store(*arguments)

    store = walked.store_slot
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(walked, "store_slot", broken)
            threads.clear()
            with pytest.raises(OSError, match="the checkpoint can't be read"):
                program.from_arrays(wanted)
        first.append(threads[0])
        with pytest.raises(ValueError, match="given up"):
            program.to_arrays(state)
    resumed = program.resume()  # what was committed is whole
    assert resumed is not None
    assert_holds(program, resumed, wanted)
    again = program.from_arrays(wanted)
    assert again._held.folder is not None and again._held.folder.num_bytes == taken
    assert_holds(program, again, wanted)
    assert first[1] >= first[2], "threads of what broke off are at work still"


def alive(kind: str = "device") -> int:
    """Bytes of arrays in memory of one kind of one device. Those of one device alone are parts of others."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.live_arrays()
        if not x.is_deleted() and x.sharding.memory_kind == kind and x.sharding.num_devices > 1 and not is_key(x)
    )


@pytest.mark.full
def test_no_more_than_rows_are_anywhere_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device; in the memory of the host that belongs to it are those that are on their way to the disk."""
    name = "linen_tied"
    program = walking_program(name, DISK, tmp_path / "rows")
    program.save(tmp_path / "c", program.from_arrays(drawn(program)))
    other = walking_program(name, DISK.replace("zero=1", "data=8"), tmp_path / "rows")
    assert program._walking is not None
    sizes = program._walking.measured.sizes
    row = max(max(r.device for rows in sizes[kind] for r in rows) for kind in ("params", "opt"))
    here: list[int] = []
    host: list[int] = []

    def count() -> None:
        here.append(alive() - before)
        host.append(alive("pinned_host") - kept)

    def watched(*arguments: Any) -> Iterator[Any]:
        for each in in_turn(*arguments):
            count()
            yield each

    def put(*arguments: Any) -> Any:
        count()
        return store(*arguments)

    store = walked.store_slot
    state = program.restore(tmp_path / "c")
    gc.collect()
    before, kept = alive(), alive("pinned_host")  # what other tests' programs hold is none of this one's
    monkeypatch.setattr(walked, "in_turn", watched)
    monkeypatch.setattr(walked, "store_slot", put)
    outside = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state) if not is_key(x)
    )
    program.save(tmp_path / "d", state)
    saved = len(here)
    moved = other.restore(tmp_path / "d")
    del moved
    other.restore(state)
    assert saved and len(here) > 2 * saved
    # Of a kind: the row in use, the one on its way, and its leaves; where rows are made, those of the other state too.
    assert max(here[:saved]) <= 3 * row + outside and max(host[:saved]) <= 0
    assert max(here) <= 6 * row + 2 * outside and max(host) <= 10 * row
