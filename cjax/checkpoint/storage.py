"""One checkpoint, to and from a folder: `arrays`, in Orbax's form, beside the description.

It is written under another name, and renamed when the last byte is there: a folder with the final name is whole.
`replacing` has what happens to the one that had the name before.
"""

import contextlib
import errno
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.experimental import multihost_utils

from cjax.checkpoint.description import (
    FILE_NAME,
    UNFINISHED,
    ArrayInfo,
    Summary,
    as_folder,
    check_files,
    check_same,
    describe,
    latest,
    read_description,
    write_description,
)
from cjax.checkpoint.replacing import is_part, located, put_in_place, settle
from cjax.checkpoint.rows import Awaited, PieceHandler, Rows, Stored, key_impl
from cjax.mesh import own_context, together
from cjax.tree import PyTree, leaf_names

_CHUNK = 64 * 2**20  # bytes that are read at once, at least: whoever asks for one layer of many reads as much


@own_context
def save(path: str | Path, tree: PyTree, meta: Mapping[str, Any], rows: Rows | None = None) -> None:
    """Writes one checkpoint to the folder `path`; returns when it is on disk. An older one there is replaced.

    Args:
        path: a folder that does not exist, or holds a checkpoint.
        tree: arrays, sharded or not, random keys and numbers, in any containers.
        meta: what else to keep, in JSON's types; `step` and `plan` are shown by `inspect`.
        rows: the values of those leaves of `tree` that are ShapeDtypeStructs, as they come.

    Raises:
        FileExistsError: `path` holds something else.
        OSError: it could not be written; what was there before still is.
        ValueError: `meta` is no dict, or its step no whole number; a tree without arrays, with names that come twice,
            or with what is no array of numbers.

    >>> import tempfile
    >>> from cjax.checkpoint import inspect
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/first", {"params": {"w": np.ones(3)}}, {"step": 10, "plan": "tensor=4"})
    ...     found = inspect(f"{folder}/first")
    ...     tree, meta = restore(f"{folder}/first", {"params": {"w": np.zeros(3)}})
    >>> found.step, {name: str(info) for name, info in found.arrays.items()}
    (10, {'params/w': 'float64[3]'})
    >>> tree["params"]["w"].tolist(), meta["plan"]
    ([1.0, 1.0, 1.0], 'tensor=4')
    """
    if not isinstance(meta, Mapping) or not str(meta.get("step", 0)).isdecimal():
        raise ValueError(f"`meta` is {meta!r:.80}; it is a dict, whose step, if it has one, is a whole number")
    path = as_folder(path)
    if path.exists() and not (path / FILE_NAME).is_file() and not is_part(path):
        raise FileExistsError(f"{path} exists and holds no checkpoint; name another folder")
    finish = start_writing(path, int(meta.get("step", 0)), tree, meta, rows)
    try:
        finish()
    finally:
        meet()


def start_writing(
    path: Path, step: int, tree: PyTree, meta: Mapping[str, Any], rows: Rows | None = None
) -> Callable[[], None]:
    """Begins a checkpoint. After it returns the arrays may be donated; what it returns finishes, in any thread.
    Rows are written before it returns.

    Raises:
        OSError: from here or from what it returns: it could not be written.
    """
    leaves = dict(zip(_unique_names(tree), jax.tree.leaves(tree), strict=True))
    infos = {name: _info(leaf) for name, leaf in leaves.items()}
    unfit = [f"{name} {info}" for name, info in infos.items() if not _is_number(_storage_shape(leaves[name]).dtype)]
    if unfit:
        raise ValueError(f"a checkpoint holds arrays of numbers, not {', '.join(unfit)}; `meta` takes anything else")
    if not any(info.num_bytes for info in infos.values()):
        raise ValueError('there is no array in this tree to be saved; give one such as {"params": params}')
    awaited = [name for name, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if awaited and rows is None:
        raise ValueError(f"{awaited[0]} is a shape without values; save arrays: program.to_arrays(state)")
    devices = {"num_devices": jax.device_count(), "num_processes": jax.process_count()}
    summary = describe(path, step, infos, {**devices, **meta})
    # Orbax refuses arrays without elements; their shape, in the description, is all there is to know.
    arrays = {name: _to_storage(name, leaf) for name, leaf in leaves.items() if infos[name].num_bytes}
    how = {name: _save_args(leaf) for name, leaf in arrays.items()}
    unfinished = path.with_name(path.name + UNFINISHED)
    with _explained(summary):
        with together("begin a checkpoint", path.parent):
            if jax.process_index() == 0:
                settle(path)
                unfinished.mkdir(parents=True)
        pieces = PieceHandler(rows or ())
        handler = _handler(pieces)
        writer = ocp.AsyncCheckpointer(handler) if rows is None else ocp.Checkpointer(handler)
        try:
            writer.save(unfinished / "arrays", args=ocp.args.PyTreeSave(arrays, how))
            if rows is not None:
                pieces.check(unfinished)
        except BaseException:
            writer.close()
            raise
    return functools.partial(_finish_writing, writer, unfinished, summary)


def _finish_writing(writer: ocp.Checkpointer, unfinished: Path, summary: Summary) -> None:
    with _explained(summary), contextlib.closing(writer):
        if isinstance(writer, ocp.AsyncCheckpointer):
            writer.wait_until_finished()
        if jax.process_index() == 0:
            write_description(unfinished, summary)
            put_in_place(unfinished, summary.path)


@own_context
def restore(
    path: str | Path, abstract: PyTree, ignore: Sequence[str] = (), later: Sequence[str] = ()
) -> tuple[PyTree, dict[str, Any]]:
    """Reads a checkpoint onto the placement that `abstract` asks for; each device receives its own shard alone.

    Args:
        path: the folder of one checkpoint; of a run, or of several, the last is read.
        abstract: the tree to fill. What has a sharding (a `ShapeDtypeStruct`, a jax.Array) becomes a jax.Array there,
            what has none a NumPy array, a Python number a Python number.
        ignore: parts of the checkpoint that may be left unread, by the first part of their names (`opt_state`).
        later: parts whose leaves stay on disk until somebody reads them, as `Stored`, by the first part of their names.

    Returns:
        the tree, and the meta data that was saved with it.

    Raises:
        FileNotFoundError: no checkpoint there, with those that are nearby.
        ValueError: it is of another model (every name, shape and dtype that differs), or damaged (every file).

    `cjax.checkpoint.save` has an example.
    """
    summary = read_description(located(latest(as_folder(path))))
    leaves, treedef = jax.tree.flatten(abstract)
    wanted = dict(zip(_unique_names(abstract), leaves, strict=True))
    infos = {name: _info(leaf) for name, leaf in wanted.items()}
    check_same(summary, infos, ignore)
    check_files(summary, jax.process_index(), jax.process_count())
    stored = {name: _storage_shape(leaf) for name, leaf in wanted.items() if infos[name].num_bytes}
    folder, context = summary.path / "arrays", ts.Context({"cache_pool": {"total_bytes_limit": 2**24}})
    arrays: dict[str, Any] = {
        name: Stored(folder, name, tuple(wanted[name].shape), wanted[name].dtype, context)
        for name in stored
        if name.split("/")[0] in later
    }
    item = {name: shape for name, shape in stored.items() if name not in arrays}
    if item:
        how = {name: _restore_args(shape) for name, shape in item.items()}
        with ocp.Checkpointer(_handler()) as reader:
            arguments = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
            arrays |= reader.restore(folder, args=arguments)
    restored = [_from_storage(leaf, arrays.get(name)) for name, leaf in wanted.items()]
    return jax.tree.unflatten(treedef, restored), dict(summary.meta)


def _handler(pieces: PieceHandler | None = None) -> ocp.PyTreeCheckpointHandler:
    # Processes share the writing of what all of them hold. Within one that gains nothing, and Orbax would compile a
    # slice for every array that is whole on several devices: seconds, for a model of a hundred leaves.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
    registry = ocp.type_handlers.create_type_handler_registry(
        (Awaited, pieces or PieceHandler(())), (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def meet() -> None:
    """Waits for the other processes, so that none reads or removes what another still writes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("cjax checkpoint")


@contextlib.contextmanager
def _explained(summary: Summary) -> Iterator[None]:
    """Turns what a full or broken disk raises, deep inside, into one OSError that says what it takes."""
    try:
        yield
    except FileExistsError:  # says itself what is in the way
        raise
    except (OSError, ValueError, RuntimeError) as error:  # tensorstore raises ValueError for errors of the disk
        place = next(folder for folder in summary.path.parents if folder.exists())
        free = shutil.disk_usage(place).free
        number = getattr(error, "errno", None) or (errno.ENOSPC if "os_error_code='28'" in str(error) else errno.EIO)
        raise OSError(
            number,
            f"the checkpoint {summary.path} could not be written: it takes up to {summary.num_bytes / 2**20:,.1f} MiB, "
            f"{free / 2**20:,.1f} MiB are free there ({str(error).strip().splitlines()[-1]})",
        ) from error


def _unique_names(tree: PyTree) -> tuple[str, ...]:
    names = leaf_names(tree)
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"these names stand for several arrays, so they can't be stored by name: {', '.join(twice)}; rename all "
            "but one of each"
        )
    return names


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.bool_) or jnp.issubdtype(dtype, np.number)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _info(leaf: Any) -> ArrayInfo:
    data = _storage_shape(leaf)
    shaped = leaf if hasattr(leaf, "dtype") else data
    size = int(np.prod(data.shape, dtype=np.int64)) * np.dtype(data.dtype).itemsize
    return ArrayInfo(tuple(shaped.shape), str(shaped.dtype), size)


def _storage_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """What is stored for a leaf, and where it should go: a random key is stored as its bits."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    shape, dtype = leaf.shape, leaf.dtype
    if _is_key(leaf):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = bits.shape, bits.dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(leaf, "sharding", None))


def _to_storage(name: str, leaf: Any) -> jax.Array | np.ndarray | Awaited:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape = _storage_shape(leaf)
        return Awaited(name, shape.shape, shape.dtype)
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _save_args(leaf: jax.Array | np.ndarray | Awaited) -> ocp.SaveArgs:
    if not isinstance(leaf, jax.Array) or leaf.nbytes <= _CHUNK:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=_CHUNK, shard_axes=(0,))


def _restore_args(shape: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    if shape.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=shape.sharding, global_shape=shape.shape, dtype=shape.dtype)


def _from_storage(leaf: Any, array: Any) -> Any:
    if isinstance(array, Stored):
        return array
    if array is None:  # no elements, so nothing was stored
        zeros = np.zeros(leaf.shape, leaf.dtype)
        return zeros if getattr(leaf, "sharding", None) is None else jax.device_put(zeros, leaf.sharding)
    if _is_key(leaf):
        return jax.random.wrap_key_data(array, impl=key_impl(leaf))
    return array if hasattr(leaf, "dtype") else type(leaf)(array)
