"""A batch as the user gives it: checked against what was promised, and placed on the mesh."""

from typing import Any

import jax
import numpy as np

from cjax.program.state import Parts
from cjax.tree import leaf_names

PyTree = Any


def place_batch(parts: Parts, batch: PyTree, limits: dict[int, int]) -> PyTree:
    """`batch`, ready for the step.

    With several processes a NumPy batch is this process's rows, and becomes its part of the global batch.

    Args:
      parts: of the program.
      batch: the user's arrays.
      limits: for leaves that index a table, by position: the size of the table.

    Raises:
      ValueError: a batch of other leaves, shapes or dtypes than `parallelize` saw; an index outside its table.
    """
    leaves, treedef = jax.tree.flatten(batch)
    wanted, wanted_tree = jax.tree.flatten(parts.batch_shape)
    if treedef != wanted_tree:
        raise ValueError(
            f"this batch has the leaves {', '.join(leaf_names(batch))}; parallelize saw "
            f"{', '.join(leaf_names(parts.batch_shape))}. Give the same tree, or call parallelize with this batch."
        )
    num_processes = jax.process_count()
    for i, (leaf, shape) in enumerate(zip(leaves, wanted, strict=True)):
        local = num_processes > 1 and not isinstance(leaf, jax.Array) and shape.shape
        rows = (shape.shape[0] // num_processes, *shape.shape[1:]) if local else shape.shape
        dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", np.asarray(leaf).dtype))
        if np.shape(leaf) != tuple(rows) or dtype != jax.dtypes.canonicalize_dtype(shape.dtype):
            raise ValueError(
                f"batch {leaf_names(parts.batch_shape)[i]!r} is {dtype}{list(np.shape(leaf))}; this program was made "
                f"for {shape.dtype}{list(rows)}. Give a batch of that shape and dtype, or call "
                "program.replan(program.plan) after parallelize with the new one."
            )
        if i in limits and isinstance(leaf, np.ndarray) and leaf.size:
            _check_indices(leaf, limits[i], leaf_names(parts.batch_shape)[i])
    return join_processes(batch, parts.batch_shardings)


def join_processes(batch: PyTree, shardings: PyTree) -> PyTree:
    """The global batch of which each process holds its rows; with one process, the batch itself."""
    if jax.process_count() == 1:
        return batch

    def joined(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(joined, batch, shardings)


def global_shape(batch: PyTree) -> PyTree:
    """ShapeDtypeStructs of the global batch of which this process holds its rows."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        size, array = np.shape(leaf), isinstance(leaf, jax.Array)
        rows = size if array or not size else (size[0] * jax.process_count(), *size[1:])
        dtype = leaf.dtype if array else np.asarray(leaf).dtype
        return jax.ShapeDtypeStruct(rows, jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(shape, batch)


def _check_indices(leaf: np.ndarray, size: int, name: str) -> None:
    low, high = int(leaf.min()), int(leaf.max())
    if high >= size or low < -size:
        bad = high if high >= size else low
        where = tuple(int(i) for i in np.argwhere(leaf == bad)[0])
        raise ValueError(
            f"batch {name!r} holds {bad} at {list(where)}, outside a table of {size} rows (a vocabulary?). Check the "
            f"tokenizer, or make the model with room for {bad + 1}."
        )
