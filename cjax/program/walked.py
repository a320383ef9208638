"""States of programs that walk over layers: what belongs to layers is in rows, each at its home."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.mesh import compiler_options, own_context
from cjax.planner.homes import Kind
from cjax.program.keep import load_slot, members, store_slot
from cjax.program.state import Arrays, State, check_alive
from cjax.sharding.storage.storage import Slot, Storage
from cjax.tree import PyTree
from cjax.walk.layer_slots import layer_slot
from cjax.walk.stores import HOST, moved
from cjax.walk.walk import Held, in_turn
from cjax.walk.walker import OutsideState, Walker

ROWS: tuple[Kind, ...] = ("params", "frozen", "opt")
Value = Callable[[int, NamedSharding], Any]  # a leaf's number and placement -> its value


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "_params", "_frozen", "_opt", "_model_state", "_key", "_scaling", "_noise"],
    meta_fields=["_shelves", "_walker", "_held"],
)
@dataclass(frozen=True)
class WalkedState(State):
    """A state whose arrays are those that belong to no layer; layers have rows."""

    _walker: Walker
    _held: Held

    @property
    def outside(self) -> OutsideState:
        return OutsideState(self._params, self._frozen, self._opt, self._model_state)

    @own_context
    def find_opt_states(self, kind: type) -> list[Any]:
        """As of `State`: what layers have of them is in arrays of its own, in host memory where they have it there."""
        check_alive(self)
        if not isinstance(kind, type):
            raise TypeError(f"find_opt_states takes a class, such as optax.ScaleByAdamState, not {kind!r}")
        (tree,) = walked_trees(self, "opt")
        return [node for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(node, kind)]

    def __repr__(self) -> str:
        if self.step.is_deleted():
            return "State(given up to a step)"
        return f"State(step={self.step}, layers on {', '.join(sorted(self._held.homes.used))})"


def walked_trees(state: WalkedState, *kinds: Kind) -> list[PyTree]:
    """Trees of a state in the user's own structure: see `tree_of`."""
    outside = {"params": state._params, "frozen": state._frozen, "opt": state._opt}
    mesh = state._shelves.mesh
    return [
        tree_of(state._walker, state._held, kind, getattr(state._shelves, kind), outside[kind], mesh) for kind in kinds
    ]


def tree_of(walker: Walker, held: Held, kind: Kind, shelf: Storage, outside: Arrays, mesh: Mesh) -> PyTree:
    """A stored tree as the user's own, in arrays of their own: in host memory what layers do not have on devices.

    Args:
      walker: tells what is whose.
      held: the rows.
      kind: what they are; gradients lie as parameters do.
      shelf: how the tree is kept.
      outside: the stored arrays of what belongs to no layer.
      mesh: the mesh.
    """
    own: Kind = "params" if kind == "grads" else kind
    placed, homes = members(shelf, shelf.leaf_shardings(mesh)), held.homes
    leaves: list[Any] = [None] * sum(len(slot.leaves) for slot in shelf.slots)
    for index, array in zip(walker.outside(own), outside, strict=True):
        slot = shelf.slots[index]
        for leaf, value in zip(slot.leaves, load_slot(slot, array, placed[index], mesh), strict=True):
            leaves[leaf] = _copy(value)
    for k, length in enumerate(walker.lengths):
        slots = walker.slots(own, k)
        apart: dict[int, list[Any]] = {index: [] for index in slots if not shelf.slots[index].is_stack}
        for at, (row,) in in_turn([getattr(held, kind)[k]], range(length) if slots else ()):
            for index, array in zip(slots, row, strict=True):
                slot = shelf.slots[index]
                value = load_slot(layer_slot(slot), array, [_of_layer(slot, placed[index][0])], mesh)[0]
                value = _copy(value) if homes.of[kind][k][at] == "device" else _to_host(value)
                if slot.is_stack:
                    leaves[slot.layer_leaves[at]] = value
                else:
                    apart[index].append(value)
        for index, parts in apart.items():
            leaves[shelf.slots[index].leaves[0]] = _joined(parts, placed[index][0])
    return jax.tree.unflatten(shelf.treedef, leaves)


def _to_host(array: jax.Array) -> jax.Array:
    return moved(array, array.sharding.with_memory_kind(HOST))


def _of_layer(slot: Slot, placed: NamedSharding) -> NamedSharding:
    """The placement of one layer of a slot, in the user's shape."""
    return placed if slot.is_stack else NamedSharding(placed.mesh, PartitionSpec(*placed.spec[1:]))


@jax.jit
def _copy(array: jax.Array) -> jax.Array:
    # A program that changes nothing hands out what it was given, which a step would take.
    return jnp.copy(array)


def _joined(parts: list[jax.Array], placed: NamedSharding) -> jax.Array:
    """One leaf of all layers: on the devices if all of them are."""
    if all(x.sharding.memory_kind != HOST for x in parts):
        assert isinstance(placed.mesh, Mesh)
        options = compiler_options(placed.mesh)
        return jax.jit(lambda xs: jnp.stack(xs), out_shardings=placed, compiler_options=options)(parts)
    return jax.device_put(np.stack([np.asarray(x) for x in parts]), placed.with_memory_kind(HOST))


def fill(walker: Walker, held: Held, kind: Kind, shelf: Storage, mesh: Mesh, value: Value) -> Arrays:
    """Puts rows of one kind, of values by leaf, and returns the stored arrays of what is outside."""
    placed = members(shelf, shelf.leaf_shardings(mesh))
    own: Kind = "params" if kind == "grads" else kind
    for k, length in enumerate(walker.lengths):
        slots, structs = walker.slots(own, k), walker.structs(kind, k)
        whole = {index: value(shelf.slots[index].leaves[0], placed[index][0]) for index in slots
                 if not shelf.slots[index].is_stack}  # fmt: skip
        for at in range(length):
            row = []
            for index, struct in zip(slots, structs, strict=True):
                slot, where = shelf.slots[index], _of_layer(shelf.slots[index], placed[index][0])
                leaf = _part(whole[index], at) if index in whole else value(slot.layer_leaves[at], where)
                row.append(jax.device_put(store_slot(layer_slot(slot), [leaf], [where], mesh), struct.sharding))
            getattr(held, kind)[k].put(at, tuple(row))
    outside = []
    for index in walker.outside(own):
        slot = shelf.slots[index]
        leaves = [value(leaf, where) for leaf, where in zip(slot.leaves, placed[index], strict=True)]
        outside.append(store_slot(slot, leaves, placed[index], mesh))
    return tuple(outside)


@dataclass(frozen=True)
class Replaced:
    """Stored arrays of one tree, with given values in the place of those they name.

    Args:
      shelf: how the tree is kept.
      mesh: the mesh.
      given: a leaf's number -> its value, or None.
      problems: what is wrong with values.
    """

    shelf: Storage
    mesh: Mesh
    given: Callable[[int], Any]
    problems: list[str]

    @functools.cached_property
    def _placed(self) -> Sequence[list[Any]]:
        return members(self.shelf, self.shelf.leaf_shardings(self.mesh))

    def row(self, slots: Sequence[int], at: int, row: Arrays) -> Arrays:
        """A layer's arrays."""
        found = list(row)
        for place, index in enumerate(slots):
            slot = self.shelf.slots[index]
            value = self.given(slot.layer_leaves[at] if slot.is_stack else slot.leaves[0])
            if value is None:
                continue
            # Of a leaf that holds all layers, each reads the whole: a file has no other parts by name.
            whole = value.placed(self._placed[index][0], self.problems)
            if whole is not None:
                where = _of_layer(slot, self._placed[index][0])
                leaf = whole if slot.is_stack else _part(whole, at)
                found[place] = store_slot(layer_slot(slot), [leaf], [where], self.mesh)
        return tuple(found)

    def outside(self, slots: Sequence[int], arrays: Arrays) -> Arrays:
        """The arrays of what belongs to no layer."""
        found = list(arrays)
        for place, index in enumerate(slots):
            slot, placed = self.shelf.slots[index], self._placed[index]
            values = [self.given(leaf) for leaf in slot.leaves]
            if not any(value is not None for value in values):
                continue
            own = load_slot(slot, arrays[place], placed, self.mesh)
            leaves = [
                x if value is None else value.placed(where, self.problems)
                for x, value, where in zip(own, values, placed, strict=True)
            ]
            if all(leaf is not None for leaf in leaves):
                found[place] = store_slot(slot, leaves, placed, self.mesh)
        return tuple(found)


def _part(leaf: Any, at: int) -> Any:
    """A layer of a leaf that holds all of them; host memory is read by the host."""
    in_host = not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind == HOST
    return np.asarray(leaf)[at] if in_host else leaf[at]


def values_of(shelf: Storage, tree: PyTree) -> Value:
    """The leaves of a tree of the user's."""
    leaves = shelf.treedef.flatten_up_to(tree)
    return lambda leaf, placed: leaves[leaf]


def each_row(walker: Walker) -> Iterator[tuple[int, int]]:
    """Stack and layer of all rows."""
    for k, length in enumerate(walker.lengths):
        for at in range(length):
            yield k, at


def empty_rows(walker: Walker, held: Held) -> None:
    """Rows of kinds of which layers have no arrays."""
    for kind in ROWS:
        for k, length in enumerate(walker.lengths):
            for at in range(length) if not walker.slots(kind, k) else ():
                getattr(held, kind)[k].put(at, ())
