"""Rows that are only read: some on the devices, some in host memory, and the others where they are stored."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from cjax.planner.homes import Home
from cjax.walk.moving import Arrays, MovedRows, Shapes, pairs
from cjax.walk.stores import ROOM, HostKeeper

Read = Callable[[int], Sequence[np.ndarray]]  # a layer -> its arrays as stored, which nobody else has


class StoredKeeper:
    """Rows of which nothing is kept: each time one is wanted, it is read where it is stored."""

    def __init__(self, shapes: Shapes, read: Read) -> None:
        self._shapes, self._read = shapes, read

    @contextlib.contextmanager
    def loading(self, layer: int) -> Iterator[Callable[[], Arrays]]:
        arrays = list(self._read(layer))
        yield lambda: tuple(_placed(x, shape) for x, shape in pairs(arrays, self._shapes))  # type: ignore[arg-type]

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
            if home != "disk":
                with stored.loading(layer) as load:
                    self.put(layer, load())
        self.settle()

    def fetch(self, layer: int) -> tuple[Any, ...]:
        return self._grouped(super().fetch(layer))


def _placed(x: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: x[index], dtype=shape.dtype)
