"""Rows of layers between their uses: on the devices, in host memory or on disk, and on their way there and back.

A row is what one layer has of one kind: a tuple of arrays. What is fetched is what was put last, bit for bit, whatever
the homes and the order of calls. Moving happens in threads: `ahead` brings a row while another is computed with, `put`
takes one away while the next is computed. At most `room` rows are on the devices at once: the one in use, and those on
their way in or out.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax

from cjax.planner.homes import Home, Kind
from cjax.walk.disk import DiskKeeper
from cjax.walk.files import Folder
from cjax.walk.moving import HOST, THREADS, Arrays, Keeper, MovedRows, Shapes, known, moved

ROOM = 2  # rows of one kind that a device has place for: the one in use, and one on its way


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


class HostKeeper:
    """Rows in memory of the host that the devices can read themselves."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._rows: dict[int, Arrays] = {}

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[Callable[[], Arrays]]:
        row = known(self._rows, layer)
        yield lambda: moved(row, [shape.sharding for shape in self._shapes])

    def save(self, layer: int, row: Arrays) -> None:
        self._rows[layer] = row

    def forget(self, layer: int) -> None:
        self._rows.pop(layer, None)


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

    Moving takes memory of the host too, beside the rows at home there: at most 2 rows of a kind for "host", 10 for
    "disk", whose 5 buffers are made once (`MOVING`).

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
        folder.before_commit(_settling(rows))
    return rows


def _settling(rows: MovedRows) -> Callable[[], None]:
    """What settles rows for as long as anybody has them: a folder must not be who does, or they would be in memory
    until Python's collector finds that nobody else is."""
    found = weakref.WeakMethod(rows.settle)

    def settle() -> None:
        if (method := found()) is not None:
            method()

    return settle


def _check_memory(shapes: Shapes) -> None:
    for device in {device for shape in shapes for device in shape.sharding.addressable_devices}:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if HOST not in kinds:
            raise ValueError(
                f"{device} knows the memories {', '.join(kinds) or 'none'}, and not {HOST}, through which state leaves "
                "it; leave out budget=, offload=, host= and disk= there"
            )
