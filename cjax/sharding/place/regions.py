"""Where devices have their shards of a trace's values, and parts of them along the tensor axis.

A part is held on a dim in front that this axis splits, as a copy for each device is: its gradient is the device's own.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.shards import Entries, looked_up_dim
from cjax.sharding.place.own_rows import OwnRows
from cjax.sharding.products.addition import add_among
from cjax.sharding.products.lookup import look_up_among
from cjax.sharding.products.region import in_region
from cjax.sharding.storage.storage import as_spec

Parts = Callable[..., list[jax.Array]]  # devices' shards of operands to their parts of results


@dataclass(frozen=True)
class Regions:
    """Where devices have their shards of a group's variables, and parts of them.

    Args:
      entries: the axes that split a variable's dims.
      mesh: the mesh.
      own: rows that devices sort by themselves.
      evenly: how often lookups find every row, by id, of those that find all as often.
      low: the dtype that products are stored in, and so that sums of them are reduced in; None for their own.
      mark: says of a result that devices have parts of it, which are added up before it can be read.
    """

    entries: Callable[[Atom], Entries]
    mesh: Mesh
    own: OwnRows
    evenly: Mapping[int, int]
    low: Any
    mark: Callable[[jax.Array], jax.Array]

    def _spec(self, var: Atom, is_apart: bool) -> PartitionSpec:
        return as_spec([(TENSOR,)] * is_apart + self.entries(var))

    def parts(
        self, parts: Parts, operands: Sequence[Any], read: Sequence[Atom], made: Sequence[Var], own: Set[Atom]
    ) -> list[jax.Array]:
        """Devices' parts of results, on a dim in front.

        Args:
          parts: makes them of shards.
          operands: what stands for variables.
          read: these.
          made: the variables that results stand for.
          own: those read of which each device has a part, on such a dim.
        """
        inside = lambda *each: [y[None] for y in parts(*_mine(each, read, own))]  # noqa: E731
        specs = [self._spec(var, var in own) for var in read], [self._spec(var, True) for var in made]
        return in_region(inside, list(map(jnp.asarray, operands)), *specs, self.mesh, alone=True, as_is=True)

    def summed(
        self,
        parts: Parts,
        operands: Sequence[Any],
        read: Sequence[Atom],
        made: Sequence[Var],
        own: Set[Atom] = frozenset(),
    ) -> list[jax.Array]:
        """The same, added up over the tensor axis."""

        def inside(*each: Any) -> list[jax.Array]:
            found, low = parts(*_mine(each, read, own)), self.low
            return [y.astype(low) if low is not None and y.dtype == jnp.float32 else y for y in found]

        specs = [self._spec(var, var in own) for var in read], [self._spec(var, False) for var in made]
        over = [(TENSOR,)] * len(made)
        found = in_region(inside, list(map(jnp.asarray, operands)), *specs, self.mesh, over, alone=True, as_is=True)
        return list(map(self.mark, found))

    def look_up(self, eqn: Equation, values: jax.Array, places: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """In a region: what a device finds among rows of all devices along `axes`; without any, it has all of them."""
        is_split, own = any(map(any, map(self.entries, eqn.invars))), self.own.has(eqn)
        times = None if is_split and not own else self.evenly.get(id(eqn))
        return look_up_among(eqn, values, places, axes, self.mesh, times, own)

    def add(
        self, eqn: Equation, shard: jax.Array, places: jax.Array, rows: jax.Array, axes: tuple[str, ...]
    ) -> jax.Array:
        """In a region: what a device is given of all devices' rows along `axes`, added to its own shard."""
        return add_among(eqn, shard, places, rows, axes, self.mesh, self.low, self.own.has(eqn))

    def look_up_apart(self, eqn: Equation, operands: Sequence[Any], is_apart: bool = False) -> jax.Array:
        """What devices find among the rows of a batch, a copy for each along the tensor axis, on a dim in front.

        Args:
          eqn: the gather, of whole slices along all dims but one.
          operands: what is looked up, and places.
          is_apart: whether what is looked up is on such a dim, too.
        """
        axes, own = self.axes_of_rows(eqn), {eqn.invars[0]} if is_apart else set[Atom]()

        def look_up(shard: jax.Array, places: jax.Array) -> list[jax.Array]:
            return [self.look_up(eqn, shard, places, axes)]

        (found,) = self.parts(look_up, operands, eqn.invars, eqn.outvars, own)
        return found

    def axes_of_rows(self, eqn: Equation) -> tuple[str, ...]:
        """The axes along which devices have parts of what such a gather looks up, or a scatter adds to."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in self.entries(eqn.invars[0])[looked_up_dim(eqn)] if axis not in manual)


def _mine(shards: Sequence[Any], read: Sequence[Atom], own: Set[Atom]) -> list[Any]:
    return [x[0] if var in own else x for x, var in zip(shards, read, strict=True)]
