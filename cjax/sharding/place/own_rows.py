"""Rows that devices sort, multiply and put back by themselves (`cjax.trace.jaxpr.sorted_rows`), each its own.

The numbers of rows are those of all devices' rows still. What a device finds among its own it looks up by their numbers
less the first's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cjax.jax_compat.core import Atom, Equation
from cjax.sharding.layout.layout import Layout
from cjax.sharding.layout.shards import OwnShards
from cjax.sharding.products.region import in_region
from cjax.sharding.storage.storage import as_spec
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.sorted_rows import SortedRows, sorted_rows


@dataclass
class _Own:
    """Such rows, the axes that share them out, and how many of each key a device has, [devices, keys]."""

    of: SortedRows
    axes: tuple[str, ...]
    counts: jax.Array | None = None


class OwnRows:
    """Knows such rows by their equations, while a trace is evaluated.

    Args:
      dims: of the trace.
      layout: how they are split.
      mesh: the mesh.
    """

    def __init__(self, dims: Dims, layout: Layout, mesh: Mesh) -> None:
        self._shards, self._mesh = OwnShards(dims, layout), mesh
        self._by_equation: dict[int, _Own] = {}

    def find(self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope) -> None:
        """Learns of the rows that are sorted in a list of equations; arguments as for `sorted_rows`, and the scope."""
        for rows in sorted_rows(eqns, results) if self._mesh.size > 1 else ():
            axes = self._shards.entries(rows.eqns[0].outvars[1], scope)[0]
            moved = [eqn for eqn in rows.eqns if id(eqn) in rows.lookups | rows.additions]
            if axes and all(self._shards.has_own_rows(eqn, axes, scope) for eqn in moved):
                ids = (rows.sort, *rows.inverses, *rows.lookups, *rows.additions, *rows.products)
                self._by_equation |= dict.fromkeys(ids, _Own(rows, axes))

    def has(self, eqn: Equation) -> bool:
        """Whether devices look up, or add to, rows of their own alone."""
        return id(eqn) in self._by_equation

    def counts(self, eqn: Equation, axes: tuple[str, ...]) -> jax.Array | None:
        """How many rows of each key a device has, on a dim in front that `axes` split, for products of its own rows."""
        own = self._by_equation.get(id(eqn))
        assert own is None or (self._left(own.axes) == axes and own.counts is not None), "sorted by other devices"
        return None if own is None else own.counts

    def sorted(self, eqn: Equation, ins: list[Any]) -> list[jax.Array] | None:
        """The results of a sort of each device's own rows; None for all other equations."""
        own = self._by_equation.get(id(eqn))
        if own is None or id(eqn) not in {own.of.sort, *own.of.inverses}:
            return None
        axes, num_keys = self._left(own.axes), own.of.num_keys
        spec = as_spec([axes])

        def sort(*shards: jax.Array) -> list[jax.Array]:
            return bind_as_is(eqn, shards)

        def count(keys: jax.Array) -> list[jax.Array]:
            return [jnp.sum(keys[:, None] == jnp.arange(num_keys, dtype=keys.dtype), 0, jnp.int32)[None]]

        operands = [*map(jnp.asarray, ins)]
        if id(eqn) == own.of.sort:
            specs = [spec], [as_spec([axes, ()])]
            (own.counts,) = in_region(count, operands[:1], *specs, self._mesh, alone=True)
        return in_region(sort, operands, [spec] * 2, [spec] * 2, self._mesh, alone=True)

    def _left(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in axes if axis not in manual)
