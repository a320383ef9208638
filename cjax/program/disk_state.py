"""What of a state is in a folder: the arrays of what belongs to no layer, and whose rows the files hold."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.checkpoint.rows import key_impl
from cjax.program.composed import Composed
from cjax.program.walked import ROWS
from cjax.tree import leaf_names
from cjax.walk.files import Folder
from cjax.walk.walk import Held

TREES = (*ROWS, "model_state")

_logger = logging.getLogger("cjax")


class HeldState:
    """The state whose rows are in a folder: its `holder`. It keeps none of them alive: who drops a state has its memory
    back at once, though rows know their folder, and that knows whose they are."""

    def __init__(self, held: Held) -> None:
        self._rows = [weakref.ref(rows) for rows in held.every]
        self._step: weakref.ref[jax.Array] | None = None  # the state is not whole yet

    def note(self, step: jax.Array) -> None:
        self._step = weakref.ref(step)

    def give_up(self) -> None:
        """It can't be used from here on, if it is there still."""
        step = self._step and self._step()
        if step is not None and not step.is_deleted():
            step.delete()
        for there in self._rows:
            rows = there()
            if rows is None:  # and no thread is at them
                continue
            try:
                rows.close()
            except Exception as error:
                _logger.warning("cjax: of a state that is given up, rows could not be moved: %s", error)


# Folders that this process has open, for as long as somebody has their program or their rows.
OPEN: weakref.WeakValueDictionary[Path, Folder] = weakref.WeakValueDictionary()


def let_go(folder: Folder) -> None:
    """Gives up the state that is in a folder, and the folder."""
    if isinstance(folder.holder, HeldState):
        folder.holder.give_up()
    folder.holder = None
    folder.close()


def identity_of(composed: Composed) -> dict[str, Any]:
    """What tells a program's rows from others': the plan, and of each tree the leaves."""
    shapes = {}
    for name, shelf in zip(TREES, composed.shelves, strict=True):
        leaves = shelf.leaf_shapes()
        named = zip(leaf_names(leaves), jax.tree.leaves(leaves), strict=True)
        shapes[name] = [f"{leaf} {x.dtype}{list(x.shape)}" for leaf, x in named]
    return {"plan": str(composed.plan), "devices": composed.mesh.size, **shapes}


def note_step(held: Held, step: jax.Array) -> None:
    """The step of the state whose rows these are."""
    held.whose[:] = [step]
    if held.folder is not None:
        assert isinstance(held.folder.holder, HeldState), "rows on disk are somebody's"
        held.folder.holder.note(step)


def check_same_update(folder: Folder, began: bytes, own: bytes) -> None:
    """An update that is due is made by the optimizer that the step had.

    Args:
      folder: which holds the step.
      began: what tells that optimizer from others.
      own: the same of the one that is to go on.

    Raises:
      ValueError: they are two.
    """
    if began == own:
        return
    finish = (
        "Finish it with that one and go on with this: before = cjax.parallelize(..., that optimizer, ...); "
        "state = program.restore(before.resume())."
    )
    if (how := folder.note.get("how")) is not None:
        finish = (
            f"Finish it with all options as they were, {how}, and interrupt that after a step (Ctrl-C), which saves a "
            "checkpoint; from that, the same with other options goes on."
        )
    raise ValueError(
        f"{folder.path} holds this run after step {folder.step}, whose update is made when layers are fetched next, "
        "and it began with another optimizer than this one (another learning rate is another optimizer, and so is a "
        "schedule over another number of steps; another version of JAX or optax may write it otherwise). "
        f"{finish} Or go on from a checkpoint, with another folder."
    )


def written(arrays: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """What can be written of arrays, by number: of keys their numbers. Of an array of several processes its own parts,
    each once."""
    found: dict[str, np.ndarray] = {}
    for i, x in enumerate(arrays):
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        if data.is_fully_addressable:
            found[f"{i}"] = np.asarray(data)
        else:
            found |= {
                f"{i} {_place(part.index, data.shape)}": np.asarray(part.data) for part in data.addressable_shards
            }
    return found


def placed(found: Mapping[str, np.ndarray], i: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """What was written, as it was."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    data = jax.eval_shape(jax.random.key_data, like) if is_key else like

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        whole = found.get(f"{i}")
        return found[f"{i} {_place(index, data.shape)}"] if whole is None else whole[index]

    array = jax.make_array_from_callback(data.shape, like.sharding, part, dtype=data.dtype)
    # A CPU device takes NumPy's memory for its own, which a step would then give away.
    array = _copy(array)
    return jax.random.wrap_key_data(array, impl=key_impl(like)) if is_key else array


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Where a part begins in each dim; all parts of an array are alike."""
    return ",".join(str(each.indices(size)[0]) for each, size in zip(index, shape, strict=True))


@jax.jit
def _copy(array: jax.Array) -> jax.Array:
    return jnp.copy(array)
