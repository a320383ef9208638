"""What stages keep and look up while a pipeline runs: places in arrays, rows of tables, one form for all messages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arrays = list[Any]
Row = dict[str, jax.Array]
State = dict[str, Any]


def columns_of(columns: dict[str, np.ndarray], num_stacks: int, lockstep: bool) -> dict[str, np.ndarray]:
    """What stages look up: for what they do in lockstep, also what any of them does."""
    if not lockstep:
        return columns
    for k in range(num_stacks):
        doing = columns["does"] == k + 1
        for name in ("does", "starts", "ends"):
            flags = doing & (columns[name] > 0)
            columns[f"any {name} {k}"] = np.broadcast_to(flags.any(1, keepdims=True), flags.shape)
    return columns


def ticks() -> Any:
    """A scope that tells whoever reads the compiled program that stages go through the loop in it."""
    return jax.named_scope("pipeline_ticks")


def runs(times: Sequence[int], turns: int, lockstep: bool) -> Any:
    """A scope that tells whoever reads the compiled program how often each branch in it is taken, but the first, in
    which nothing is done; and whether by all stages whenever by any."""
    return jax.named_scope(f"{'all_' if lockstep else ''}runs_{'_'.join(map(str, times))}_of_{turns}")


def branch(row: Row, name: str, k: int, lockstep: bool, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes()` where a row says that a stage `does` an op of stack `k`, or that the op's block `starts` or `ends` it,
    and `no()` elsewhere; in lockstep, both wherever any stage has reason to."""
    own = (row["does"] == k + 1) & (row[name] > 0)
    if not lockstep:
        return lax.cond(own, yes, no)
    return lax.cond(row[f"any {name} {k}"], lambda: jax.tree.map(lambda a, b: jnp.where(own, a, b), yes(), no()), no)


class Messages:
    """One form of message that carries what any of the stacks hands on: `shapes` of its arrays."""

    def __init__(self, payloads: Sequence[Arrays]) -> None:
        self.shapes: Arrays = []
        self._places: list[list[int]] = []
        for payload in payloads:
            free = list(range(len(self.shapes)))
            mine = []
            for x in payload:
                # All stages run one permute, so an encoder's and a decoder's payloads share one form. Arrays of the
                # same shape share a place, or each message would be as long as all payloads in a row.
                alike = [i for i in free if (self.shapes[i].shape, self.shapes[i].dtype) == (x.shape, x.dtype)]
                if alike:
                    free.remove(alike[0])
                else:
                    self.shapes.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
                mine.append(alike[0] if alike else len(self.shapes) - 1)
            self._places.append(mine)

    def pack(self, k: int, payload: Arrays) -> Arrays:
        """The message that carries what stack `k` hands on."""
        found = dict(zip(self._places[k], payload, strict=True))
        return [found[i] if i in found else jnp.zeros(s.shape, s.dtype) for i, s in enumerate(self.shapes)]

    def unpack(self, k: int, message: Arrays) -> Arrays:
        return [message[i] for i in self._places[k]]

    def empty(self) -> Arrays:
        """A message that nobody reads."""
        return room(self.shapes)


def send(message: Arrays, way: int, axis: str, num_stages: int) -> Arrays:
    """What comes in from the other side, where every stage sends to its right (1) or its left (-1)."""
    # A ring, though not every link is used in every tick: XLA wants one permute for all devices, whoever has nothing to
    # say.
    pairs = [(i, (i + way) % num_stages) for i in range(num_stages)]
    return [lax.ppermute(x, axis, pairs) for x in message]


def room(shapes: Arrays, *lead: int) -> Arrays:
    """Zeros of these shapes, behind leading dims."""
    return [jnp.zeros((*lead, *s.shape), s.dtype) for s in shapes]


def at(array: jax.Array, *index: Any) -> jax.Array:
    sizes = [1] * len(index) + list(array.shape[len(index) :])
    return lax.dynamic_slice(array, _starts(array, index), sizes).reshape(array.shape[len(index) :])


def put(room: jax.Array, value: Any, *index: Any) -> jax.Array:
    value = jnp.asarray(value, room.dtype).reshape([1] * len(index) + list(room.shape[len(index) :]))
    return lax.dynamic_update_slice(room, value, _starts(room, index))


def _starts(array: jax.Array, index: Sequence[Any]) -> list[Any]:
    return [*(jnp.asarray(i, jnp.int32) for i in index), *[jnp.int32(0)] * (array.ndim - len(index))]
