"""States of programs that walk over layers: what belongs to layers is in rows, each at its home."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.checkpoint import Unread
from cjax.mesh import compiler_options, own_context
from cjax.planner.homes import Kind
from cjax.program.keep import load_slot, members, put, store_slot
from cjax.program.state import Arrays, State, check_alive
from cjax.sharding.storage.storage import Slot, Storage
from cjax.tree import PyTree
from cjax.walk.layer_slots import layer_slot
from cjax.walk.stores import HOST, moved
from cjax.walk.walk import Held, in_turn
from cjax.walk.walker import OutsideState, Walker

ROWS: tuple[Kind, ...] = ("params", "frozen", "opt")
# A leaf's number and placement -> its value; with the number of a layer, that layer's of a leaf that holds all of them.
Value = Callable[[int, NamedSharding, int | None], Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "_params", "_frozen", "_opt", "_model_state", "_key", "_scaling", "_noise"],
    meta_fields=["_shelves", "_walker", "_rows"],
)
@dataclass(frozen=True)
class WalkedState(State):
    """A state whose arrays are those that belong to no layer. Layers have rows, of which some may be as they were
    before the last step (`Held.due`): the next step goes on from them, and to all others they are shown updated."""

    _walker: Walker
    _rows: Held

    @property
    @own_context
    def _held(self) -> Held:
        """The rows, updated: what is due is made now."""
        self._walker.catch_up(self._rows, self.step.delete)
        return self._rows

    @property
    def outside(self) -> OutsideState:
        return OutsideState(self._params, self._frozen, self._opt, self._model_state)

    def _check_whole(self) -> None:
        """Of a copy, which any function of trees makes, the rows are another state's, and that one's steps change them:
        its numbers would be of two steps at once."""
        if not any(self.step is step for step in self._rows.whose):
            raise ValueError(
                "this is a copy of a state, as jax.tree.map and jax.jit make them, without its layers: where a plan "
                "walks over layers, they are in memory of their own, which only that state has. To keep a state beside "
                "the steps that follow: kept = program.to_arrays(state), later state = program.from_arrays(kept); or "
                "program.save(path, state)."
            )

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
        return f"State(step={self.step}, layers on {', '.join(sorted(self._rows.homes.used))})"


def walked_trees(state: WalkedState, *kinds: Kind) -> list[PyTree]:
    """Trees of a state in the user's own structure: see `tree_of`."""
    outside = {"params": state._params, "frozen": state._frozen, "opt": state._opt}
    mesh = state._shelves.mesh
    return [
        tree_of(state._walker, state._held, kind, getattr(state._shelves, kind), outside[kind], mesh) for kind in kinds
    ]


def tree_of(walker: Walker, held: Held, kind: Kind, shelf: Storage, outside: Arrays, mesh: Mesh) -> PyTree:
    """A stored tree as the user's own, in arrays of their own: NumPy's for what layers do not have on the devices.

    Args:
      walker: tells what is whose.
      held: the rows.
      kind: what they are; gradients lie as parameters do.
      shelf: how the tree is kept.
      outside: the stored arrays of what belongs to no layer.
      mesh: the mesh.
    """
    own: Kind = "params" if kind == "grads" else kind
    placed, homes = jax.tree.leaves(shelf.leaf_shardings(mesh)), held.homes
    leaves: list[Any] = [None] * shelf.treedef.num_leaves
    for leaf, value in outside_leaves(walker, own, shelf, outside, mesh):
        leaves[leaf] = _copy(value)
    apart: dict[int, list[Any]] = {}
    for k, at, parts in row_leaves(walker, held, kind, shelf, mesh):
        for leaf, layer, value in parts:
            value = _copy(value) if homes.of[kind][k][at] == "device" else _to_host(value)
            if layer is None:
                leaves[leaf] = value
            else:
                apart.setdefault(leaf, []).append(value)
    for leaf, values in apart.items():
        leaves[leaf] = joined(values, placed[leaf])
    return jax.tree.unflatten(shelf.treedef, leaves)


def outside_leaves(
    walker: Walker, kind: Kind, shelf: Storage, outside: Arrays, mesh: Mesh
) -> Iterator[tuple[int, jax.Array]]:
    """The leaves of what belongs to no layer, in the user's shapes."""
    placed = members(shelf, shelf.leaf_shardings(mesh))
    for index, array in zip(walker.outside(kind), outside, strict=True):
        slot = shelf.slots[index]
        yield from zip(slot.leaves, load_slot(slot, array, placed[index], mesh), strict=True)


def row_leaves(
    walker: Walker, held: Held, kind: Kind, shelf: Storage, mesh: Mesh
) -> Iterator[tuple[int, int, list[tuple[int, int | None, jax.Array]]]]:
    """Rows in turn as leaves in the user's shapes: stack, layer, and of each leaf its number, its layer where it holds
    all of them, and the value. They may be the row itself: who keeps one copies it. The list is emptied behind whoever
    had it, so that one row is on the devices, and the next on its way."""
    own: Kind = "params" if kind == "grads" else kind
    for k, length in enumerate(walker.lengths):
        slots = walker.slots(own, k)
        for at, rows in in_turn([getattr(held, kind)[k]], range(length) if slots else ()):
            found = leaves_of_row(shelf, slots, at, rows.pop(), mesh)
            yield k, at, found
            found.clear()


def leaves_of_row(
    shelf: Storage, slots: Sequence[int], at: int, row: Arrays, mesh: Mesh
) -> list[tuple[int, int | None, jax.Array]]:
    """A row as leaves: see `row_leaves`."""
    placed = members(shelf, shelf.leaf_shardings(mesh))
    found: list[tuple[int, int | None, jax.Array]] = []
    for index, array in zip(slots, row, strict=True):
        slot = shelf.slots[index]
        (value,) = load_slot(layer_slot(slot), array, [_of_layer(slot, placed[index][0])], mesh)
        found.append((slot.layer_leaves[at], None, value) if slot.is_stack else (slot.leaves[0], at, value))
    return found


def _to_host(array: jax.Array) -> Any:
    """A copy for the host: NumPy's, which anything can be done with. Where a process has a part alone, that part, in
    memory of the host that belongs to the devices."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _copy(array)
    if array.is_fully_addressable:
        return np.array(array)
    return moved((array,), [array.sharding.with_memory_kind(HOST)])[0]


def _of_layer(slot: Slot, placed: NamedSharding) -> NamedSharding:
    """The placement of one layer of a slot, in the user's shape."""
    return placed if slot.is_stack else NamedSharding(placed.mesh, PartitionSpec(*placed.spec[1:]))


@jax.jit
def _copy(array: jax.Array) -> jax.Array:
    # A program that changes nothing hands out what it was given, which a step would take.
    return jnp.copy(array)


def joined(parts: Sequence[Any], placed: NamedSharding) -> Any:
    """One leaf of all layers: on the devices if all of them are, and in host memory if any is there."""
    arrays = [x for x in parts if isinstance(x, jax.Array)]
    if len(arrays) < len(parts):
        return np.stack([np.asarray(x) for x in parts])
    assert isinstance(placed.mesh, Mesh)
    if any(x.sharding.memory_kind == HOST for x in arrays):
        # Of several processes: each has parts of all layers.
        shards = zip(*([shard.data for shard in x.addressable_shards] for x in arrays), strict=True)
        host = placed.with_memory_kind(HOST)
        whole = [jax.device_put(np.stack([np.asarray(x) for x in each]), each[0].sharding) for each in shards]
        return jax.make_array_from_single_device_arrays((len(parts), *arrays[0].shape), host, whole)
    options = compiler_options(placed.mesh)
    return jax.jit(lambda xs: jnp.stack(xs), out_shardings=placed, compiler_options=options)(arrays)


def fill(walker: Walker, held: Held, kind: Kind, shelf: Storage, mesh: Mesh, value: Value) -> Arrays:
    """Puts rows of one kind, of values by leaf, and returns the stored arrays of what is outside."""
    placed = members(shelf, shelf.leaf_shardings(mesh))
    own: Kind = "params" if kind == "grads" else kind
    for k, length in enumerate(walker.lengths):
        slots, structs = walker.slots(own, k), walker.structs(kind, k)
        for at in range(length):
            row = []
            for index, struct in zip(slots, structs, strict=True):
                slot, where = shelf.slots[index], _of_layer(shelf.slots[index], placed[index][0])
                leaf = value(slot.layer_leaves[at], where, None) if slot.is_stack else value(slot.leaves[0], where, at)
                row.append(put(store_slot(layer_slot(slot), [leaf], [where], mesh), struct.sharding))
            getattr(held, kind)[k].put(at, tuple(row))
    outside = []
    for index in walker.outside(own):
        slot = shelf.slots[index]
        leaves = [value(leaf, where, None) for leaf, where in zip(slot.leaves, placed[index], strict=True)]
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
                leaf = whole if slot.is_stack else part_of(whole, at)
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


def part_of(leaf: Any, at: int) -> Any:
    """A layer of a leaf that holds all of them; host memory is read by the host."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[at]
    if leaf.sharding.memory_kind != HOST:
        return leaf[at]
    if leaf.is_fully_addressable:
        return np.asarray(leaf)[at]
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    parts = [jax.device_put(np.asarray(x.data)[at], x.data.sharding) for x in leaf.addressable_shards]
    of_layer = sharding.update(spec=PartitionSpec(*sharding.spec[1:]))
    return jax.make_array_from_single_device_arrays(leaf.shape[1:], of_layer, parts)


def values_of(shelf: Storage, tree: PyTree) -> Value:
    """The leaves of a tree of the user's, of which some may be `Unread`."""
    leaves = shelf.treedef.flatten_up_to(tree)

    def value(leaf: int, placed: NamedSharding, layer: int | None) -> Any:
        found = leaves[leaf]
        if isinstance(found, Unread):
            return found.placed(placed, layer)
        return found if layer is None else part_of(found, layer)

    return value


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
