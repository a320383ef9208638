"""A batch as the user gives it: checked against what was promised, and placed on the mesh."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.mesh import compiler_options
from cjax.program.state import Parts
from cjax.trace.indices import Limits, index_limits
from cjax.trace.reading import Trace
from cjax.tree import leaf_names

PyTree = Any


def place_batch(parts: Parts, batch: PyTree, limits: dict[int, Limits]) -> PyTree:
    """`batch`, ready for the step.

    With several processes a NumPy batch is this process's rows, and becomes its part of the global batch.

    Args:
      parts: of the program.
      batch: the user's arrays.
      limits: for leaves that index a table, by position: what they may hold.

    Raises:
      ValueError: a batch of other leaves, shapes or dtypes than `parallelize` saw; an index outside its table.
    """
    check_tree(batch, parts.batch_shape)
    leaves, wanted = jax.tree.leaves(batch), jax.tree.leaves(parts.batch_shape)
    num_processes = jax.process_count()
    for i, (leaf, shape) in enumerate(zip(leaves, wanted, strict=True)):
        local = num_processes > 1 and not isinstance(leaf, jax.Array) and shape.shape
        rows = (shape.shape[0] // num_processes, *shape.shape[1:]) if local else shape.shape
        # Not `np.asarray` of what has a dtype: that would fetch an array from its devices at each step.
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
        if np.shape(leaf) != tuple(rows) or dtype != jax.dtypes.canonicalize_dtype(shape.dtype):
            raise ValueError(
                f"batch {leaf_names(parts.batch_shape)[i]!r} is {dtype}{list(np.shape(leaf))}; this program was made "
                f"for {shape.dtype}{list(rows)}. Give a batch of that shape and dtype, or call parallelize with one "
                "like this. (A last batch with fewer rows: drop it, or give it to evaluate, which takes any number.)"
            )
    check_indices(batch, limits)
    return join_processes(batch, parts.batch_shardings)


def check_tree(batch: PyTree, wanted: PyTree) -> None:
    """Raises ValueError, with the names of both, unless the two trees have one structure."""
    if isinstance(batch, Iterator):
        raise TypeError(f"`batch` is a {type(batch).__name__}, which gives many. Give one of them: next(batches).")
    if jax.tree.structure(batch) == jax.tree.structure(wanted):
        return
    have, need = leaf_names(batch), leaf_names(wanted)
    if have == need:
        given, seen = f"the form {jax.tree.structure(batch)}", str(jax.tree.structure(wanted))
    else:
        given, seen = f"the leaves {_few(have)}", _few(need)
    lists = " (Lists of numbers are trees, too: make them arrays with np.asarray.)" if len(have) > len(need) else ""
    raise ValueError(
        f"this batch has {given}; parallelize saw {seen}. Give the same tree, or call parallelize with this batch."
        + lists
    )


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "") or "of an empty tree"


def join_processes(batch: PyTree, shardings: PyTree) -> PyTree:
    """The batch as a compiled step takes it: arrays of JAX placed like its own; of NumPy arrays, each process's rows
    joined to the global batch."""
    is_alone = jax.process_count() == 1

    def joined(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf if leaf.sharding.is_equivalent_to(sharding, leaf.ndim) else jax.device_put(leaf, sharding)
        return leaf if is_alone else _joined(np.asarray(leaf), sharding)

    return jax.tree.map(joined, batch, shardings)


def _joined(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The global array of which this process holds its rows; devices of several processes may need the same ones, where
    a pipeline or tensor parallelism reaches across."""
    if not rows.ndim:
        return jax.make_array_from_process_local_data(sharding, rows)
    shape = (len(rows) * jax.process_count(), *rows.shape[1:])
    needed = {index[0].indices(shape[0]) for index in sharding.addressable_devices_indices_map(shape).values() if index}
    if sum(stop - start for start, stop, _ in needed) == len(rows):
        return jax.make_array_from_process_local_data(sharding, rows, shape)
    mesh: Any = sharding.mesh
    devices = np.array(mesh.devices.flat, dtype=object).reshape(jax.process_count(), -1)
    assert all(len({device.process_index for device in row}) == 1 for row in devices), "processes are mixed in the mesh"
    by_process = NamedSharding(Mesh(devices, ("process", "device")), PartitionSpec("process"))
    return _moved(sharding, mesh)(jax.make_array_from_process_local_data(by_process, rows, shape))


@functools.cache
def _moved(sharding: NamedSharding, mesh: Mesh) -> Any:
    return jax.jit(lambda array: array, out_shardings=sharding, compiler_options=compiler_options(mesh))


def global_shape(batch: PyTree) -> PyTree:
    """ShapeDtypeStructs of the global batch of which this process holds its rows."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        size, array = np.shape(leaf), isinstance(leaf, jax.Array)
        rows = size if array or not size else (size[0] * jax.process_count(), *size[1:])
        dtype = leaf.dtype if array else np.asarray(leaf).dtype
        return jax.ShapeDtypeStruct(rows, jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(shape, batch)


def batch_structs(batch: PyTree) -> PyTree:
    """ShapeDtypeStructs of the batch that `parallelize` is given, in the dtypes that JAX will make of it.

    Raises:
      TypeError: a leaf that is no array, struct or number.
      ValueError: no leaf, no rows, or leaves with different numbers of rows.
    """
    write = (
        "Give one batch, as a tree of NumPy or JAX arrays or of jax.ShapeDtypeStructs, a row for each example: "
        '{"x": np.zeros((8, 5), np.float32)}.'
    )
    if isinstance(batch, Iterator):
        raise TypeError(f"`batch` is a {type(batch).__name__}, which gives many. {write}")
    leaves, treedef = jax.tree.flatten(batch)
    names = [name or "batch" for name in leaf_names(batch)]
    structs = []
    for name, leaf in zip(names, leaves, strict=True):
        try:
            shape = jax.eval_shape(lambda leaf: leaf, leaf)
        except TypeError as error:
            kind = f"array of {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
            raise TypeError(f"batch {name!r} is a {kind}, not an array of numbers. {write}") from error
        structs.append(jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    rows = {name: leaf.shape[0] for name, leaf in zip(names, structs, strict=True) if leaf.shape}
    if not rows or 0 in rows.values():
        why = ": all its leaves are single numbers" if structs and not rows else ""
        raise ValueError(f"this batch has no rows{why}. {write}")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ValueError(
            f"the first dim of every leaf of a batch counts its examples, and these differ: {counts}. Repeat what all "
            "examples share for each of them, or let the loss close over it."
        )
    return jax.tree.unflatten(treedef, structs)


def table_limits(trace: Trace) -> dict[int, Limits]:
    """For leaves of the batch that index a table, by position: what they may hold."""
    batch = trace.leaves_of("batch")
    integers = [i for i in batch if np.issubdtype(trace.leaves[i].dtype, np.integer)]
    return {i - batch[0]: limits for i, limits in index_limits(trace.closed, integers).items()}


def check_indices(batch: PyTree, limits: dict[int, Limits]) -> None:
    """Raises ValueError for an index outside its table; arrays that live on devices are not read."""
    leaves = jax.tree.leaves(batch) if limits else []
    for i, allowed in limits.items():
        leaf, size, low, others = leaves[i], allowed.size, allowed.low, allowed.others
        if not isinstance(leaf, np.ndarray) or not leaf.size or (leaf.min() >= low and leaf.max() < size):
            continue
        outside = ((leaf < low) | (leaf >= size)) & ~np.isin(leaf, list(others))
        if outside.any():
            where = tuple(int(n) for n in np.argwhere(outside)[0])
            bad = int(leaf[where])
            also = "".join(f", and {n}" for n in sorted(others))
            room = f", or make the model with room for {max(bad, -bad - 1) + 1}" if bad >= 0 or low < 0 else ""
            raise ValueError(
                f"batch {leaf_names(batch)[i]!r} holds {bad} at {list(where)}, outside a table of {size} rows (a "
                f"vocabulary, or classes?), which are 0 to {size - 1}{also}. Check the tokenizer or the labels{room}."
            )
