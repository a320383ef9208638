"""Stored arrays as slices read them, and what slices make as it is stored."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.walk.ends import Laid

Arrays = tuple[jax.Array, ...]
Specs = Sequence[PartitionSpec]  # of one leaf of each slot of a tree


class Values:
    """One tree in rows, as traces have it.

    Args:
      laid: the tree.
      mesh: the mesh.
      specs: where its leaves are worked on, by slot; where they are kept, if left out.
    """

    def __init__(self, laid: Laid, mesh: Mesh, specs: Specs | None = None) -> None:
        self.laid = laid
        self._mesh, self._specs = mesh, specs

    def of_row(self, k: int, row: Sequence[jax.Array]) -> list[jax.Array]:
        """A layer's values, from its arrays."""
        rows = self.laid.stacks[k]
        parts = zip(rows.of_layer, row, self._row_specs(k), strict=True)
        values = [self._placed(slot.unpad(array), spec) for slot, array, spec in parts]
        return [value[None] if apart else value for value, apart in zip(values, rows.apart, strict=True)]

    def row(self, k: int, values: Sequence[jax.Array]) -> Arrays:
        """A layer's arrays, from its values."""
        rows = self.laid.stacks[k]
        own = [value[0] if apart else jnp.asarray(value) for value, apart in zip(values, rows.apart, strict=True)]
        parts = zip(rows.of_layer, own, self._row_specs(k), strict=True)
        return tuple(slot.pad(self._placed(value, spec)) for slot, value, spec in parts)

    def of_outside(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The values of leaves outside, from their arrays."""
        values: list[jax.Array] = []
        for index, array in zip(self.laid.outside, arrays, strict=True):
            slot = self.laid.storage.slots[index]
            value = self._placed(slot.unpad(array), self._outside_spec(index))
            values += [value[leaf] for leaf in range(len(slot.leaves))] if slot.is_stack else [value]
        return values

    def outside(self, values: Sequence[jax.Array]) -> Arrays:
        """The arrays of leaves outside, from their values."""
        arrays = []
        rest = iter(values)
        for index in self.laid.outside:
            slot = self.laid.storage.slots[index]
            own = [next(rest) for _ in slot.leaves]
            value = jnp.stack(own) if slot.is_stack else jnp.asarray(own[0])
            arrays.append(slot.pad(self._placed(value, self._outside_spec(index))))
        return tuple(arrays)

    def row_shardings(self, k: int) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(self._mesh, slot.stored_spec) for slot in self.laid.stacks[k].of_layer)

    def outside_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(self._mesh, self.laid.storage.slots[i].stored_spec) for i in self.laid.outside)

    def _row_specs(self, k: int) -> list[PartitionSpec | None]:
        rows = self.laid.stacks[k]
        if self._specs is None:
            return [None for _ in rows.slots]
        own = [self._specs[index] for index in rows.slots]
        return [PartitionSpec(*spec[1:]) if apart else spec for spec, apart in zip(own, rows.apart, strict=True)]

    def _outside_spec(self, index: int) -> PartitionSpec | None:
        return None if self._specs is None else self.laid.storage.slots[index].stacked(self._specs[index])

    def _placed(self, value: jax.Array, spec: PartitionSpec | None) -> jax.Array:
        """Each device works on its own part."""
        if spec is None or self._mesh.size == 1:
            return value
        return lax.with_sharding_constraint(value, NamedSharding(self._mesh, spec))
