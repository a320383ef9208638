"""Rows on their way between the devices and where they are kept: which may move when, and what waits for what.

No thread waits for room on the devices: a row that has none stays in its buffer, and whoever makes room sends it on.
So threads always come to an end, and a process that gives up in the middle of a step ends too.
"""

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

import jax

from cjax.mesh import moving, own_context

Arrays = tuple[jax.Array, ...]
Shapes = tuple[jax.ShapeDtypeStruct, ...]
P = ParamSpec("P")
R = TypeVar("R")

HOST = "pinned_host"
THREADS = 2  # that read, and as many that write: one has a row in flight while the other waits for the disk


class Keeper(Protocol):
    """Rows that are not on the devices. `loading`, `save` and `forget` of one layer are never called at once."""

    def loading(self, layer: int) -> contextlib.AbstractContextManager[Callable[[], Arrays]]:
        """Entered, the row is in host memory; what it gives makes arrays on the devices of it."""
        ...

    def save(self, layer: int, row: Arrays) -> None:
        """Keeps a row, whose arrays are in `pinned_host`."""
        ...

    def forget(self, layer: int) -> None: ...


class _At(enum.Enum):
    """How far a row has come that was asked for."""

    ASKED = enum.auto()
    READING = enum.auto()
    READ = enum.auto()  # it is in host memory, and waits for room
    COMING = enum.auto()
    HERE = enum.auto()
    FAILED = enum.auto()


_MOVING = (_At.READING, _At.COMING)
_ON_DEVICES = (_At.COMING, _At.HERE)
_BUFFERED = (_At.READING, _At.READ, _At.COMING)


@dataclass(eq=False)
class _Ahead:
    """A row that was asked for and is not fetched yet."""

    layer: int
    at: _At = _At.ASKED
    is_wanted: bool = False  # `fetch` waits for it, or sees to it itself
    is_dropped: bool = False
    has_thread: bool = False
    buffered: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed, the buffer is free again
    load: Callable[[], Arrays] | None = None
    row: Arrays | None = None


class MovedRows:
    """Rows of one kind of one stack, each at the home of its layer.

    Args:
        shapes: the arrays of a row, each with its sharding: the same for all layers.
        keepers: where each layer's row is between its uses; None: on the devices.
        room: how many rows the devices have place for.
    """

    def __init__(self, shapes: Shapes, keepers: Sequence[Keeper | None], room: int) -> None:
        assert room >= 2, "a row in use and one on its way"
        self.waited = 0.0
        self._shapes = shapes
        self._keepers = tuple(keepers)
        self._room = room
        self._resident: dict[int, Arrays] = {}
        self._aheads: dict[int, _Ahead] = {}  # in the order in which they were asked for
        self._reading: dict[int, list[Future[None]]] = {}  # of a layer, also what was dropped since
        self._writing: dict[int, Future[None]] = {}
        self._leaving = 0  # rows that were put, and are on the devices still
        self._error: Exception | None = None
        self._is_told = False
        # Guards all of the above; whoever changes what another may wait for notifies.
        self._changed = threading.Condition()
        self._readers = ThreadPoolExecutor(THREADS, "cjax-read")
        self._writers = ThreadPoolExecutor(THREADS, "cjax-write")

    @property
    def has_failed(self) -> bool:
        """Whether a row could not be read or written: from then on, all that is asked raises that."""
        return self._error is not None

    # -- what the walk calls ------------------------------------------------------------------------------------------
    def ahead(self, layer: int) -> None:
        self._raise_error()
        if self._keepers[layer] is None:
            return
        with self._changed:
            self._aheads.setdefault(layer, _Ahead(layer))
            self._advance()

    def fetch(self, layer: int) -> Arrays:
        self._raise_error()
        if self._keepers[layer] is None:
            return known(self._resident, layer)
        with self._waiting():
            with self._changed:
                ahead = self._aheads.setdefault(layer, _Ahead(layer))
                ahead.is_wanted = True
                self._changed.wait_for(lambda: ahead.at not in _MOVING)
                behind = self._writing.get(layer)
            try:
                # What no thread is at, this one is: it may wait.
                if ahead.at is _At.ASKED:
                    apart(self._read)(ahead, behind)
                with self._changed:
                    # While this one waits for room, the thread that has read the row may find some and send it on.
                    self._changed.wait_for(lambda: self._is_settled(ahead))
                    comes = ahead.at is _At.READ
                    if comes:
                        ahead.at = _At.COMING
                if comes:
                    apart(self._load)(ahead)
            finally:
                with self._changed:
                    self._drop(layer)
                    self._advance()
        self._raise_error()
        assert ahead.row is not None, "only what nobody waits for is dropped"
        return ahead.row

    def put(self, layer: int, row: Arrays) -> None:
        self._raise_error()
        self._check(row)
        if self._keepers[layer] is None:
            self._resident[layer] = row
            return
        # In a box: a thread's argument would hold the row on the devices until it is written.
        box = [row]
        del row
        with self._waiting(), self._changed:
            before = self._drop(layer)
            self._changed.wait_for(self._may_leave)
            self._leaving += 1
            if layer in self._writing:
                before.append(self._writing[layer])
            writing = self._writers.submit(apart(self._take), layer, box, before)
            self._writing[layer] = writing
        # Not under the lock: where the thread is done already, this one calls.
        writing.add_done_callback(lambda done: self._written(layer, done))

    def drop(self, layer: int) -> None:
        self._raise_error()
        with self._changed:
            self._drop(layer)
            self._advance()

    def forget(self, layer: int) -> None:
        self._raise_error()
        keeper = self._keepers[layer]
        if keeper is None:
            self._resident.pop(layer, None)
            return
        with self._waiting():
            with self._changed:
                before = self._drop(layer)
                self._advance()
                if layer in self._writing:
                    before.append(self._writing[layer])
            wait(before)
            keeper.forget(layer)
        self._raise_error()

    def settle(self) -> None:
        with self._waiting():
            with self._changed:
                writing = list(self._writing.values())
            wait(writing)
        self._raise_error()

    def close(self) -> None:
        with self._changed:
            for layer in tuple(self._aheads):
                self._drop(layer)
        self._readers.shutdown()
        self._writers.shutdown()
        self._resident.clear()
        if not self._is_told:
            self._raise_error()

    # -- what threads do ----------------------------------------------------------------------------------------------
    def _advance(self) -> None:
        """Sends on what may go on. Called with the lock, by whoever changed something."""
        self._changed.notify_all()
        # A row that `fetch` reads itself has a buffer of its own.
        buffered = sum(other.has_thread and other.at in _BUFFERED for other in self._aheads.values())
        for ahead in self._aheads.values():
            if ahead.is_wanted:
                continue
            if ahead.at is _At.ASKED and buffered < THREADS:
                ahead.at = _At.READING
                self._begin(ahead, self._bring, self._writing.get(ahead.layer))
                buffered += 1
            elif ahead.at is _At.READ and self._may_come(ahead):
                ahead.at = _At.COMING
                self._begin(ahead, self._finish)

    def _begin(self, ahead: _Ahead, function: Callable[..., None], *arguments: Future[None] | None) -> None:
        ahead.has_thread = True
        self._reading[ahead.layer] = [
            *self._at_work(ahead.layer),
            self._readers.submit(apart(function), ahead, *arguments),
        ]

    def _bring(self, ahead: _Ahead, behind: Future[None] | None) -> None:
        """A thread reads a row, and brings it to the devices if there is room."""
        with self._noted(ahead):
            self._read(ahead, behind)
        with self._changed:
            # Somebody else may have sent it on since.
            goes_on = ahead.at is _At.READ and not ahead.is_dropped and self._may_come(ahead)
            if goes_on:
                ahead.at = _At.COMING
            self._advance()
        if goes_on:
            self._finish(ahead)

    def _finish(self, ahead: _Ahead) -> None:
        with self._noted(ahead):
            self._load(ahead)
        with self._changed:
            self._advance()

    def _read(self, ahead: _Ahead, behind: Future[None] | None) -> None:
        """Brings a row to host memory, when it is written."""
        if behind is not None:
            behind.result()
        keeper = self._keepers[ahead.layer]
        assert keeper is not None
        load = ahead.buffered.enter_context(keeper.loading(ahead.layer))
        with self._changed:
            ahead.load = load
            ahead.at = _At.READ
            if ahead.is_dropped:
                ahead.buffered.close()

    def _load(self, ahead: _Ahead) -> None:
        """Brings a row from host memory to the devices."""
        assert ahead.load is not None
        try:
            with moving():
                row = jax.block_until_ready(ahead.load())
        finally:
            ahead.buffered.close()
        with self._changed:
            ahead.load = None
            ahead.row = None if ahead.is_dropped else row
            ahead.at = _At.HERE

    def _take(self, layer: int, box: list[Arrays], before: list[Future[None]]) -> None:
        """Takes a row off the devices, and home: behind what was begun before with the row of the same layer."""
        keeper = self._keepers[layer]
        assert keeper is not None
        with self._noted():
            try:
                there = box.pop()
                with moving():
                    host = moved(there, [shape.sharding.with_memory_kind(HOST) for shape in self._shapes])
                    jax.block_until_ready(host)
                del there
            finally:
                with self._changed:
                    self._leaving -= 1
                    self._advance()
            wait(before)
            keeper.save(layer, host)

    # -- who may go ---------------------------------------------------------------------------------------------------
    def _is_settled(self, ahead: _Ahead) -> bool:
        """Whether no thread is at a row, and if it waits for room, there is some."""
        return ahead.at not in _MOVING and (ahead.at is not _At.READ or self._may_come(ahead))

    def _may_come(self, ahead: _Ahead) -> bool:
        others = self._on_devices()
        if ahead.is_wanted:  # it is the one in use
            return others < self._room
        first = next(other for other in self._aheads.values() if other.at not in _ON_DEVICES)
        return first is ahead and 1 + others < self._room

    def _may_leave(self) -> bool:
        return 1 + self._leaving < self._room and self._on_devices() < self._room

    def _on_devices(self) -> int:
        """Rows there, but for the one in use."""
        return self._leaving + sum(other.at in _ON_DEVICES for other in self._aheads.values())

    def _drop(self, layer: int) -> list[Future[None]]:
        """Gives up what `ahead` began; returns who is still at a row of this layer. Called with the lock."""
        ahead = self._aheads.pop(layer, None)
        if ahead is not None:
            ahead.is_dropped = True
            if ahead.at not in _MOVING:
                ahead.buffered.close()
        return self._at_work(layer)

    def _at_work(self, layer: int) -> list[Future[None]]:
        """Threads that read a row, whether it is wanted or not."""
        return [work for work in self._reading.get(layer, ()) if not work.done()]

    # -- shared -------------------------------------------------------------------------------------------------------
    def _check(self, row: Arrays) -> None:
        for x, shape in pairs(row, self._shapes):
            is_alike = (x.shape, x.dtype) == (shape.shape, shape.dtype)
            # Specs may be written in several ways, with a None at the end or without.
            assert is_alike and x.sharding.is_equivalent_to(shape.sharding, x.ndim), (
                f"a row has {x.shape} {x.dtype} {x.sharding} where {shape.shape} {shape.dtype} {shape.sharding} belongs"
            )

    def _written(self, layer: int, done: Future[None]) -> None:
        with self._changed:
            if self._writing.get(layer) is done:
                del self._writing[layer]

    @contextlib.contextmanager
    def _noted(self, ahead: _Ahead | None = None) -> Iterator[None]:
        """What goes wrong in a thread is raised by the next call."""
        try:
            yield
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                if ahead is not None:
                    ahead.at = _At.FAILED
                    ahead.buffered.close()
                self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_told = True
            raise self._error

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start


def moved(row: Arrays, shardings: Sequence[jax.sharding.Sharding]) -> Arrays:
    """Copies of arrays in other memory of the same devices.

    All at once: a GPU moves the many small arrays of a layer faster than Python asks for them one by one.
    """
    if all(x.is_fully_addressable for x in row):
        return tuple(jax.device_put(list(row), list(shardings)))
    # Each process moves what it has. Of whole arrays, JAX would make a program that all must run in the same order.
    return tuple(_moved_parts(x, sharding) for x, sharding in zip(row, shardings, strict=True))


def _moved_parts(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    kind = sharding.memory_kind
    parts = [
        jax.device_put(shard.data, jax.sharding.SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def known(rows: dict[int, Arrays], layer: int) -> Arrays:
    assert layer in rows, f"layer {layer} was never put, or forgotten"
    return rows[layer]


def pairs(row: Arrays, shapes: Shapes) -> Iterator[tuple[jax.Array, jax.ShapeDtypeStruct]]:
    return zip(row, shapes, strict=True)


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, in whose thread nothing of the caller's JAX is set: neither a context, nor 64 bits."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(True):  # or a float64 array would become another, without a word
            return function(*args, **kwargs)

    return own_context(run)
