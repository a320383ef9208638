"""Rows on disk: arrays to bytes of a file and back, through a few buffers that are made once."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from cjax.planner.homes import Kind
from cjax.walk.direct import BLOCK, buffer, whole_blocks
from cjax.walk.files import Folder
from cjax.walk.moving import Arrays

Index = tuple[slice, ...]
Part = tuple[tuple[int, int], ...]  # of an array: from where to where in each dim
_ALIGNED = 128  # where each part begins in a row: enough for a number of any kind


class DiskKeeper:
    """The rows of one kind of one stack that are on disk, of which this process has its own parts.

    Each part of an array is there once, however many devices hold it.

    Args:
        shapes: the arrays of a row, each with its sharding.
        layers: that are on disk.
        folder: where.
        kind: of the rows.
        stack: its number.
        readers: how many threads read at once.
        writers: how many write.
    """

    def __init__(
        self, shapes: Sequence[jax.ShapeDtypeStruct], layers: Sequence[int], folder: Folder, kind: Kind, stack: int,
        readers: int, writers: int,
    ) -> None:  # fmt: skip
        self._shapes = tuple(shapes)
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._places, size = _places(self._shapes)
        layout = repr([(shape.shape, shape.dtype.name, places) for shape, places in self._pairs()])
        self._file = folder.rows(kind, stack, len(layers), size, f"{sorted(layers)} {layout}")
        self._for_reading = Buffers(readers, size)
        self._for_writing = Buffers(writers, size)

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[Callable[[], Arrays]]:
        with self._for_reading.one() as data:
            self._file.read(self._row_of[layer], data)
            yield lambda: tuple(_array(data, shape, places) for shape, places in self._pairs())

    def save(self, layer: int, row: Arrays) -> None:
        with self._for_writing.one() as data:
            for x, places in zip(row, self._places, strict=True):
                for part, shard in _parts(x).items():
                    piece = np.asarray(shard.data).reshape(-1).view(np.uint8)
                    data[places[part] : places[part] + piece.size] = piece
            self._file.write(self._row_of[layer], data)

    def forget(self, layer: int) -> None:
        self._file.forget(self._row_of[layer])

    def _pairs(self) -> Iterator[tuple[jax.ShapeDtypeStruct, dict[Part, int]]]:
        return zip(self._shapes, self._places, strict=True)


class Buffers:
    """Buffers of one size that threads take turns with; each is made when it is first needed."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._left = threading.Semaphore(count)
        self._free: list[np.ndarray] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[np.ndarray]:
        with self._left:
            try:
                data = self._free.pop()
            except IndexError:
                data = buffer(self._num_bytes)
            try:
                yield data
            finally:
                self._free.append(data)


def aligned(size: int) -> int:
    """Bytes that a part takes in a row."""
    return -(-size // _ALIGNED) * _ALIGNED


def _places(shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[list[dict[Part, int]], int]:
    """Where in a row each part of each array is, of those that this process has, and how long a row is."""
    found: list[dict[Part, int]] = []
    end = 0
    for shape in shapes:
        places: dict[Part, int] = {}
        for index in shape.sharding.addressable_devices_indices_map(shape.shape).values():
            part = _part(index, shape.shape)
            if part not in places:
                places[part] = end
                size = math.prod(stop - start for start, stop in part) * shape.dtype.itemsize
                end += aligned(size)
        found.append(places)
    return found, max(whole_blocks(end), BLOCK)


def _part(index: Index | None, shape: tuple[int, ...]) -> Part:
    assert index is not None
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _parts(x: jax.Array) -> dict[Part, jax.Shard]:
    return {_part(shard.index, x.shape): shard for shard in x.addressable_shards}


def _array(data: np.ndarray, shape: jax.ShapeDtypeStruct, places: dict[Part, int]) -> jax.Array:
    """An array on the devices, which shares no memory with `data`."""

    def piece(index: Index | None) -> np.ndarray:
        part = _part(index, shape.shape)
        sizes = tuple(stop - start for start, stop in part)
        place = places[part]
        there = data[place : place + math.prod(sizes) * shape.dtype.itemsize]
        # A true copy, and one for each device: a CPU device takes NumPy's memory for its own, also where it is told
        # not to, and `data` is read into again.
        return there.copy().view(shape.dtype).reshape(sizes)

    return jax.make_array_from_callback(shape.shape, shape.sharding, piece, dtype=shape.dtype)
