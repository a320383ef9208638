"""The user's tree <-> the stored tree: layers stacked, dims padded. The only place that knows both.

The user sees one leaf per layer in logical shapes. What is kept between steps is one array per *slot*: a leaf, or the
same leaf of every layer stacked on a new first dim, a dim that packs several tensors taken apart, each dim padded up to
what its mesh axes divide.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.trace.refine_rules import Form, expand, whole

PyTree = Any


@dataclass(frozen=True)
class Slot:
    """One stored array: the leaves of the user's tree in it, their shape, and its placement.

    `shape` is the user's with packed dims taken apart, as the trace has it; `form` says into how many parts.
    """

    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    padded: tuple[int, ...]
    spec: PartitionSpec
    form: Form

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
        return (len(self.leaves), *self.padded) if self.is_stack else self.padded

    @property
    def stored_spec(self) -> PartitionSpec:
        return PartitionSpec(None, *self.spec) if self.is_stack else self.spec

    def unpad(self, array: jax.Array) -> jax.Array:
        """The stored array (of one layer or of all) without its padding."""
        if self.padded == self.shape:
            return array
        lead = array.ndim - len(self.shape)
        return array[(slice(None),) * lead + tuple(slice(0, n) for n in self.shape)]

    def pad(self, array: jax.Array) -> jax.Array:
        if self.padded == self.shape:
            return array
        lead = array.ndim - len(self.shape)
        return jnp.pad(array, [(0, 0)] * lead + [(0, p - n) for n, p in zip(self.shape, self.padded, strict=True)])


    def load(self, array: jax.Array) -> jax.Array:
        """The stored array (of one layer or of all) in the user's shape."""
        array = self.unpad(array)
        return array.reshape(array.shape[: array.ndim - len(self.shape)] + self.logical)

    def store(self, array: jax.Array) -> jax.Array:
        """An array in the user's shape (of one layer or of all) as it is stored."""
        return self.pad(array.reshape(array.shape[: array.ndim - len(self.logical)] + self.shape))


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

    def unpad(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Stored arrays without their padding, still stacked."""
        return [slot.unpad(array) for slot, array in zip(self.slots, stored, strict=True)]

    def pad(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(slot.pad(array) for slot, array in zip(self.slots, arrays, strict=True))

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


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def make_storage(
    tree: PyTree,
    groups: Sequence[tuple[int, ...]],
    spec_of: Callable[[int], PartitionSpec],
    axis_sizes: Mapping[str, int],
    form_of: Callable[[int], Form | None],
) -> Storage:
    """Storage of `tree` (of ShapeDtypeStructs).

    Args:
      tree: the user's tree.
      groups: leaves to stack, in layer order; all others are kept alone.
      spec_of: the placement of a leaf, by index; that of a group is its first leaf's.
      axis_sizes: sizes of the mesh axes, for padding.
      form_of: how a leaf's dims are taken apart, by index; None where they are not. Its placement is of that shape.
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
        slots.append(Slot(group, shape, leaf.dtype, padded, PartitionSpec(*entries), form))
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
