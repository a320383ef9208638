"""Where a layout puts the values of a trace: the axes of their dims, and how much of them a device has."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from cjax.jax_compat.core import Atom, Literal, Var
from cjax.sharding.layout.layout import Layout
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.sources import WEIGHT
from cjax.trace.reading import Trace

Axes = tuple[str, ...]


@dataclass(frozen=True)
class PlacedTrace:
    """The values of a trace under a layout.

    Args:
      trace: whose values.
      layout: as the tensor and sequence words make it, on one data-parallel copy.
    """

    trace: Trace
    layout: Layout
    _known: dict[tuple[Var, int], tuple[Axes, ...]] = field(default_factory=dict)

    def entries(self, atom: Atom, scope: Scope) -> tuple[Axes, ...]:
        """The axes of each dim of a value; of a weight as it is used."""
        if isinstance(atom, Literal):
            return tuple(() for _ in atom.aval.shape)
        key = atom, id(scope)
        if key not in self._known:
            self._known[key] = self._entries(atom, scope)
        return self._known[key]

    def _entries(self, atom: Var, scope: Scope) -> tuple[Axes, ...]:
        shape = atom.aval.shape
        classes, leaf = self.trace.dims.of(atom, scope), scope.origin.get(atom)
        whole = self.trace.leaves[leaf].shape if leaf is not None else ()
        if leaf is not None and whole[len(whole) - len(shape) :] == shape:
            given = self.trace.classes_of(leaf)
            spec = self.layout.weight_spec(leaf, given, whole)
            return self._real(axes_of_entry(entry) for entry in spec[len(whole) - len(shape) :])
        if scope.source.get(atom) == WEIGHT:
            classes = tuple(-1 if c in self.layout.positions else c for c in classes)
        return self._real(axes_of_entry(entry) for entry in self.layout.spec(classes, shape))

    def _real(self, entries: Iterable[Axes]) -> tuple[Axes, ...]:
        sizes = self.layout.axis_sizes
        return tuple(tuple(a for a in axes if sizes.get(a, 1) > 1) for axes in entries)

    def axes(self, atom: Atom, scope: Scope) -> frozenset[str]:
        """The axes that split a value."""
        return frozenset(a for entry in self.entries(atom, scope) for a in entry)

    def size(self, axes: Iterable[str]) -> int:
        """How many devices these axes have."""
        return math.prod(self.layout.axis_sizes[a] for a in axes)

    def local(self, atom: Atom, scope: Scope) -> float:
        """How many numbers of a value a device has; of dims that do not divide, as XLA pads them."""
        pairs = zip(self.entries(atom, scope), atom.aval.shape, strict=True)
        return math.prod(math.ceil(n / self.size(axes)) for axes, n in pairs)
