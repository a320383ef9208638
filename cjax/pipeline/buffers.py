"""What stages keep and look up while a pipeline runs: places in arrays, rows of tables, one form for all messages."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = list[Any]
Row = dict[str, jax.Array]
State = dict[str, Any]


def columns_of(columns: dict[str, np.ndarray], num_stacks: int, together: bool) -> dict[str, np.ndarray]:
    """What stages look up: for what they do together, also what any of them does."""
    if not together:
        return columns
    for k in range(num_stacks):
        doing = columns["does"] == k + 1
        for name in ("does", "starts", "ends"):
            flags = doing & (columns[name] > 0)
            columns[f"any {name} {k}"] = np.broadcast_to(flags.any(1, keepdims=True), flags.shape)
    return columns


def runs(times: int, turns: int) -> Any:
    """A scope that tells whoever reads the compiled program how often the branch in it is taken."""
    return jax.named_scope(f"runs_{times}_of_{turns}")


def union(payloads: Sequence[Arrays]) -> tuple[list[list[int]], Arrays]:
    """One message that carries any of the payloads: for each, the places of its arrays in it, and its shapes."""
    message: Arrays = []
    places = []
    for payload in payloads:
        free = list(range(len(message)))
        mine = []
        for x in payload:
            place = next((i for i in free if (message[i].shape, message[i].dtype) == (x.shape, x.dtype)), None)
            if place is None:
                message.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
                place = len(message) - 1
            else:
                free.remove(place)
            mine.append(place)
        places.append(mine)
    return places, message


def at(array: jax.Array, *index: Any) -> jax.Array:
    sizes = [1] * len(index) + list(array.shape[len(index) :])
    return lax.dynamic_slice(array, _starts(array, index), sizes).reshape(array.shape[len(index) :])


def put(room: jax.Array, value: Any, *index: Any) -> jax.Array:
    value = jnp.asarray(value, room.dtype).reshape([1] * len(index) + list(room.shape[len(index) :]))
    return lax.dynamic_update_slice(room, value, _starts(room, index))


def _starts(array: jax.Array, index: Sequence[Any]) -> list[Any]:
    return [*(jnp.asarray(i, jnp.int32) for i in index), *[jnp.int32(0)] * (array.ndim - len(index))]
