"""A batch as the user gives it: checked against what was promised, and placed on the mesh."""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.mesh import compiler_options
from cjax.program.composed import Composed
from cjax.program.keep import mover
from cjax.program.state import State
from cjax.trace.dims.parts import SAME
from cjax.trace.dims.tables import Limits, index_limits
from cjax.trace.reading import Trace
from cjax.tree import PyTree, kind_of, leaf_names


def place_batch(composed: Composed, batch: PyTree, limits: dict[int, tuple[Limits, ...]]) -> PyTree:
    """`batch`, ready for the step.

    With several processes a NumPy batch is this process's rows, and becomes its part of the global batch.

    Args:
      composed: of the program.
      batch: the user's arrays.
      limits: for leaves that index a table, by position: what they may hold.

    Raises:
      ValueError: a batch of other leaves, shapes or dtypes than `parallelize` saw; an index outside its table.
    """
    check_tree(batch, composed.batch_shape)
    leaves, wanted = jax.tree.leaves(batch), jax.tree.leaves(composed.batch_shape)
    num_processes = jax.process_count()
    for i, (leaf, shape) in enumerate(zip(leaves, wanted, strict=True)):
        local = num_processes > 1 and not isinstance(leaf, jax.Array) and shape.shape
        rows = (shape.shape[0] // num_processes, *shape.shape[1:]) if local else shape.shape
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"batch {leaf_names(composed.batch_shape)[i]!r} is a shape without numbers; parallelize takes "
                "those, and what runs takes arrays: give an array of that shape"
            )
        # Not `np.asarray` of what has a dtype: that would fetch an array from its devices at each step.
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
        if np.shape(leaf) != tuple(rows) or dtype != jax.dtypes.canonicalize_dtype(shape.dtype):
            raise ValueError(
                f"{_named(leaf_names(composed.batch_shape)[i])} is {dtype}{list(np.shape(leaf))}; this program was "
                f"made for {shape.dtype}{list(rows)}. Give a batch of that shape and dtype, or call parallelize with "
                "one like this. (A last batch with fewer rows: drop it, or give it to evaluate, which takes any "
                "number.)"
            )
    check_indices(batch, limits)
    placed = join_processes(batch, composed.batch_shardings)
    check_on_devices(batch, placed, limits, composed.mesh)
    return placed


def check_tree(batch: PyTree, wanted: PyTree) -> None:
    """Raises ValueError, with the names of both, unless the two trees have one structure."""
    if isinstance(batch, Iterator):
        raise TypeError(f"`batch` is {kind_of(batch)}, which gives many. Give one of them: next(batches).")
    if isinstance(batch, State):
        raise TypeError("`batch` is a state: the state comes first, as in program.step(state, batch).")
    if jax.tree.structure(batch) == jax.tree.structure(wanted):
        for name, leaf in zip(leaf_names(batch), jax.tree.leaves(batch), strict=True):
            _refuse_foreign(name, leaf)
        return
    have, need = leaf_names(batch), leaf_names(wanted)
    if sorted(have) == sorted(need):
        given, seen = f"has the form {jax.tree.structure(batch)}", str(jax.tree.structure(wanted))
    else:
        is_named = any(have)  # as neither None is, nor a string
        given, seen = f"has the leaves {_few(have)}" if is_named else f"is {kind_of(batch)}", _few(need)
        if need == ("",):
            seen = "an array alone"
    lists = " (Lists of numbers are trees, too: make them arrays with np.asarray.)" if len(have) > len(need) else ""
    raise ValueError(
        f"this batch {given}; parallelize saw {seen}. Give the same tree, or call parallelize with this batch." + lists
    )


def _refuse_foreign(name: str, leaf: Any) -> None:
    """Raises TypeError for what looks like an array, and is none that a step can take."""
    if isinstance(leaf, core.Tracer):
        raise TypeError(
            f"{_named(name)} is traced: programs compile their calls themselves, so make them outside of jax.jit, "
            "grad, vmap and scan. (program.value_and_grad has gradients; jax.grad takes program.loss, in its `params`.)"
        )
    if hasattr(leaf, "detach") and hasattr(leaf, "numpy"):
        raise TypeError(f"{_named(name)} is {kind_of(leaf)} of torch: give {name.rpartition('/')[2] or 'it'}.numpy()")


def _named(name: str) -> str:
    return f"batch {name!r}" if name else "this batch"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "") or "of an empty tree"


def join_processes(batch: PyTree, shardings: PyTree) -> PyTree:
    """The batch as a compiled step takes it: arrays of JAX placed like its own; of NumPy arrays, each process's rows
    joined to the global batch."""
    is_alone = jax.process_count() == 1

    def joined(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf if leaf.sharding.is_equivalent_to(sharding, leaf.ndim) else jax.device_put(leaf, sharding)
        leaf = own_copy(leaf)
        return leaf if is_alone else _joined(np.asarray(leaf), sharding)

    return jax.tree.map(joined, batch, shardings)


def own_copy(leaf: Any) -> Any:
    """A copy of a NumPy array, in the dtype that JAX has it in: data loaders fill one buffer anew for each batch.

    On a CPU, JAX reads an aligned array where it lies, and a step runs on after it returned: it would see what the
    loader wrote meanwhile. And what JAX makes of int64 and float64 it keeps, by the array's identity, and hands out
    again: the step would see the batch before.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    return np.array(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


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
    return mover(sharding, mesh)(jax.make_array_from_process_local_data(by_process, rows, shape))


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
        raise TypeError(f"`batch` is {kind_of(batch)}, which gives many. {write}")
    leaves, treedef = jax.tree.flatten(batch)
    names = [name or "batch" for name in leaf_names(batch)]
    structs = []
    for name, leaf in zip(names, leaves, strict=True):
        try:
            shape = jax.eval_shape(lambda leaf: leaf, leaf)
        except TypeError as error:
            kind = f"an array of {leaf.dtype}" if hasattr(leaf, "dtype") else kind_of(leaf)
            raise TypeError(f"batch {name!r} is {kind}, not an array of numbers. {write}") from error
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"batch {name!r} is a random key, which is no data of examples. A loss gets one of its own "
                "in each step: def loss(model, batch, key)"
            )
        structs.append(jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    rows = {name: leaf.shape[0] for name, leaf in zip(names, structs, strict=True) if leaf.shape}
    if not rows or 0 in rows.values():
        why = ": all its leaves are single numbers" if structs and not rows else ""
        raise ValueError(f"this batch has no rows{why}. {write}")
    if (most := max(rows.values())) >= 2**31:
        raise ValueError(
            f"this batch has {most:,} rows; an array of JAX has at most {2**31 - 1:,} of them. Give the rows of one "
            "step; what an epoch has is the loader's to know."
        )
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ValueError(
            f"the first dim of every leaf of a batch counts its rows, and these differ: {counts}. Repeat what all "
            "rows share for each of them, or let the loss close over it; of graphs, fill each up to one number of "
            "nodes and edges, and give it a row."
        )
    return jax.tree.unflatten(treedef, structs)


def table_limits(trace: Trace) -> dict[int, tuple[Limits, ...]]:
    """For leaves of the batch that index a table, by position: what they may hold."""
    batch = trace.leaves_of("batch")
    integers = [i for i in batch if np.issubdtype(trace.leaves[i].dtype, np.integer)]
    return {i - batch[0]: limits for i, limits in index_limits(trace.closed, integers).items()}


def check_indices(batch: PyTree, limits: dict[int, tuple[Limits, ...]]) -> None:
    """Raises ValueError for an index outside its table, in what the host holds; `check_on_devices` has the rest."""
    leaves = jax.tree.leaves(batch) if limits else []
    for i, allowed in ((i, one) for i, every in limits.items() for one in every):
        if isinstance(leaves[i], jax.Array):
            continue
        whole = np.asarray(leaves[i])
        leaf = whole if allowed.part is None else whole[allowed.part.slices]
        if not leaf.size or (leaf.min() >= allowed.least and leaf.max() < allowed.size):
            continue
        outside = ((leaf < allowed.least) | (leaf >= allowed.size)) & ~np.isin(leaf, list(allowed.others))
        if outside.any():
            places = np.arange(whole.size).reshape(whole.shape)
            place = (places if allowed.part is None else places[allowed.part.slices])[outside][0]
            where = tuple(int(n) for n in np.unravel_index(place, whole.shape))
            raise _outside(leaf_names(batch)[i], int(whole[where]), where, allowed)


def check_on_devices(batch: PyTree, placed: PyTree, limits: dict[int, tuple[Limits, ...]], mesh: Mesh) -> None:
    """Raises ValueError for an index outside its table, in arrays that live on devices already.

    They are looked at where they are, and two numbers of each come to the host. An array that was found to be good is
    not looked at again.

    Args:
      batch: the user's.
      placed: the same, on the mesh.
      limits: for leaves that index a table, by position: what they may hold.
      mesh: of the program.
    """
    leaves, there = (jax.tree.leaves(batch), jax.tree.leaves(placed)) if limits else ([], [])
    arrays = {i: leaves[i] for i in limits if isinstance(leaves[i], jax.Array) and leaves[i].size}
    new = [i for i, leaf in arrays.items() if not isinstance(leaf, core.Tracer) and not _is_good(leaf, limits[i])]
    if not new:
        return
    pairs = [(i, allowed) for i in new for allowed in limits[i]]
    looked = _looker(tuple(allowed for _, allowed in pairs), mesh)([there[i] for i, _ in pairs])
    for (i, allowed), (place, bad) in zip(pairs, jax.device_get(looked), strict=True):
        if place < leaves[i].size:
            where = tuple(int(n) for n in np.unravel_index(place, leaves[i].shape))
            raise _outside(leaf_names(batch)[i], int(bad), where, allowed)
    for i in new:
        _good[id(leaves[i]), limits[i]] = weakref.ref(leaves[i])


# By identity: arrays never change. References are weak, so that nothing is kept for having been looked at.
_good: dict[tuple[int, tuple[Limits, ...]], weakref.ref[jax.Array]] = {}


def _is_good(leaf: jax.Array, limits: tuple[Limits, ...]) -> bool:
    if len(_good) > 1024:
        for key in [key for key, known in _good.items() if known() is None]:
            del _good[key]
    known = _good.get((id(leaf), limits))
    return known is not None and known() is leaf


@functools.lru_cache(maxsize=64)
def _looker(limits: tuple[Limits, ...], mesh: Mesh) -> Any:
    """Of arrays, the place of the first index that is outside of each one's limits, counted through all of its rows,
    and the index; without one the place is behind the end. Plain reductions, since rows are on many devices."""

    def look(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        found = []
        for array, allowed in zip(arrays, limits, strict=True):
            held = jnp.iinfo(array.dtype)
            outside = jnp.zeros(array.shape, bool)
            if allowed.least > held.min:
                outside |= array < allowed.least
            if allowed.size <= held.max:
                outside |= array >= allowed.size
            for other in allowed.others:
                if held.min <= other <= held.max:
                    outside &= array != other
            for dim, part in enumerate(allowed.part.slices if allowed.part is not None else ()):
                index = lax.broadcasted_iota(jnp.int32, array.shape, dim)
                if part != SAME:
                    outside &= (index >= part.start) & (index < part.stop) & ((index - part.start) % part.step == 0)
            places = jnp.arange(array.size).reshape(array.shape)
            place = jnp.where(outside, places, array.size).min()
            found.append((place, jnp.where(places == place, array, held.min).max()))
        return found

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(look, out_shardings=whole, compiler_options=compiler_options(mesh))


def _outside(name: str, bad: int, where: tuple[int, ...], allowed: Limits) -> ValueError:
    size, others = allowed.size, sorted(n for n in allowed.others if not 0 <= n < allowed.size)
    also = "".join(f", and {n}" for n in others)
    if bad >= 0:
        advice = f"Check the tokenizer or the labels, or make the model with room for {bad + 1}."
    else:
        advice = (
            "Check the tokenizer or the labels. A negative number would count from the table's end"
            + (f", where there is no room for {-bad}" if -bad > size else "")
            + "; where a mask hides it, write 0 there, or replace it in the loss: jnp.where(labels < 0, 0, labels)."
        )
    return ValueError(
        f"batch {name!r} holds {bad} at {list(where)}, outside a table of {size} rows (a vocabulary, or classes?), "
        f"which are 0 to {size - 1}{also}. {advice}"
    )
