"""A state as logical arrays in the user's own trees, and back."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cjax import checkpoint
from cjax.checkpoint import Rows
from cjax.mesh import compiler_options
from cjax.planner.homes import Kind
from cjax.program.composed import Composed
from cjax.program.hyperparams import warn_of_others
from cjax.program.keep import check_fits, load_slot, members, put, store_leaves, store_members
from cjax.program.leaves import NAMES, awaited_trees, pending_trees, pieces_of, spread_trees
from cjax.program.state import Shelves, State, check_alive
from cjax.program.walked import ROWS, WalkedState, walked_trees
from cjax.program.walking import walking_of
from cjax.sharding.storage.storage import Storage
from cjax.tree import PyTree, kind_of
from cjax.walk.stores import HOST

TREES = ("params", "frozen", "opt_state", "carried")
MODEL = ("params", "frozen", "carried")


def arrays_of(state: State) -> dict[str, PyTree]:
    """The logical arrays of a state, whatever plan it belongs to: fresh ones, which outlive it."""
    return trees_of(state, *TREES) | _small(state)


def to_save(state: State) -> tuple[dict[str, PyTree], Rows | None]:
    """What `cjax.checkpoint.save` takes as `tree` and `rows`: of a state that walks, layers come one by one."""
    check_alive(state)
    if not isinstance(state, WalkedState):
        return arrays_of(state), None
    return awaited_trees(state) | trees_of(state, "carried") | _small(state), pieces_of(state)


def _small(state: State) -> dict[str, PyTree]:
    small = {"step": state.step, "key": state._key, "loss_scale": state._scaling, "noise_scale": state._noise}
    return jax.tree.map(_copy, small)


def of_model(composed: Composed, state: State) -> State:
    """A state of any program of this model, under any plan.

    Raises:
      ValueError: one of another model, with what differs.
    """
    check_alive(state)
    if state._shelves is not composed.shelves:
        check_fits(composed.shelves.params, state._shelves.params.leaf_shapes(), "this state's parameters are")
    return state


def trees_of(state: State, *names: str) -> dict[str, PyTree]:
    """Some of the trees of a state: "params", "frozen", "opt_state", "carried". The others are not copied."""
    check_alive(state)
    if isinstance(state, WalkedState):
        return _walked_trees(state, names)
    every = (state._params, state._frozen, state._opt, state._model_state)
    stored: dict[str, Any] = dict(zip(TREES, every, strict=True))
    trees = _loader(state._shelves, names)([stored[name] for name in names])
    return dict(zip(names, trees, strict=True))


def ready_model(composed: Composed, state: State) -> Any:
    """The user's own model, its parameters placed as a pass over a batch is given them: who reads all of them for each
    token would else gather them for each token."""
    trees = trees_of(state, "params", "frozen", "carried")
    storage = composed.storage
    if storage.given is not storage.params:
        trees["params"] = jax.tree.map(put, trees["params"], storage.whole.leaf_shardings(composed.mesh))
    return composed.capture.rebuild(*trees.values())


def _walked_trees(state: WalkedState, names: Sequence[str]) -> dict[str, PyTree]:
    shelves = state._shelves
    found: dict[str, PyTree] = {}
    for name in names:
        if name == "carried":
            placed = members(shelves.model_state, shelves.model_state.leaf_shardings(shelves.mesh))
            leaves: dict[int, Any] = {}
            for slot, array, where in zip(shelves.model_state.slots, state._model_state, placed, strict=True):
                leaves.update(zip(slot.leaves, map(_copy, load_slot(slot, array, where, shelves.mesh)), strict=True))
            found[name] = jax.tree.unflatten(shelves.model_state.treedef, [leaves[i] for i in range(len(leaves))])
        else:
            kind: Any = {"params": "params", "frozen": "frozen", "opt_state": "opt"}[name]
            (found[name],) = walked_trees(state, kind)
    return found


@jax.jit
def _copy(array: jax.Array) -> jax.Array:
    # A step takes the arrays of its state, and what two states share would go with the first.
    return jnp.copy(array)


@functools.lru_cache(maxsize=64)
def _loader(shelves: Shelves, names: tuple[str, ...]) -> Any:
    by_name: dict[str, Any] = dict(zip(TREES, shelves, strict=True))
    chosen = [by_name[name] for name in names]

    def load(stored: Any) -> list[PyTree]:
        return [shelf.load(arrays) for shelf, arrays in zip(chosen, stored, strict=True)]

    placed = [shelf.leaf_shardings(shelves.mesh) for shelf in chosen]
    return jax.jit(load, out_shardings=placed, compiler_options=compiler_options(shelves.mesh))


def restored(composed: Composed, source: State | str | Path) -> State:
    """A state of this program from a checkpoint, or from a live state of any plan. Where layers have homes, no more
    than a few rows are anywhere else at once.

    Raises:
      ValueError: another model's.
    """
    # Evaluation takes what was trained: without an optimizer here, its state is left where it is.
    unread = () if composed.optimizer else ("opt_state",)
    walks = composed.walker is not None
    if not isinstance(source, State):
        later = tuple(NAMES.values()) if walks else ()
        arrays, _ = checkpoint.restore(source, shapes_of(composed), unread, later)
        if composed.given.optimizer:
            warn_of_others(composed.given.optimizer, composed.source.capture.params_shape, arrays["opt_state"])
        return state_from(composed, arrays, gives_up=True)
    check_alive(source)
    if walks and not walking_of(composed).has_place_of(source):
        arrays = pending_trees(source) | trees_of(source, "carried") | _small(source)
    elif isinstance(source, WalkedState) and not walks:
        kinds: dict[Kind, Storage] = {
            kind: getattr(composed.shelves, kind) for kind in ROWS if NAMES[kind] not in unread
        }
        for kind, shelf in kinds.items():
            own = getattr(source._shelves, kind)
            check_fits(shelf, own.leaf_shapes(), f"this state's {NAMES[kind]} are")
        arrays = spread_trees(source, kinds, composed.mesh) | trees_of(source, "carried") | _small(source)
    else:
        arrays = arrays_of(source)
    return state_from(composed, arrays | dict.fromkeys(unread, ()), gives_up=True)


def shapes_of(composed: Composed) -> dict[str, PyTree]:
    """The logical arrays of a state of this program, as placed ShapeDtypeStructs."""

    trees = [
        jax.tree.unflatten(shelf.treedef, _placed_shapes(composed, kind, shelf))
        for kind, shelf in zip(("params", "frozen", "opt", None), composed.shelves, strict=True)
    ]
    named = dict(zip(TREES, trees, strict=True))
    shape = composed.state_shape
    return named | {"step": shape.step, "key": shape._key, "loss_scale": shape._scaling, "noise_scale": shape._noise}


def _placed_shapes(composed: Composed, kind: Kind | None, shelf: Storage) -> list[jax.ShapeDtypeStruct]:
    """The leaves of a tree. What belongs to layers of a walk is no device's: it comes as NumPy arrays, or where a
    process has a part alone, in memory of the host that belongs to the devices."""
    walker, away = composed.walker, set[int]()
    if walker is not None and kind is not None:
        of_layers = [index for k in range(len(walker.lengths)) for index in walker.slots(kind, k)]
        away = {leaf for index in of_layers for leaf in shelf.slots[index].leaves}
    found = []
    leaves = zip(
        jax.tree.leaves(shelf.leaf_shapes()), jax.tree.leaves(shelf.leaf_shardings(composed.mesh)), strict=True
    )
    for number, (shape, sharding) in enumerate(leaves):
        if number in away and not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            sharding = None if jax.process_count() == 1 else sharding.with_memory_kind(HOST)
        found.append(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding))
    return found


def state_from(composed: Composed, arrays: dict[str, PyTree], gives_up: bool = False) -> State:
    """A state of this program from logical arrays.

    Args:
      composed: the program.
      arrays: its trees; leaves of what belongs to layers may be `Unread` where the program walks.
      gives_up: whether `arrays` is emptied, so that nothing of it exists beside the whole state.

    Raises:
      ValueError: arrays of another model.
    """
    needed = ("params", "frozen", "opt_state", "carried", "step", "key", "loss_scale", "noise_scale")
    if not isinstance(arrays, Mapping) or not all(name in arrays for name in needed):
        kind = kind_of(arrays)
        given = f"{kind} of {', '.join(map(str, arrays)) or 'nothing'}" if isinstance(arrays, Mapping) else kind
        raise ValueError(
            f"a state is made of {', '.join(needed)}, and this is {given}: give what program.to_arrays(state) gave, or "
            "cjax.checkpoint.restore(path, program.abstract_state())[0]"
        )
    trees = {
        name: check_fits(shelf, arrays[name], f"this state's {name} are")
        for name, shelf in zip(TREES, composed.shelves, strict=True)
    }
    small = [arrays[name] for name in ("step", "key", "loss_scale", "noise_scale")]
    step, key, scaling, noise = jax.tree.map(lambda x: _copy(jax.device_put(x, composed.whole)), small)
    if composed.walker is not None:
        model_state = store_leaves(composed.shelves.model_state, trees["carried"], composed.mesh)
        kinds = {"params": trees["params"], "frozen": trees["frozen"], "opt": trees["opt_state"]}
        return walking_of(composed).restored(kinds, model_state, (step, key, scaling, noise))
    leaves = [members(shelf, trees[name]) for name, shelf in zip(TREES, composed.shelves, strict=True)]
    trees.clear()
    if gives_up:
        arrays.clear()
    params, frozen, opt, model_state = (
        store_members(shelf, own, composed.mesh) for shelf, own in zip(composed.shelves, leaves, strict=True)
    )
    return State(step, params, frozen, opt, model_state, key, scaling, noise, composed.shelves)
