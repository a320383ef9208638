"""One law for all homes: what is fetched is what was put last, bit for bit, and devices hold no more than they may."""

import contextlib
import gc
import itertools
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alive import alive
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.planner.homes import KINDS, Home, Kind
from cjax.walk import direct, disk, stores
from cjax.walk.files import Folder
from cjax.walk.moving import THREADS, Arrays, MovedRows
from cjax.walk.stores import LayerRows, make_rows

LAYERS = 4
ALL = os.environ.get("CJAX_TEST_ALL") == "1"
pytestmark = pytest.mark.usefixtures("settled")
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
# Split, whole, split twice, by two axes at once; no element, one element, odd sizes; padding is a dim like any other.
SHAPES = [
    ((8, 3), "float32", P("data")),
    ((5, 7), "bfloat16", P()),
    ((4, 6), "float16", P("data", "tensor")),
    ((), "int32", P()),
    ((0, 4), "float32", P(None, "tensor")),
    ((16, 131), "int8", P(("data", "tensor"))),
    ((3, 2), "bool", P(None, "tensor")),
    ((1037,), "uint32", P()),
    ((8,), "float64", P("data")),
    ((2, 5), "complex64", P("tensor")),
    ((4,), "float8_e4m3fn", P("data")),
]


def struct(shape: tuple[int, ...], dtype: str, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(MESH, spec))


with jax.enable_x64(True):
    STRUCTS = [struct(*each) for each in SHAPES]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder(tmp_path / "rows", {}) as found:
        yield found


def drawn(shapes: Sequence[jax.ShapeDtypeStruct], seed: int) -> list[np.ndarray]:
    """Random bits: every NaN, -0.0 and number below the normal ones has its turn."""
    rng = np.random.default_rng(seed)
    found = []
    for shape in shapes:
        bits = np.frombuffer(rng.bytes(int(np.prod(shape.shape)) * shape.dtype.itemsize), np.uint8)
        found.append((bits & 1 if shape.dtype == bool else bits).view(shape.dtype).reshape(shape.shape))
    return found


def placed(values: Sequence[np.ndarray], shapes: Sequence[jax.ShapeDtypeStruct]) -> Arrays:
    return tuple(jax.device_put(x.copy(), shape.sharding) for x, shape in zip(values, shapes, strict=True))


def assert_same(row: Arrays, values: Sequence[np.ndarray], shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    for x, value, shape in zip(row, values, shapes, strict=True):
        assert (x.shape, x.dtype, x.sharding) == (shape.shape, shape.dtype, shape.sharding)
        for shard in x.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(value[shard.index]).tobytes(), shape


CALLS = ("ahead", "fetch", "put", "drop", "forget", "settle", "update", "commit")
call = st.tuples(st.sampled_from(CALLS), st.integers(0, LAYERS - 1))
homes_of_layers = st.lists(st.sampled_from(["device", "host", "disk"]), min_size=LAYERS, max_size=LAYERS)


@settings(max_examples=300 if ALL else 12)
@given(
    homes=homes_of_layers,
    kind=st.sampled_from(KINDS),
    calls=st.lists(call, min_size=10, max_size=60),
    which=st.sets(st.sampled_from(STRUCTS), max_size=5),
)
def test_what_is_fetched_is_what_was_put(
    homes: list[Home], kind: Kind, calls: list[tuple[str, int]], which: set[jax.ShapeDtypeStruct]
) -> None:
    shapes = sorted(which, key=STRUCTS.index)
    with jax.enable_x64(True), tempfile.TemporaryDirectory() as path, Folder(path, {}) as folder:
        rows = make_rows(shapes, homes, kind, folder=folder)
        follow(rows, folder, shapes, calls)
        rows.close()


def follow(rows: LayerRows, folder: Folder, shapes: list[jax.ShapeDtypeStruct], calls: list[tuple[str, int]]) -> None:
    """Makes the calls, beside a dict that does the same."""
    known: dict[int, list[np.ndarray]] = {}
    for seed, (name, layer) in enumerate(calls):
        if name == "put" or (name == "ahead" and layer not in known):
            known[layer] = drawn(shapes, seed)
            rows.put(layer, placed(known[layer], shapes))
        elif name == "settle":
            rows.settle()
        elif name == "commit":
            folder.commit(seed, {})
        elif layer in known and name in ("ahead", "drop"):
            getattr(rows, name)(layer)
        elif layer in known and name == "forget":
            rows.forget(layer)
            del known[layer]
        elif layer in known:
            row = rows.fetch(layer)
            assert_same(row, known[layer], shapes)
            if name == "update":  # as a program that is given the row's memory
                for x in row:
                    x.delete()
                known[layer] = drawn(shapes, seed)
                rows.put(layer, placed(known[layer], shapes))
    for layer, values in known.items():
        assert_same(rows.fetch(layer), values, shapes)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_every_kind_of_array_comes_back(home: Home, folder: Folder) -> None:
    """Brought by a thread and by the caller, and not written over by what is read behind it."""
    with jax.enable_x64(True):
        rows = make_rows(STRUCTS, [home] * LAYERS, "params", folder=folder)
        values = [drawn(STRUCTS, layer) for layer in range(LAYERS)]
        for layer in range(LAYERS):
            rows.put(layer, placed(values[layer], STRUCTS))
        fetched = []
        for layer in [*range(LAYERS)] * 2:
            if len(fetched) < LAYERS:
                rows.ahead(layer)
            fetched.append(rows.fetch(layer))
        for row, expected in zip(fetched, values * 2, strict=True):
            assert_same(row, expected, STRUCTS)
        rows.close()


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_donated_copy_leaves_the_row_whole(home: Home, folder: Folder) -> None:
    shapes = [struct((8, 64), "float32", P("data")), struct((8, 64), "float32", P())]
    values = drawn(shapes, 0)
    rows = make_rows(shapes, [home], "opt", folder=folder)
    rows.put(0, placed(values, shapes))
    change = jax.jit(lambda row: jax.tree.map(lambda x: jnp.where(x == x, 1, 2), row), donate_argnums=0)
    for _ in range(3):
        row = rows.fetch(0)
        assert_same(row, values, shapes)
        changed = change(row)
        assert all(x.is_deleted() for x in row) and changed[0].min() >= 1
    rows.close()


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("room", [2, 3])
def test_devices_hold_the_row_in_use_and_those_on_their_way(home: Home, room: int, folder: Folder) -> None:
    shapes = [struct((8, 1024), "float32", P("data")), struct((8,), "float32", P())]
    size = sum(math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize for shape in shapes)
    rows = make_rows(shapes, [home] * 8, "opt", folder=folder, room=room)
    gc.collect()
    before, before_on_host = alive(), alive("pinned_host")
    most = most_on_host = 0
    for layer in range(8):
        rows.put(layer, placed(drawn(shapes, layer), shapes))
        most = max(most, alive() - before)
    for layer in itertools.chain(range(8), reversed(range(8))):
        for other in range(8):
            rows.ahead(other)
        most = max(most, alive() - before)
        row = rows.fetch(layer)
        most = max(most, alive() - before)
        if layer % 2:
            rows.put(layer, row)
        del row
        most = max(most, alive() - before)
        most_on_host = max(most_on_host, alive("pinned_host") - before_on_host)
    rows.settle()
    assert size <= most <= room * size
    assert most_on_host <= (8 * (home == "host") + THREADS) * size
    # None of the threads waits: a process that gave up now would wait for them.
    for pool in (rows._readers, rows._writers):
        assert [done.result(30) for done in [pool.submit(lambda: 1) for _ in range(THREADS)]] == [1] * THREADS
    for layer in range(8):
        rows.drop(layer)
    rows.settle()
    rows.close()
    gc.collect()
    assert alive() == before


@pytest.mark.full("disk")
@pytest.mark.parametrize("home", ["host", "disk"])
def test_nothing_grows(home: Home, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[np.ndarray] = []

    def counted(num_bytes: int) -> np.ndarray:
        buffers.append(direct.buffer(num_bytes))
        return buffers[-1]

    monkeypatch.setattr(disk, "buffer", counted)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = [jax.ShapeDtypeStruct((2,), np.float32, sharding=one)]
    rows = make_rows(shapes, [home] * 2, "opt", folder=folder)
    row = placed(drawn(shapes, 0), shapes)
    threads = threading.active_count()
    counts = []
    for step in range(1000):
        rows.put(step % 2, row)
        rows.ahead(step % 2)
        row = rows.fetch(step % 2)
        if step in (9, 999):
            rows.settle()
            gc.collect()
            counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]
    assert threading.active_count() <= threads + 2 * THREADS
    assert len(buffers) <= 2 * THREADS + 1
    assert rows.waited >= 0
    rows.close()


class Slow:
    """Holds the first row up until it may go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.saves = 0
        self.kept = stores.HostKeeper((struct((2,), "float32", P()),))
        self.loading, self.forget = self.kept.loading, self.kept.forget

    def save(self, layer: int, row: Arrays) -> None:
        self.saves += 1
        if self.saves == 1:
            assert self.go.wait(60)
        self.kept.save(layer, row)


def test_calls_return_before_rows_are_home() -> None:
    slow = Slow()
    shapes = [struct((2,), "float32", P())]
    values = drawn(shapes, 0)
    rows = MovedRows(tuple(shapes), [slow] * 3, room=2)
    rows.put(0, placed(values, shapes))
    rows.ahead(0)  # neither waits for the other thread
    assert not slow.go.is_set()
    threading.Timer(0.2, slow.go.set).start()
    before = rows.waited
    assert_same(rows.fetch(0), values, shapes)
    assert rows.waited - before > 0.05
    rows.close()


def test_the_last_of_two_that_are_put_at_once_stays() -> None:
    slow = Slow()
    shapes = [struct((2,), "float32", P())]
    values = [drawn(shapes, seed) for seed in range(2)]
    rows = MovedRows(tuple(shapes), [slow], room=2)
    for each in values:
        rows.put(0, placed(each, shapes))
    threading.Timer(0.1, slow.go.set).start()  # until then the other thread could go first
    rows.settle()
    assert slow.go.is_set()
    assert_same(rows.fetch(0), values[-1], shapes)
    rows.close()


def test_what_was_fetched_ahead_is_no_more_when_another_is_put() -> None:
    shapes = [struct((2,), "float32", P())]
    before, after = (drawn(shapes, seed) for seed in range(2))
    rows = MovedRows(tuple(shapes), [stores.HostKeeper(tuple(shapes))], room=2)
    rows.put(0, placed(before, shapes))
    rows.settle()
    rows.ahead(0)
    wait(rows._reading[0])  # it is on the devices
    rows.put(0, placed(after, shapes))
    assert_same(rows.fetch(0), after, shapes)
    rows.close()


class SlowToRead(stores.HostKeeper):
    """Holds whoever reads up until it may go."""

    def __init__(self) -> None:
        super().__init__((struct((2,), "float32", P()),))
        self.begun, self.go = threading.Event(), threading.Event()

    def loading(self, layer: int) -> contextlib.AbstractContextManager[Callable[[], Arrays]]:
        self.begun.set()
        assert self.go.wait(60)
        return super().loading(layer)


@pytest.mark.parametrize("name", ["forget", "put"])
def test_a_row_is_not_changed_under_a_thread_that_reads_it(name: str) -> None:
    """Also where what it reads is not wanted any more."""
    slow = SlowToRead()
    shapes = [struct((2,), "float32", P())]
    rows = MovedRows(tuple(shapes), [slow], room=2)
    rows.put(0, placed(drawn(shapes, 0), shapes))
    rows.settle()
    rows.ahead(0)
    assert slow.begun.wait(60)
    rows.drop(0)
    threading.Timer(0.1, slow.go.set).start()
    if name == "forget":
        rows.forget(0)
    else:
        rows.put(0, placed(drawn(shapes, 1), shapes))
    rows.settle()
    assert slow.go.is_set()
    rows.close()


def test_a_row_for_which_a_thread_found_room_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fetches it waits for room, and the thread that has read it is the first to see some."""
    shapes = [struct((2,), "float32", P())]
    keeper, loads, waits = stores.HostKeeper(tuple(shapes)), [], threading.Event()
    rows = MovedRows(tuple(shapes), [keeper], room=2)
    rows.put(0, placed(drawn(shapes, 0), shapes))
    rows.settle()
    read, load, may_come = rows._read, rows._load, rows._may_come

    def read_slowly(*arguments: Any) -> None:
        read(*arguments)
        with rows._changed:
            rows._changed.notify_all()
        assert waits.wait(10)

    def comes(ahead: Any) -> bool:
        if threading.current_thread() is threading.main_thread() and not waits.is_set():
            waits.set()
            return False
        return may_come(ahead)

    monkeypatch.setattr(rows, "_read", read_slowly)
    monkeypatch.setattr(rows, "_load", lambda ahead: loads.append(1) or load(ahead))
    monkeypatch.setattr(rows, "_may_come", comes)
    rows.ahead(0)
    np.testing.assert_array_equal(rows.fetch(0)[0], placed(drawn(shapes, 0), shapes)[0])
    rows.close()
    assert len(loads) == 1


def test_what_a_thread_could_not_do_is_raised_by_the_next_call() -> None:
    class Full(stores.HostKeeper):
        def save(self, layer: int, row: Arrays) -> None:
            raise OSError(28, "no place")

    shapes = [struct((2,), "float32", P())]
    for name in ("ahead", "fetch", "put", "drop", "forget", "settle"):
        rows = MovedRows(tuple(shapes), [Full(tuple(shapes))] * 2, room=2)
        rows.put(0, placed(drawn(shapes, 0), shapes))
        while rows._writing:
            pass
        arguments = () if name == "settle" else (1, placed(drawn(shapes, 0), shapes)) if name == "put" else (1,)
        with pytest.raises(OSError, match="no place"):
            getattr(rows, name)(*arguments)
        with pytest.raises(OSError, match="no place"):  # nor is it forgotten then
            rows.settle()
        rows.close()


def test_a_row_that_could_not_be_read_is_no_secret() -> None:
    """Nobody fetches it, and it is told."""
    unread = SlowToRead()
    unread.loading = lambda layer: (_ for _ in ()).throw(OSError(5, f"{layer} can't be read"))
    shapes = [struct((2,), "float32", P())]
    rows = MovedRows(tuple(shapes), [unread] * 2, room=2)
    rows.put(0, placed(drawn(shapes, 0), shapes))
    rows.ahead(0)
    with pytest.raises(OSError, match="0 can't be read"):
        rows.close()
    rows = MovedRows(tuple(shapes), [unread], room=2)
    rows.ahead(0)
    with pytest.raises(OSError, match="0 can't be read"):
        rows.fetch(0)
    rows.close()  # it was told


def test_a_row_that_was_never_put_is_our_fault() -> None:
    shapes = [struct((2,), "float32", P())]
    rows = make_rows(shapes, ["host", "device"], "opt")
    for layer in range(2):
        with pytest.raises(AssertionError, match="never put"):
            rows.fetch(layer)
    wrong = placed([np.zeros(3, np.float32)], shapes)
    with pytest.raises(AssertionError, match="belongs"):
        rows.put(0, wrong)
    rows.close()


def test_devices_without_host_memory_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "HOST", "far_away")
    with pytest.raises(ValueError, match=r"device, pinned_host.*and not far_away.*budget="):
        make_rows([struct((2,), "float32", P())], ["host"], "opt")
    make_rows([struct((2,), "float32", P())], ["device"], "opt").close()
