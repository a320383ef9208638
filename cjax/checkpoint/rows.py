"""Arrays that are not in memory: written as they come, a layer at a time, and read as far as somebody asks.

In the folder they look like all others, so that whoever reads a checkpoint need not know how it was written.
"""

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from cjax.mesh import own_context, together

# As Orbax writes: a folder of its own for each process, put together at the end.
_OF_PROCESS = "ocdbt.process_{}"
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8, "manifest_kind": "single"}
_COMPRESSOR = {"id": "zstd", "level": 1}


@dataclass(frozen=True)
class LeafPiece:
    """Values of one leaf.

    Args:
        name: the leaf's.
        layer: which of its layers they are, where the author holds all in one leaf; None: they are all of it.
        array: the values; of an array of several processes each writes its own part.

    >>> piece = LeafPiece("blocks/kernel", 1, jnp.zeros((4, 4)))  # the second of all layers in one leaf [layers, 4, 4]
    >>> piece.array.shape
    (4, 4)
    """

    name: str
    layer: int | None
    array: jax.Array


Rows = Iterable[Sequence[LeafPiece]]


class Unread(abc.ABC):
    """A leaf whose values are not in memory."""

    shape: tuple[int, ...]
    dtype: Any

    @abc.abstractmethod
    def placed(self, sharding: jax.sharding.Sharding, layer: int | None = None) -> jax.Array:
        """The values, or those of one layer of a leaf in which its author holds all of them, on their devices."""


@dataclass(frozen=True)
class Stored(Unread):
    """A leaf of a checkpoint that stays on disk. Each device reads what it is to have.

    Args:
        arrays: the folder of all arrays.
        name: the leaf's.
        shape: its shape.
        dtype: its dtype.
        context: what Tensorstore shares between arrays.
    """

    arrays: Path
    name: str
    shape: tuple[int, ...]
    dtype: Any
    context: ts.Context

    @own_context
    def placed(self, sharding: jax.sharding.Sharding, layer: int | None = None) -> jax.Array:
        is_key = jnp.issubdtype(self.dtype, jax.dtypes.prng_key)
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{self.arrays}/", "path": self.name},
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": False,  # or what is not there would be zeros
        }
        store = ts.open(ts.Spec(spec), open=True, read=True, context=self.context).result()
        here = store if layer is None else store[layer]

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            return here[index].read().result() if index else here.read().result()

        array = jax.make_array_from_callback(here.shape, sharding, part, dtype=here.dtype.numpy_dtype)
        return jax.random.wrap_key_data(array, impl=key_impl(self)) if is_key else array


def key_impl(leaf: Any) -> Any:
    """The random generator of an abstract key. JAX tells it of arrays and tracers only, so one is traced."""
    found: list[Any] = []
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), shape)
    return found[0]


@dataclass(frozen=True)
class Awaited:
    """What stands in a tree for a leaf that comes in pieces: as it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


class PieceHandler(ocp.type_handlers.NumpyHandler):
    """Writes leaves as their pieces come, so that no more than one row of them is held.

    Args:
        rows: pieces, those together that come together; each is written before the next is asked for.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        self._failed: Exception | None = None
        self._is_64 = jax.config.read("jax_enable_x64")

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        # Where an event loop runs already, as in a notebook, this is another thread, which knows no setting of the
        # caller's.
        with jax.enable_x64(self._is_64):
            try:
                own_context(self._write)({value.name: (value, info) for value, info in zip(values, infos, strict=True)})
            except Exception as error:  # told by `check`
                self._failed = error
        return []

    def check(self, folder: Path) -> None:
        """Raises what went wrong in `folder`, to be called when Orbax is done: it does not wait for its threads where
        one of its handlers raises, nor for other processes. Where one process fails, all raise."""
        with together("write all rows", folder):
            if self._failed is not None:
                raise self._failed

    def _write(self, leaves: Mapping[str, tuple[Awaited, Any]]) -> None:
        missing = {name: value.shape[0] if value.shape else 1 for name, (value, _) in leaves.items()}
        layered: dict[str, ts.Future[ts.TensorStore]] = {}
        for row in self._rows:
            # Apart, so that nothing here holds a row while the next is made.
            for name, layer in _write_row(row, leaves, layered):
                missing[name] = 0 if layer is None else missing[name] - 1
            del row
        assert not any(missing.values()), f"never came: {', '.join(name for name in missing if missing[name])}"


def _write_row(
    row: Sequence[LeafPiece], leaves: Mapping[str, tuple[Awaited, Any]], layered: dict[str, ts.Future[ts.TensorStore]]
) -> list[tuple[str, int | None]]:
    """Returns what of which leaves it was when all of it is written: opened together, and written together."""
    opening = []
    row = [piece for piece in row if piece.name in leaves]  # others have no elements
    for piece in row:
        is_key = jnp.issubdtype(piece.array.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(piece.array) if is_key else piece.array
        parts = [shard for shard in data.addressable_shards if shard.replica_id == 0]
        if not parts:  # they are of other processes
            continue
        store = layered.get(piece.name) or _made(*leaves[piece.name], data, piece.layer)
        if piece.layer is not None:
            layered[piece.name] = store
        opening.append((store, piece.layer, parts))
    writing = []
    for store, layer, parts in opening:
        here = store.result() if layer is None else store.result()[layer]
        writing += [here[part.index].write(np.asarray(part.data)) for part in parts]
    for each in writing:
        each.result()
    return [(piece.name, piece.layer) for piece in row]


def _made(leaf: Awaited, info: Any, piece: jax.Array, layer: int | None) -> ts.Future[ts.TensorStore]:
    """An array on disk, about to be opened: cut as pieces and shards are, so that nobody writes another's part."""
    chunk = piece.sharding.shard_shape(piece.shape)
    folder = Path(info.parent_dir) / _OF_PROCESS.format(jax.process_index())
    assert math.prod(leaf.shape) and info.is_ocdbt_checkpoint and not info.use_zarr3
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"file://{folder}/",
            "path": info.name,
            "config": _CONFIG,
            "assume_config": True,
        },
        "dtype": jnp.dtype(leaf.dtype).name,
        "metadata": {
            "shape": leaf.shape,
            "chunks": chunk if layer is None else (1, *chunk),
            "compressor": _COMPRESSOR,
        },
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "store_data_equal_to_fill_value": True,  # a checkpoint without zeros could not be told from half of one
    }
    return ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
