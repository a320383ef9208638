"""The user's tree <-> the stored tree: layers stacked, dims padded. The only place that knows both.

The user sees one leaf per layer in logical shapes. What is kept between steps is one array per *slot*: a leaf, or the
same leaf of every layer stacked on a new first dim, a dim that packs several tensors taken apart, each dim padded up to
what its mesh axes divide.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.trace.dims.refine_rules import Form, expand, whole
from cjax.trace.layers.vectorize import SpreadRows
from cjax.tree import PyTree


@dataclass(frozen=True)
class StageRows:
    """How the layers of a stack are spread over the stages of a pipeline: the layer in each row, -1 where none is."""

    axis: str
    order: tuple[int, ...]

    @functools.cached_property
    def filled(self) -> tuple[int, ...]:
        """The rows that have a layer."""
        return tuple(row for row, layer in enumerate(self.order) if layer >= 0)

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers, in the order of their rows."""
        return tuple(layer for layer in self.order if layer >= 0)

    @functools.cached_property
    def places(self) -> tuple[int, ...] | None:
        """For each layer, where it is in `layers`; None where they are in order."""
        places = tuple(sorted(range(len(self.layers)), key=self.layers.__getitem__))
        return None if places == tuple(range(len(places))) else places


@dataclass(frozen=True)
class Slot:
    """One stored array: the leaves of the user's tree in it, their shape, and its placement.

    `shape` is the user's with packed dims taken apart, as the trace has it; `form` says into how many parts. `rows`, of
    a pipeline, are those of the stack, or of the first dim of a leaf that holds all layers.
    """

    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    padded: tuple[int, ...]
    spec: PartitionSpec
    form: Form
    rows: StageRows | None = None

    @property
    def is_stack(self) -> bool:
        return len(self.leaves) > 1

    @property
    def logical(self) -> tuple[int, ...]:
        """The shape of each leaf in the user's tree."""
        sizes = iter(self.shape)
        return tuple(next(sizes) * (next(sizes) if parts > 1 else 1) for parts in self.form)

    @property
    def logical_spec(self) -> PartitionSpec:
        """The placement of a leaf in the user's shape: where parts lie side by side, in blocks of the whole."""
        entries = iter(self.spec)
        pairs = [(next(entries), next(entries) if parts > 1 else None) for parts in self.form]
        return PartitionSpec(*(first if second is None else second for first, second in pairs))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if not self.is_stack:
            return self.padded
        return (len(self.rows.order) if self.rows else len(self.leaves), *self.padded)

    @property
    def stored_spec(self) -> PartitionSpec:
        return self.stacked(self.spec)

    def stacked(self, spec: PartitionSpec) -> PartitionSpec:
        """`spec` of one leaf, for what is stored."""
        return PartitionSpec(self.rows.axis if self.rows else None, *spec) if self.is_stack else spec

    @property
    def layer_leaves(self) -> tuple[int, ...]:
        """The leaves in the order of the layers."""
        places = self.rows.places if self.rows and self.is_stack else None
        return self.leaves if places is None else tuple(self.leaves[i] for i in places)

    def in_layer_order(self, array: jax.Array) -> jax.Array:
        """An array without padding, its layers in the model's order."""
        places = self.rows.places if self.rows else None
        return array if places is None else array[np.array(places)]

    def in_row_order(self, array: jax.Array) -> jax.Array:
        """The reverse of `in_layer_order`."""
        layers = self.rows.layers if self.rows and self.rows.places else None
        return array if layers is None else array[np.array(layers)]

    def unpad(self, array: jax.Array) -> jax.Array:
        """The stored array (of one layer or of all) without its padding."""
        rows = self._rows_of(array)
        if rows is not None:
            num = len(rows.filled)
            array = array[:num] if rows.filled[-1] < num else array[np.array(rows.filled)]
        if self.padded == self.shape:
            return array
        lead = array.ndim - len(self.shape)
        return array[(slice(None),) * lead + tuple(slice(0, n) for n in self.shape)]

    def pad(self, array: jax.Array) -> jax.Array:
        lead = array.ndim - len(self.shape)
        padded = list(zip(self.shape, self.padded, strict=True))
        rows = self.rows if self.rows and (lead == 1 or not self.is_stack) else None
        if rows is not None and not self.is_stack:
            padded[0] = (self.shape[0], self.shape[0])  # its rows are dealt with below
        if any(n != p for n, p in padded):
            array = jnp.pad(array, [(0, 0)] * lead + [(0, p - n) for n, p in padded])
        if rows is None or len(rows.filled) == len(rows.order):
            return array
        more = len(rows.order) - len(rows.filled)
        if rows.filled[-1] < len(rows.filled):
            return jnp.pad(array, [(0, more)] + [(0, 0)] * (array.ndim - 1))
        # A row without a layer takes zeros from behind the last layer.
        sources = np.full(len(rows.order), len(rows.filled))
        sources[list(rows.filled)] = np.arange(len(rows.filled))
        return jnp.take(jnp.pad(array, [(0, 1)] + [(0, 0)] * (array.ndim - 1)), sources, axis=0)

    @property
    def spread(self) -> SpreadRows | None:
        """Where the layers of a stack are among its rows, if there are rows without a layer."""
        rows = self.rows if self.is_stack else None
        if rows is None or len(rows.filled) == len(rows.order):
            return None
        return SpreadRows(len(rows.order), rows.filled)

    def trim(self, array: jax.Array) -> jax.Array:
        """The stored array as `vectorize` has it: without the padding of dims, rows without a layer still there."""
        return self.trim_rows(array) if self.spread else self.unpad(array)

    def fill(self, array: jax.Array) -> jax.Array:
        """The reverse of `trim`."""
        return self.fill_rows(array) if self.spread else self.pad(array)

    def trim_rows(self, rows: jax.Array) -> jax.Array:
        """Rows of layers, however many, without the padding of their other dims."""
        shape = self.shape if self.is_stack else self.shape[1:]
        return rows[(slice(None), *(slice(0, n) for n in shape))] if rows.shape[1:] != shape else rows

    def fill_rows(self, rows: jax.Array) -> jax.Array:
        """The reverse of `trim_rows`."""
        padded = self.padded if self.is_stack else self.padded[1:]
        if rows.shape[1:] == padded:
            return rows
        return jnp.pad(rows, [(0, 0)] + [(0, p - n) for n, p in zip(rows.shape[1:], padded, strict=True)])

    def _rows_of(self, array: jax.Array) -> StageRows | None:
        """The rows of an array with padding, if it has some without a layer."""
        whole = array.ndim > len(self.shape) or not self.is_stack
        return self.rows if self.rows and whole and len(self.rows.filled) < len(self.rows.order) else None

    def load(self, array: jax.Array) -> jax.Array:
        """The stored array (of one layer or of all) in the user's shape."""
        array = self.unpad(array)
        array = array if self.is_stack else self.in_layer_order(array)
        return array.reshape(array.shape[: array.ndim - len(self.shape)] + self.logical)

    def store(self, array: jax.Array) -> jax.Array:
        """An array in the user's shape (of one layer or of all) as it is stored."""
        array = array.reshape(array.shape[: array.ndim - len(self.logical)] + self.shape)
        return self.pad(array if self.is_stack else self.in_row_order(array))


@dataclass(frozen=True)
class Storage:
    """How one tree of the user's is kept."""

    treedef: Any
    slots: tuple[Slot, ...]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(slot.leaves for slot in self.slots)

    @property
    def forms(self) -> tuple[Form, ...]:
        """For each leaf of the user's tree, the number of parts that each of its dims is made of."""
        found = {leaf: slot.form for slot in self.slots for leaf in slot.leaves}
        return tuple(found[i] for i in range(len(found)))

    def shardings(self, mesh: Mesh) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, slot.stored_spec) for slot in self.slots)

    def leaf_shardings(self, mesh: Mesh) -> PyTree:
        """The placement of each leaf of the user's tree, as it comes out of the store: what can't be split evenly
        without padding is not."""
        shardings: dict[int, NamedSharding] = {}
        for slot in self.slots:
            entries = [
                entry if n % math.prod(mesh.shape[a] for a in axes_of_entry(entry)) == 0 else None
                for n, entry in zip(slot.logical, slot.logical_spec, strict=True)
            ]
            shardings.update(dict.fromkeys(slot.leaves, NamedSharding(mesh, PartitionSpec(*entries))))
        return jax.tree.unflatten(self.treedef, [shardings[i] for i in range(len(shardings))])

    def leaf_shapes(self) -> PyTree:
        """The user's tree as ShapeDtypeStructs."""
        shapes = {i: jax.ShapeDtypeStruct(slot.logical, slot.dtype) for slot in self.slots for i in slot.leaves}
        return jax.tree.unflatten(self.treedef, [shapes[i] for i in range(len(shapes))])

    def shape(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(slot.stored_shape, slot.dtype) for slot in self.slots)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """`groups`, each in the order of the layers."""
        return tuple(slot.layer_leaves for slot in self.slots)

    def in_layer_order(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Stored arrays without their padding, as `layer_groups` says."""
        return [slot.in_layer_order(slot.unpad(array)) for slot, array in zip(self.slots, stored, strict=True)]

    def pad(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(slot.pad(array) for slot, array in zip(self.slots, arrays, strict=True))

    def trim(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Stored arrays as `Slot.trim` has them."""
        return [slot.trim(array) for slot, array in zip(self.slots, stored, strict=True)]

    def fill(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The reverse of `trim`."""
        return tuple(slot.fill(array) for slot, array in zip(self.slots, arrays, strict=True))

    def load(self, stored: Sequence[jax.Array]) -> PyTree:
        """The user's own tree."""
        leaves: list[Any] = [None] * sum(len(slot.leaves) for slot in self.slots)
        for slot, array in zip(self.slots, map(Slot.load, self.slots, stored), strict=True):
            for index, leaf in enumerate(slot.leaves):
                leaves[leaf] = array[index] if slot.is_stack else array
        return jax.tree.unflatten(self.treedef, leaves)

    def store(self, tree: PyTree) -> tuple[jax.Array, ...]:
        """The stored arrays of a tree of the user's (traceable; memory of both)."""
        leaves = self.treedef.flatten_up_to(tree)
        arrays = [
            jnp.stack([leaves[i] for i in slot.leaves]) if slot.is_stack else jnp.asarray(leaves[slot.leaves[0]])
            for slot in self.slots
        ]
        return tuple(map(Slot.store, self.slots, arrays))


def as_spec(entries: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """The placement with these mesh axes on each dim; `axes_of_entry` of its entries gives them back."""
    return PartitionSpec(*(axes or None for axes in entries))


def filled_up(length: int, size: int) -> int:
    """Positions with what is added behind the last of them, so that each of `size` devices has as many."""
    return -(-length // size) * size


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def make_storage(
    tree: PyTree,
    groups: Sequence[tuple[int, ...]],
    spec_of: Callable[[int], PartitionSpec],
    axis_sizes: Mapping[str, int],
    form_of: Callable[[int], Form | None],
    rows_of: Callable[[int], StageRows | None] = lambda leaf: None,
) -> Storage:
    """Storage of `tree` (of ShapeDtypeStructs).

    Args:
      tree: the user's tree.
      groups: leaves to stack, in layer order; all others are kept alone.
      spec_of: the placement of a leaf, by index; that of a group is its first leaf's.
      axis_sizes: sizes of the mesh axes, for padding.
      form_of: how a leaf's dims are taken apart, by index; None where they are not. Its placement is of that shape.
      rows_of: how layers are spread over the stages of a pipeline, by the first leaf of a group.
    """
    leaves, treedef = jax.tree.flatten(tree)
    stacked = {leaf for group in groups for leaf in group}
    all_groups = sorted([*groups, *((i,) for i in range(len(leaves)) if i not in stacked)])
    slots = []
    for group in all_groups:
        leaf, spec = leaves[group[0]], spec_of(group[0])
        form = form_of(group[0]) or whole(leaf.shape)
        shape = expand(leaf.shape, form)
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        shards = [math.prod(axis_sizes[a] for a in axes_of_entry(entry)) for entry in entries]
        padded = tuple(-(-n // s) * s for n, s in zip(shape, shards, strict=True))
        rows = rows_of(group[0])
        if rows is not None and len(group) > 1:
            group = tuple(group[layer] for layer in rows.layers)
        elif rows is not None:
            padded = (len(rows.order), *padded[1:])
        slots.append(Slot(group, shape, leaf.dtype, padded, PartitionSpec(*entries), form, rows))
    return Storage(treedef, tuple(slots))


def stackable(groups: Sequence[tuple[int, ...]], leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """The groups that can be kept as stacks: distinct leaves, in no other group, of one shape and dtype."""
    taken: set[int] = set()
    kept = []
    for group in groups:
        shapes = {(tuple(leaves[i].shape), leaves[i].dtype) for i in group}
        if len(set(group)) == len(group) > 1 and len(shapes) == 1 and not taken & set(group):
            taken |= set(group)
            kept.append(group)
    return kept
