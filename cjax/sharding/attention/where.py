"""Where the dims of an attention are on a mesh."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Literal
from cjax.sharding.attention.blocks import lowest
from cjax.sharding.storage.storage import axes_of_entry, filled_up
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node

# A copy of a value for each device, on a dim in front, and the axes that split that dim; None where there are none.
Apart = tuple[jax.Array, tuple[str, ...]] | None


def split_axes(attention: Attention, axis: str | None, spec: PartitionSpec) -> dict[int, tuple[str, ...]]:
    """Mesh axes of each label but the positions', for those that are not manual already.

    Args:
      attention: whose labels.
      axis: what splits the positions; None if nothing does.
      spec: of `attention.query`.
    """
    # Within a region, as in a pipeline's stages, arrays are a device's shards already: to split them again over an axis
    # that is manual there would take a part of a part.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    position = attention.label("query")
    found = {}
    for label, entry in zip(attention.query.labels, spec, strict=False):
        axes = tuple(one for one in axes_of_entry(entry) if one not in manual)
        if axes:
            assert label, f"{spec} splits a dim of size 1 or one that is summed over"
            found[label[0]] = axes
    wanted = None if axis is None else (axis,)
    assert found.pop(position, None) == wanted, f"{spec} does not split the positions over {axis!r}"
    return found


@dataclass(frozen=True)
class Places:
    """Where the dims of an attention are.

    Args:
      attention: whose dims.
      mesh: the mesh.
      axis: what splits the positions; None if nothing does.
      axes_of: mesh axes of each other label that is split.
    """

    attention: Attention
    mesh: Mesh
    axis: str | None
    axes_of: Mapping[int, tuple[str, ...]]

    # A ring of one would visit its one block twice on its way back, as the first and as the last.
    def __post_init__(self) -> None:
        assert self.axis is None or self.size > 1, f"the axis {self.axis!r} splits nothing"

    @property
    def size(self) -> int:
        return 1 if self.axis is None else self.mesh.shape[self.axis]

    def low(self, operands: Sequence[jax.Array]) -> Any:
        """What matmuls are computed in. CPUs have no kernels that sum bfloat16 in float32, and are given float32."""
        found = lowest(operands)
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return jnp.promote_types(found, jnp.float32) if on_cpu else found

    @property
    def literals(self) -> set[tuple[int, int]]:
        """Where the region's equations have literals."""
        eqns = [eqn for eqn, _ in self.attention.steps.values()]
        return {(id(e), i) for e in eqns for i, atom in enumerate(e.invars) if isinstance(atom, Literal)}

    @property
    def sizes(self) -> dict[int, int]:
        """Of each label on a device."""
        sizes = dict(self.attention.sizes)
        for role in ("query", "key"):
            label = self.attention.label(role)
            # All devices run one program, so the last has as many positions as the others, some of them added.
            sizes[label] = filled_up(sizes[label], self.size) // self.size
        for label, axes in self.axes_of.items():
            sizes[label] //= math.prod(self.mesh.shape[one] for one in axes)
        return sizes

    def spec(self, node: Node, positions: Sequence[str] = ("query", "key")) -> PartitionSpec:
        """Of a node, split over `axis` only where a dim is one of `positions`."""
        axes_of: dict[int, tuple[str, ...]] = dict(self.axes_of)
        if self.axis is not None:
            axes_of |= {self.attention.label(role): (self.axis,) for role in positions}
        entries = []
        for label in node.labels:
            # A dim that is made of several labels is split by its first in whole blocks. Split by a later one, each
            # device's elements would lie apart from each other, which no PartitionSpec says.
            if any(one in axes_of for one in label[1:]):
                raise ValueError(
                    f"{self.attention.where}: the tensor axis splits groups of heads here, and not the heads of keys "
                    "that they share: write a size that divides the heads of keys"
                )
            entries.append(axes_of.get(label[0]) if label else None)
        return PartitionSpec(*entries)

    def own_copies(
        self, apart: Sequence[Apart], positions: Sequence[str] = ("query", "key")
    ) -> dict[int, tuple[jax.Array, tuple[str, ...]]]:
        """Of operands that are read as copies, by place: those whose copies are split as examples are, and they
        themselves are not.

        Args:
          apart: for each input of the attention's group.
          positions: of dims, that are split; as for `spec`.
        """
        known = dict(zip(self.attention.group.ins, apart, strict=False))
        found = {}
        for place, node in enumerate(self.attention.operands):
            copies = known.get(node.var)
            taken = {axis for entry in self.spec(node, positions) for axis in axes_of_entry(entry)}
            # Queries, keys and values are of examples already. And an axis that splits the copies can't split another
            # dim.
            if place >= 3 and copies is not None and {*copies[1]} <= self.axes and not taken.intersection(copies[1]):
                found[place] = copies
        return found

    def filled(self, value: jax.Array, node: Node, of_keys: str = "constant") -> jax.Array:
        """A node's value with as many positions as all devices together; how keys' are made, `jnp.pad` says.

        XLA keeps a dim that devices don't divide in equal parts too, with what is in none of its elements behind the
        last, so that nothing moves for this.
        """
        lengths = {role: self.attention.sizes[self.attention.label(role)] for role in ("query", "key")}
        for role, mode in (("query", "constant"), ("key", of_keys)):
            label = (self.attention.label(role),)
            more = filled_up(lengths[role], self.size) - lengths[role]
            if more and label in node.labels:
                widths = [(0, more if one == label else 0) for one in node.labels]
                value = jnp.pad(value, widths, mode=mode)
        return value

    def cut(self, value: jax.Array) -> jax.Array:
        """The result without what `filled` added to its queries."""
        label = self.attention.label("query")
        return lax.slice_in_dim(value, 0, self.attention.sizes[label], axis=self.attention.out.labels.index((label,)))

    def whole(self, spec: PartitionSpec) -> tuple[str, ...]:
        """The axes at work that `spec` does not split over: each device's gradient of such a value is a part of it."""
        used = {one for entry in spec for one in axes_of_entry(entry)}
        return tuple(one for one in sorted(self.axes) if one not in used)

    @property
    def axes(self) -> set[str]:
        return {*filter(None, [self.axis]), *(one for axes in self.axes_of.values() for one in axes)}

    @property
    def starts(self) -> dict[int, Any]:
        """The first index of each label that is split, positions aside; where `axes` are manual."""
        return {label: lax.axis_index(axes) * self.sizes[label] for label, axes in self.axes_of.items()}

    def mapped(
        self, function: Callable[..., Any], ins: Any, outs: Any, axes: Collection[str] | None = None
    ) -> Callable[..., Any]:
        """`function` on each device's shard, manual over the axes at work, or over `axes`."""
        axes = self.axes if axes is None else axes
        # JAX takes an empty set for all axes of the mesh.
        if not axes:
            return function
        # Inside another region the mesh is the one that knows which axes are manual there; JAX refuses any other.
        context = jax.sharding.get_abstract_mesh()
        mesh = context if context.manual_axes else self.mesh
        return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, axis_names=set(axes), check_vma=False)
