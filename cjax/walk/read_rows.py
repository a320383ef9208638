"""Rows that are only read: some on the devices, some in host memory, and the others where they are stored."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cjax.planner.homes import Home
from cjax.walk.moving import HOST, Arrays, MovedRows, Shapes
from cjax.walk.stores import ROOM, HostKeeper

Read = Callable[[int], Sequence[np.ndarray]]  # a layer -> its arrays as stored, which nobody else has


class StoredKeeper:
    """Rows of which nothing is kept: each time one is wanted, it is read where it is stored."""

    def __init__(self, shapes: Shapes, read: Read) -> None:
        self._shapes, self._read = shapes, read

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[Callable[[], Arrays]]:
        arrays = list(self._read(layer))
        yield lambda: tuple(_placed(x, shape) for x, shape in zip(arrays, self._shapes, strict=True))

    def save(self, layer: int, row: Arrays) -> None:
        raise AssertionError("what is stored is only read")

    def forget(self, layer: int) -> None:
        raise AssertionError("what is stored is only read")


class ReadRows(MovedRows):
    """The weights of one stack's layers, for passes that leave them as they are.

    Args:
      shapes: the arrays of a row, each with its sharding.
      homes: of each layer; "disk": where it is stored.
      read: a row of a layer, where it is stored.
      grouped: makes of a row's arrays what programs take.
    """

    def __init__(
        self, shapes: Sequence[jax.ShapeDtypeStruct], homes: Sequence[Home], read: Read,
        grouped: Callable[[Sequence[Any]], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        stored, host = StoredKeeper(tuple(shapes), read), HostKeeper(tuple(shapes))
        keepers = {"device": None, "host": host, "disk": stored}
        super().__init__(tuple(shapes), [keepers[home] for home in homes], ROOM)
        self._grouped = grouped
        for layer, home in enumerate(homes):
            if home == "device":
                with stored.loading(layer) as load:
                    self.put(layer, load())
            elif home == "host":
                host.save(layer, tuple(_placed(x, s, HOST) for x, s in zip(read(layer), self._shapes, strict=True)))

    def fetch(self, layer: int) -> tuple[Any, ...]:
        return self._grouped(super().fetch(layer))


def _placed(x: np.ndarray, shape: jax.ShapeDtypeStruct, memory: str | None = None) -> jax.Array:
    sharding = shape.sharding if memory is None else shape.sharding.with_memory_kind(memory)
    return jax.make_array_from_callback(shape.shape, sharding, lambda index: x[index], dtype=shape.dtype)
