"""Rows that are only read: each layer's own, wherever they are."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.planner.homes import Home
from cjax.walk.read_rows import ReadRows

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
HOMES: list[Home] = ["device", "host", "disk", "disk"]


def test_each_layer_has_its_own() -> None:
    asked: list[int] = []

    def read(layer: int) -> Sequence[np.ndarray]:
        asked.append(layer)
        return np.arange(4, dtype=np.float32) + 10 * layer, np.full((2, 2), layer, np.int8)

    shapes = [
        jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(MESH, P("data"))),
        jax.ShapeDtypeStruct((2, 2), jnp.int8, sharding=NamedSharding(MESH, P())),
    ]
    rows = ReadRows(shapes, HOMES, read, lambda row: (row[1], row[0]))
    try:
        assert asked == [0, 1], "what is to be at home is read once, and before"
        for _ in range(2):
            for layer in range(len(HOMES)):
                second, first = rows.fetch(layer)
                np.testing.assert_array_equal(first, np.arange(4) + 10 * layer)
                np.testing.assert_array_equal(second, np.full((2, 2), layer))
                assert first.sharding.shard_shape(first.shape) == (2,)
        assert asked == [0, 1, 2, 3, 2, 3], "what is stored is read each time it is asked for"
        with pytest.raises(AssertionError, match="only read"):
            rows.put(2, rows.fetch(2)[::-1])
            rows.settle()
    finally:
        rows.close()
