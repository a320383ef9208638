"""Rows of layers between their uses: on the devices, in host memory or on disk, and on their way there and back.

A row is what one layer has of one kind: a tuple of arrays. What is fetched is what was put last, bit for bit, whatever
the homes and the order of calls. Moving happens in threads: `ahead` brings a row while another is computed with, `put`
takes one away while the next is computed. At most `room` rows are on the devices at once: the one in use, and those on
their way in or out.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

from cjax.mesh import own_context
from cjax.planner.homes import Home, Kind
from cjax.walk.disk import DiskKeeper
from cjax.walk.files import Folder

Arrays = tuple[jax.Array, ...]
Shapes = tuple[jax.ShapeDtypeStruct, ...]
Work = Future[Any]  # of a thread: it ends with a row, or with nothing
P = ParamSpec("P")
R = TypeVar("R")

HOST = "pinned_host"
ROOM = 2  # rows of one kind that a device has place for: the one in use, and one on its way
THREADS = 2  # that read, and as many that write: one has a row in flight while the other waits for the disk


class LayerRows(Protocol):
    """The rows of one kind of one stack. Called from one thread."""

    waited: float
    """Seconds that `fetch`, `put`, `forget` and `settle` waited for host memory or the disk."""

    def ahead(self, layer: int) -> None:
        """Begins to bring a row to the devices; returns at once. It arrives when there is room: none is made for it."""
        ...

    def fetch(self, layer: int) -> Arrays:
        """The row on the devices. The one that was fetched before counts as given up.

        A row that is at home on the devices is handed out itself: who donates it to a program must `put` its successor.
        """
        ...

    def put(self, layer: int, row: Arrays) -> None:
        """The new row, which the caller gives up; returns before it is where it belongs."""
        ...

    def drop(self, layer: int) -> None:
        """What `ahead` began is not wanted. The row stays."""
        ...

    def forget(self, layer: int) -> None:
        """The row is not needed any more: it can't be fetched before another is put."""
        ...

    def settle(self) -> None:
        """Returns when all that was put is where it belongs."""
        ...

    def close(self) -> None:
        """Ends the threads. Nothing may be called after it."""
        ...


class Keeper(Protocol):
    """Rows that are not on the devices. `loading`, `save` and `forget` of one layer are never called at once."""

    def loading(self, layer: int) -> contextlib.AbstractContextManager[Callable[[], Arrays]]:
        """Entered, the row is in host memory; what it gives makes arrays on the devices of it."""
        ...

    def save(self, layer: int, row: Arrays) -> None:
        """Keeps a row, whose arrays are in `pinned_host`."""
        ...

    def forget(self, layer: int) -> None: ...


class HostKeeper:
    """Rows in memory of the host that the devices can read themselves."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._rows: dict[int, Arrays] = {}

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[Callable[[], Arrays]]:
        row = _known(self._rows, layer)
        yield lambda: tuple(moved(x, shape.sharding) for x, shape in _pairs(row, self._shapes))

    def save(self, layer: int, row: Arrays) -> None:
        self._rows[layer] = row

    def forget(self, layer: int) -> None:
        self._rows.pop(layer, None)


def moved(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy of an array in other memory of the same devices."""
    if x.is_fully_addressable:
        return jax.device_put(x, sharding)
    # Each process moves what it has. Of the whole array, JAX would make a program that all must run in the same order.
    kind = sharding.memory_kind
    parts = [
        jax.device_put(shard.data, jax.sharding.SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


@dataclass(eq=False)
class _Ahead:
    """A row that was asked for and is not fetched yet."""

    layer: int
    future: Work = field(default_factory=Future)
    is_wanted: bool = False  # `fetch` waits for it
    is_dropped: bool = False
    has_place: bool = False  # on the devices, or about to be


class MovedRows:
    """Rows of one kind of one stack, each at the home of its layer.

    Args:
        shapes: the arrays of a row, each with its sharding: the same for all layers.
        keepers: where each layer's row is between its uses; None: on the devices.
        room: how many rows the devices have place for.
    """

    def __init__(self, shapes: Shapes, keepers: Sequence[Keeper | None], room: int = ROOM) -> None:
        assert room >= 2, "a row in use and one on its way"
        self.waited = 0.0
        self._shapes = shapes
        self._keepers = tuple(keepers)
        self._room = room
        self._resident: dict[int, Arrays] = {}
        self._aheads: dict[int, _Ahead] = {}  # in the order in which they were asked for
        self._writing: dict[int, Work] = {}
        self._leaving = 0  # rows that were put, and are on the devices still
        self._error: BaseException | None = None
        # Guards all of the above; whoever changes what another may wait for notifies.
        self._changed = threading.Condition()
        self._readers = ThreadPoolExecutor(THREADS, "cjax-read")
        self._writers = ThreadPoolExecutor(THREADS, "cjax-write")

    # -- what the walk calls ------------------------------------------------------------------------------------------
    def ahead(self, layer: int) -> None:
        self._raise_error()
        if self._keepers[layer] is None or layer in self._aheads:
            return
        ahead = _Ahead(layer)
        with self._changed:
            self._aheads[layer] = ahead
            behind = self._writing.get(layer)
        ahead.future = self._readers.submit(_apart(self._bring), ahead, behind)
        ahead.future.add_done_callback(self._note_error)

    def fetch(self, layer: int) -> Arrays:
        self._raise_error()
        if self._keepers[layer] is None:
            return _known(self._resident, layer)
        with self._waiting():
            with self._changed:
                begun = self._aheads.get(layer)
                ahead = self._aheads.setdefault(layer, _Ahead(layer))
                ahead.is_wanted = True
                behind = self._writing.get(layer)
                self._changed.notify_all()
            try:
                # What no thread has begun is brought by this one: those that have may wait for a place.
                is_here = begun is None or begun.future.cancel()
                row = _apart(self._bring)(ahead, behind) if is_here else ahead.future.result()
            finally:
                with self._changed:
                    del self._aheads[layer]
                    self._changed.notify_all()
        assert row is not None, "only what nobody waits for is dropped"
        return row

    def put(self, layer: int, row: Arrays) -> None:
        self._raise_error()
        self._check(row)
        if self._keepers[layer] is None:
            self._resident[layer] = row
            return
        # In a box: a thread's argument would hold the row on the devices until it is written.
        box = [row]
        del row
        with self._waiting():
            before = self._drop(layer)
            with self._changed:
                self._changed.wait_for(lambda: self._may_leave() or self._error)
            self._raise_error()
            with self._changed:
                self._leaving += 1
                if layer in self._writing:
                    before.append(self._writing[layer])
            writing = self._writers.submit(_apart(self._take), layer, box, before)
            with self._changed:
                self._writing[layer] = writing
            writing.add_done_callback(self._note_error)
            writing.add_done_callback(lambda done: self._written(layer, done))

    def drop(self, layer: int) -> None:
        self._raise_error()
        self._drop(layer)

    def forget(self, layer: int) -> None:
        self._raise_error()
        keeper = self._keepers[layer]
        if keeper is None:
            self._resident.pop(layer, None)
            return
        with self._waiting():
            with self._changed:
                writing = [self._writing[layer]] if layer in self._writing else []
            wait([*self._drop(layer), *writing])
            keeper.forget(layer)
        self._raise_error()

    def settle(self) -> None:
        with self._waiting():
            with self._changed:
                writing = list(self._writing.values())
            wait(writing)
        self._raise_error()

    def close(self) -> None:
        for layer in tuple(self._aheads):
            self._drop(layer)
        self._readers.shutdown()
        self._writers.shutdown()
        self._resident.clear()

    # -- what threads do ----------------------------------------------------------------------------------------------
    def _bring(self, ahead: _Ahead, behind: Work | None) -> Arrays | None:
        """A row on the devices, read after it was written, when there is place for it; None if it was dropped."""
        if behind is not None:
            behind.result()
        keeper = self._keepers[ahead.layer]
        assert keeper is not None
        if ahead.is_dropped:
            return None
        with keeper.loading(ahead.layer) as load:
            with self._changed:
                self._changed.wait_for(lambda: ahead.is_dropped or self._may_come(ahead))
                ahead.has_place = not ahead.is_dropped
                # The next in line could not go before this one.
                self._changed.notify_all()
            return None if ahead.is_dropped else load()

    def _take(self, layer: int, box: list[Arrays], before: list[Work]) -> None:
        """Takes a row off the devices, and home: behind what was begun before with the row of the same layer."""
        keeper = self._keepers[layer]
        assert keeper is not None
        try:
            there = box.pop()
            host = tuple(moved(x, shape.sharding.with_memory_kind(HOST)) for x, shape in _pairs(there, self._shapes))
            jax.block_until_ready(host)
            del there
        finally:
            with self._changed:
                self._leaving -= 1
                self._changed.notify_all()
        wait(before)
        keeper.save(layer, host)

    def _may_come(self, ahead: _Ahead) -> bool:
        placed = sum(other.has_place for other in self._aheads.values())
        if ahead.is_wanted:  # it is the one in use
            return placed + self._leaving < self._room
        first = next(other for other in self._aheads.values() if not other.has_place)
        return first is ahead and 1 + placed + self._leaving < self._room

    def _may_leave(self) -> bool:
        placed = sum(other.has_place for other in self._aheads.values())
        return 1 + self._leaving < self._room and placed + self._leaving < self._room

    # -- shared -------------------------------------------------------------------------------------------------------
    def _drop(self, layer: int) -> list[Work]:
        """Gives up what `ahead` began; returns what is still at it."""
        with self._changed:
            ahead = self._aheads.pop(layer, None)
            if ahead is None:
                return []
            ahead.is_dropped = True
            self._changed.notify_all()
        return [] if ahead.future.cancel() else [ahead.future]

    def _check(self, row: Arrays) -> None:
        for x, shape in _pairs(row, self._shapes):
            is_alike = (x.shape, x.dtype) == (shape.shape, shape.dtype)
            # Specs may be written in several ways, with a None at the end or without.
            assert is_alike and x.sharding.is_equivalent_to(shape.sharding, x.ndim), (
                f"a row has {x.shape} {x.dtype} {x.sharding} where {shape.shape} {shape.dtype} {shape.sharding} belongs"
            )

    def _written(self, layer: int, done: Work) -> None:
        with self._changed:
            if self._writing.get(layer) is done:
                del self._writing[layer]

    def _note_error(self, done: Work) -> None:
        if not done.cancelled() and (error := done.exception()):
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start


def make_rows(
    shapes: Sequence[jax.ShapeDtypeStruct],
    homes: Sequence[Home],
    kind: Kind,
    stack: int = 0,
    folder: Folder | None = None,
    room: int = ROOM,
) -> LayerRows:
    """The rows of one kind of one stack.

    Args:
        shapes: the arrays of a row, each with its sharding.
        homes: of each layer.
        kind: of the rows; decides which of them the folder's commits are about.
        stack: its number.
        folder: of those on disk.
        room: how many rows the devices have place for, at least 2.

    Raises:
        ValueError: these devices can't reach the host's memory by themselves, or `disk=` is too little.
        OSError: the disk has no place, or can't be used.

    Example:
        >>> device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> rows = make_rows([jax.ShapeDtypeStruct((2,), "float32", sharding=device)], ["host", "host"], "params")
        >>> rows.put(1, (jax.device_put(jax.numpy.arange(2.0), device),))
        >>> rows.ahead(1)
        >>> rows.fetch(1)
        (Array([0., 1.], dtype=float32),)
    """
    shapes = tuple(shapes)
    keepers: dict[Home, Keeper | None] = {"device": None}
    if {"host", "disk"} & set(homes):
        _check_memory(shapes)
    if "host" in homes:
        keepers["host"] = HostKeeper(shapes)
    if "disk" in homes:
        assert folder is not None, "rows on disk have a folder"
        layers = [layer for layer, home in enumerate(homes) if home == "disk"]
        # A thread has one buffer, and so has the walk itself, which reads what no thread has begun.
        keepers["disk"] = DiskKeeper(shapes, layers, folder, kind, stack, readers=THREADS + 1, writers=THREADS)
    rows = MovedRows(shapes, [keepers[home] for home in homes], room)
    if folder is not None and "disk" in homes:
        folder.before_commit(rows.settle)
    return rows


def _check_memory(shapes: Shapes) -> None:
    for device in {device for shape in shapes for device in shape.sharding.addressable_devices}:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if HOST not in kinds:
            raise ValueError(
                f"{device} knows the memories {', '.join(kinds) or 'none'}, and not {HOST}, through which state leaves "
                "it; leave out budget=, offload=, host= and disk= there"
            )


def _known(rows: Mapping[int, Arrays], layer: int) -> Arrays:
    assert layer in rows, f"layer {layer} was never put, or forgotten"
    return rows[layer]


def _pairs(row: Arrays, shapes: Shapes) -> Iterator[tuple[jax.Array, jax.ShapeDtypeStruct]]:
    return zip(row, shapes, strict=True)


def _apart(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, in whose thread nothing of the caller's JAX is set: neither a context, nor 64 bits."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(True):  # or a float64 array would become another, without a word
            return function(*args, **kwargs)

    return own_context(run)
