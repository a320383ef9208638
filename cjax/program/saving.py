"""A state as logical arrays in the user's own trees, and back."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cjax.mesh import compiler_options
from cjax.program.composed import Composed
from cjax.program.keep import check_fits, load_slot, members, store_leaves
from cjax.program.state import Shelves, State, check_alive
from cjax.program.walked import WalkedState, walked_trees
from cjax.program.walking import walking_of
from cjax.tree import PyTree

TREES = ("params", "frozen", "opt_state", "carried")
MODEL = ("params", "frozen", "carried")


def arrays_of(state: State) -> dict[str, PyTree]:
    """The logical arrays of a state, whatever plan it belongs to: fresh ones, which outlive it."""
    small = {"step": state.step, "key": state._key, "loss_scale": state._scaling, "noise_scale": state._noise}
    return trees_of(state, *TREES) | jax.tree.map(_copy, small)


def trees_of(state: State, *names: str) -> dict[str, PyTree]:
    """Some of the trees of a state: "params", "frozen", "opt_state", "carried". The others are not copied."""
    check_alive(state)
    if isinstance(state, WalkedState):
        return _walked_trees(state, names)
    every = (state._params, state._frozen, state._opt, state._model_state)
    stored: dict[str, Any] = dict(zip(TREES, every, strict=True))
    trees = _loader(state._shelves, names)([stored[name] for name in names])
    return dict(zip(names, trees, strict=True))


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


def shapes_of(composed: Composed) -> dict[str, PyTree]:
    """The logical arrays of a state of this program, as placed ShapeDtypeStructs."""

    def placed(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    trees = [
        jax.tree.map(placed, shelf.leaf_shapes(), shelf.leaf_shardings(composed.mesh)) for shelf in composed.shelves
    ]
    named = dict(zip(TREES, trees, strict=True))
    shape = composed.state_shape
    return named | {"step": shape.step, "key": shape._key, "loss_scale": shape._scaling, "noise_scale": shape._noise}


def state_from(composed: Composed, arrays: dict[str, PyTree]) -> State:
    """A state of this program from logical arrays.

    Raises:
      ValueError: arrays of another model.
    """
    needed = ("params", "frozen", "opt_state", "carried", "step", "key", "loss_scale", "noise_scale")
    if not isinstance(arrays, Mapping) or not all(name in arrays for name in needed):
        kind = f"a {type(arrays).__name__}"
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
    params, frozen, opt, model_state = (
        store_leaves(shelf, trees[name], composed.mesh) for name, shelf in zip(TREES, composed.shelves, strict=True)
    )
    return State(step, params, frozen, opt, model_state, key, scaling, noise, composed.shelves)
