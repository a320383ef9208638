"""How many bytes rows have: of a device, of a process in host memory, and on disk."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.walk.direct import BLOCK
from cjax.walk.measured import data_bytes, num_bytes, row_bytes

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"))


def struct(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


def test_a_part_is_on_every_device_that_holds_it_and_on_disk_once() -> None:
    x = struct((1024, 4), jnp.float32, P("data"))  # of each quarter, two devices have a copy
    part = 256 * 4 * 4
    assert num_bytes(x) == part and data_bytes(x) == 4 * part
    assert row_bytes([x]) == (part, 8 * part, 4 * part)


def test_rows_on_disk_are_whole_blocks() -> None:
    found = row_bytes([struct((8,), jnp.int8, P()), struct((6, 2), jnp.bfloat16, P(None, "tensor"))])
    assert found == (8 + 12, 8 * (8 + 12), BLOCK)


def test_a_key_is_two_words() -> None:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    assert num_bytes(keys) == data_bytes(keys) == 3 * 8
