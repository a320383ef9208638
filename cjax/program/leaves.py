"""The leaves of a state one after the other, for what need not hold all of them: a checkpoint, another plan's rows."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.checkpoint import LeafPiece, Unread
from cjax.mesh import compiler_options
from cjax.planner.homes import Kind
from cjax.program.keep import alike, members, put
from cjax.program.state import Arrays, State
from cjax.program.walked import ROWS, WalkedState, joined, leaves_of_row, outside_leaves, part_of, row_leaves
from cjax.sharding.storage.storage import Slot, Storage
from cjax.tree import PyTree, leaf_names

NAMES: dict[Kind, str] = {"params": "params", "frozen": "frozen", "opt": "opt_state"}


@dataclass(frozen=True)
class _Pending(Unread):
    """A leaf of a live state, which is made when somebody asks for it."""

    source: "_WalkedTree | _StoredTree"
    leaf: int
    shape: tuple[int, ...]
    dtype: Any

    def placed(self, sharding: jax.sharding.Sharding, layer: int | None = None) -> jax.Array:
        # Not a copy: who keeps it, makes one of his own.
        assert isinstance(sharding, NamedSharding)
        return put(self.source.read(self.leaf, layer), sharding)


def pending_trees(state: State) -> dict[str, PyTree]:
    """The trees of weights and of the optimizer's state, whose leaves are `Unread`. They need the state alive."""
    outside = {"params": state._params, "frozen": state._frozen, "opt": state._opt}
    trees: dict[str, PyTree] = {}
    for kind in ROWS:
        shelf = getattr(state._shelves, kind)
        if isinstance(state, WalkedState):
            source: _WalkedTree | _StoredTree = _WalkedTree(state, kind, shelf, outside[kind])
        else:
            source = _StoredTree(shelf, outside[kind], state._shelves.mesh)
        shapes = jax.tree.leaves(shelf.leaf_shapes())
        pending = [_Pending(source, leaf, shape.shape, shape.dtype) for leaf, shape in enumerate(shapes)]
        trees[NAMES[kind]] = jax.tree.unflatten(shelf.treedef, pending)
    return trees


class _WalkedTree:
    """One tree of a state that walks: the row that was read last is kept, since its leaves are asked for together."""

    def __init__(self, state: WalkedState, kind: Kind, shelf: Storage, outside: Arrays) -> None:
        self._state, self._shelf, self._outside = state, shelf, outside
        self._kind: Kind = kind
        self._at: tuple[int, int] | None = None
        self._row: dict[int, jax.Array] = {}
        self._places: dict[int, tuple[int, int]] = {}  # a leaf of one layer -> stack, layer
        self._stacks: dict[int, int] = {}  # a leaf of all layers -> stack
        for k, length in enumerate(state._walker.lengths):
            for index in state._walker.slots(kind, k):
                slot = shelf.slots[index]
                if slot.is_stack:
                    self._places |= {slot.layer_leaves[at]: (k, at) for at in range(length)}
                else:
                    self._stacks[slot.leaves[0]] = k

    def read(self, leaf: int, layer: int | None) -> jax.Array:
        if leaf in self._places:
            return self._of_row(leaf, *self._places[leaf])
        if leaf not in self._stacks:
            whole = self._others[leaf]
            return whole if layer is None else part_of(whole, layer)
        stack = self._stacks[leaf]
        if layer is not None:
            return self._of_row(leaf, stack, layer)
        placed = jax.tree.leaves(self._shelf.leaf_shardings(self._state._shelves.mesh))[leaf]
        return joined([self._of_row(leaf, stack, at) for at in range(self._state._walker.lengths[stack])], placed)

    def _of_row(self, leaf: int, stack: int, layer: int) -> jax.Array:
        if self._at != (stack, layer):
            self._row.clear()
            state, walker = self._state, self._state._walker
            rows = getattr(state._held, self._kind)[stack]
            slots = walker.slots(self._kind, stack)
            parts = leaves_of_row(self._shelf, slots, layer, rows.fetch(layer), state._shelves.mesh)
            self._row = {number: value for number, _, value in parts}
            self._at = (stack, layer)
            if layer + 1 < walker.lengths[stack]:
                rows.ahead(layer + 1)
        return self._row[leaf]

    @functools.cached_property
    def _others(self) -> dict[int, jax.Array]:
        mesh = self._state._shelves.mesh
        return dict(outside_leaves(self._state._walker, self._kind, self._shelf, self._outside, mesh))


class _StoredTree:
    """One tree of a state whose arrays are on the devices."""

    def __init__(self, shelf: Storage, arrays: Arrays, mesh: Mesh) -> None:
        self._shelf, self._arrays, self._mesh = shelf, arrays, mesh
        self._places = {leaf: (i, at) for i, slot in enumerate(shelf.slots) for at, leaf in enumerate(slot.leaves)}

    def read(self, leaf: int, layer: int | None) -> jax.Array:
        index, at = self._places[leaf]
        slot = self._shelf.slots[index]
        placed = members(self._shelf, self._shelf.leaf_shardings(self._mesh))[index][at]
        part = at if slot.is_stack else layer
        if part is not None and not slot.is_stack:
            placed = NamedSharding(placed.mesh, PartitionSpec(*placed.spec[1:]))
        return _reader(alike(slot), part is not None, placed, self._mesh)(self._arrays[index], part or 0)


@functools.lru_cache(maxsize=1024)
def _reader(slot: Slot, is_part: bool, placed: NamedSharding, mesh: Mesh) -> Any:
    """From a slot's stored array to one leaf, or to one layer of it."""

    def read(stored: jax.Array, at: Any) -> jax.Array:
        array = slot.load(stored)
        return array[at] if is_part else array

    return jax.jit(read, out_shardings=placed, compiler_options=compiler_options(mesh))


def pieces_of(state: WalkedState) -> Iterator[list[LeafPiece]]:
    """All that layers have, a row at a time, as `cjax.checkpoint.save` takes it."""
    shelves = state._shelves
    for kind in ROWS:
        shelf = getattr(shelves, kind)
        names = leaf_names({NAMES[kind]: shelf.leaf_shapes()})
        for _, _, parts in row_leaves(state._walker, state._held, kind, shelf, shelves.mesh):
            pieces = [LeafPiece(names[leaf], layer, value) for leaf, layer, value in parts]
            parts.clear()
            yield pieces
            pieces.clear()


def awaited_trees(state: WalkedState) -> dict[str, PyTree]:
    """The trees that `pieces_of` fills: arrays of what belongs to no layer, and shapes of the rest."""
    outside = {"params": state._params, "frozen": state._frozen, "opt": state._opt}
    trees: dict[str, PyTree] = {}
    for kind in ROWS:
        shelf = getattr(state._shelves, kind)
        leaves = jax.tree.leaves(shelf.leaf_shapes())
        for leaf, value in outside_leaves(state._walker, kind, shelf, outside[kind], state._shelves.mesh):
            leaves[leaf] = value
        trees[NAMES[kind]] = jax.tree.unflatten(shelf.treedef, leaves)
    return trees


def spread_trees(state: WalkedState, shelves: dict[Kind, Storage], mesh: Mesh) -> dict[str, PyTree]:
    """The same trees where another plan, whose state is on its devices, has them. Rows come one after the other."""
    outside = {"params": state._params, "frozen": state._frozen, "opt": state._opt}
    trees: dict[str, PyTree] = {}
    for kind, there in shelves.items():
        own = getattr(state._shelves, kind)
        shapes = own.leaf_shapes()
        names = dict(zip(leaf_names(there.leaf_shapes()), jax.tree.leaves(there.leaf_shardings(mesh)), strict=True))
        placed = [names[name] for name in leaf_names(shapes)]
        num_layers = [leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(shapes)]
        leaves: list[Any] = [None] * own.treedef.num_leaves
        for leaf, value in outside_leaves(state._walker, kind, own, outside[kind], state._shelves.mesh):
            leaves[leaf] = put(value, placed[leaf])
        for _, _, parts in row_leaves(state._walker, state._held, kind, own, state._shelves.mesh):
            for leaf, layer, value in parts:
                if layer is None:
                    leaves[leaf] = put(value, placed[leaf])
                    continue
                where = NamedSharding(placed[leaf].mesh, PartitionSpec(*placed[leaf].spec[1:]))
                there_now = put(value, where)
                # In place: beside the leaf, as it is split there, one layer of it.
                whole = leaves[leaf] if layer else _room(num_layers[leaf], placed[leaf], mesh)(there_now)
                leaves[leaf] = _layer_put(placed[leaf], mesh)(whole, there_now, layer)
                del whole, there_now
        trees[NAMES[kind]] = jax.tree.unflatten(own.treedef, leaves)
    return trees


@functools.lru_cache(maxsize=1024)
def _room(num: int, placed: NamedSharding, mesh: Mesh) -> Any:
    """From one layer an array with as many as a leaf has."""

    def make(layer: jax.Array) -> jax.Array:
        return jnp.broadcast_to(layer[None], (num, *layer.shape))

    return jax.jit(make, out_shardings=placed, compiler_options=compiler_options(mesh))


@functools.lru_cache(maxsize=1024)
def _layer_put(placed: NamedSharding, mesh: Mesh) -> Any:
    def put(whole: jax.Array, layer: jax.Array, at: Any) -> jax.Array:
        return whole.at[at].set(layer)

    return jax.jit(put, out_shardings=placed, donate_argnums=0, compiler_options=compiler_options(mesh))
