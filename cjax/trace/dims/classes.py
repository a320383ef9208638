"""Classes of dims: a union-find over the dims of every tensor of a trace, and the facts that a layout reads."""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.sources import GIVEN, follow

Ids = list[int]


@dataclass(frozen=True)
class Matmul:
    """One product of two tensors: ids of its dims, and which input leaf an operand comes from, if it is a weight.

    Of a convolution, the dims of the window are left out. A `looped` one uses its weight again at each turn of a loop.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    contracted: tuple[int, ...]
    batched: tuple[int, ...]
    out: tuple[int, ...]
    lhs_origin: int | None
    rhs_origin: int | None
    contracting: tuple[tuple[int, ...], tuple[int, ...]]  # positions in lhs and rhs
    is_conv: bool = False
    looped: bool = False
    weights: tuple[bool, bool] = (False, False)  # whether an operand is a weight or a function of weights
    of_batch: tuple[bool, bool] = (False, False)  # whether it depends on the batch

    @property
    def weight(self) -> tuple[int, ...] | None:
        """The operand that is a weight, or a function of weights; None if both are activations."""
        if self.lhs_origin is not None or self.rhs_origin is not None:  # a weight itself comes before a function
            return self.lhs if self.rhs_origin is None else self.rhs
        return self.rhs if self.weights[1] else self.lhs if self.weights[0] else None


@dataclass(frozen=True)
class Split:
    """A reshape of a dim of `size` into a major factor and the rest: [heads * head_dim] -> [heads, head_dim]."""

    whole: int
    size: int
    major: int
    major_size: int
    minor: tuple[int, ...]


@dataclass(frozen=True)
class CutDim:
    """A part taken out of a dim: [3 * heads] -> [heads]. `parts` such make the whole; 0 where no number does."""

    whole: int
    part: int
    parts: int


@dataclass
class Scope:
    """The dims of the variables of one jaxpr, and of the jaxprs nested in its equations."""

    ids: dict[Var, Ids] = field(default_factory=dict)
    origin: dict[Var, int] = field(default_factory=dict)
    source: dict[Var, str] = field(default_factory=dict)  # of what the batch has no part in; see trace/jaxpr/sources.py
    inner: dict[int, "Scope"] = field(default_factory=dict)


class Dims:
    """The classes found in a trace: `class_of(id)`, `of(var, scope)`, and the facts a layout reads."""

    def __init__(self, rule: Callable[[Equation], Callable[..., bool | None]]) -> None:
        self._rule = rule
        self._parent: list[int] = []
        self.size: list[int] = []
        self.top = Scope()
        self.inputs: list[tuple[int, ...]] = []
        self.unknown: collections.Counter[str] = collections.Counter()
        self.matmuls: list[Matmul] = []
        self.grouped: list[Matmul] = []  # rows by the weight of each's group, which is their one batched dim
        # Lookups in a weight: (input leaf, id of its looked-up dim, ids of the rows).
        self.tables: list[tuple[int, int, tuple[int, ...]]] = []
        self.splits: list[Split] = []
        self.cuts: list[CutDim] = []
        self.joined: list[int] = []  # dims of operands that a concatenation puts end to end
        self.packed: dict[int, int] = {}  # id -> number of equal parts it is cut into (packed q, k, v)
        self.layers: list[int] = []  # the layer dims of those stacks
        self.layer_carries: list[tuple[int, ...]] = []  # carries of the author's own scans over stacked weights
        self._factors: dict[int, tuple[int, ...]] = {}

    # -- union-find ---------------------------------------------------------------------------------------------
    def new(self, size: int) -> int:
        self._parent.append(len(self._parent))
        self.size.append(size)
        return len(self._parent) - 1

    def class_of(self, dim: int) -> int:
        """The representative of the class of one dim."""
        parent = self._parent
        while parent[dim] != dim:
            parent[dim] = parent[parent[dim]]
            dim = parent[dim]
        return dim

    def unite(self, a: int, b: int) -> None:
        """Say that `a` and `b` are the same dim (or one the major factor of the other)."""
        a, b = self.class_of(a), self.class_of(b)
        if a == b:
            return
        a, b = min(a, b), max(a, b)
        self._parent[b] = a
        factors = self._factors.pop(b, None)
        if factors is not None and a in self._factors:
            self._unite_factors(self._factors[a], factors)
        elif factors is not None:
            self._factors[a] = factors

    def unite_all(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Unite dims pairwise where their sizes agree; a size of 1 against another is broadcasting."""
        for a, b in zip(first, second, strict=True):
            if self.size[a] == self.size[b]:
                self.unite(a, b)

    def factor(self, whole: int, parts: Sequence[int]) -> None:
        """Say that dim `whole` is the row-major product of `parts`."""
        parts = tuple(p for p in parts if self.size[p] != 1)
        if len(parts) < 2:
            if parts:
                self.unite(whole, parts[0])
            return
        known = self._factors.get(self.class_of(whole))
        self.unite(whole, parts[0])
        self.splits.append(Split(whole, self.size[whole], parts[0], self.size[parts[0]], parts[1:]))
        if known is not None:
            self._unite_factors(known, parts)
        else:
            self._factors[self.class_of(whole)] = parts

    def _unite_factors(self, first: Sequence[int], second: Sequence[int]) -> None:
        if [self.size[f] for f in first] == [self.size[f] for f in second]:
            # The major factors are united already, through the whole; uniting them again would recurse.
            for a, b in zip(first[1:], second[1:], strict=True):
                self.unite(a, b)

    # -- reading a trace ----------------------------------------------------------------------------------------
    def of(self, var: Var, scope: Scope | None = None) -> tuple[int, ...]:
        """The classes of the dims of `var`."""
        ids = (scope or self.top).ids.get(var)
        return () if ids is None else tuple(map(self.class_of, ids))

    def ids_of(self, atom: Atom, scope: Scope) -> Ids:
        if isinstance(atom, Literal):
            return [self.new(size) for size in getattr(atom.aval, "shape", ())]
        if atom not in scope.ids:
            scope.ids[atom] = [self.new(size) for size in getattr(atom.aval, "shape", ())]
        return scope.ids[atom]

    def run(self, jaxpr: Jaxpr, scope: Scope) -> None:
        """Apply the rule of every equation of `jaxpr`."""
        for eqn in jaxpr.eqns:
            ins = [self.ids_of(v, scope) for v in eqn.invars]
            outs = [self.ids_of(v, scope) for v in eqn.outvars]
            if self._rule(eqn)(self, eqn, ins, outs, scope) is False:
                self.unknown[name_of(eqn)] += 1
            follow(eqn, scope.source)

    def call(
        self, jaxpr: Jaxpr, ins: Sequence[Ids], origins: Sequence[int | None], sources: Sequence[str | None]
    ) -> tuple[Scope, list[Ids]]:
        """Read a nested jaxpr with its arguments' dims given; returns its scope and its results' dims."""
        scope = Scope(ids=dict(zip(jaxpr.invars, ins, strict=True)))
        scope.origin = {v: o for v, o in zip(jaxpr.invars, origins, strict=True) if o is not None}
        scope.source = {v: s for v, s in zip(jaxpr.invars, sources, strict=True) if s is not None}
        scope.source.update(dict.fromkeys(jaxpr.constvars, GIVEN))
        self.run(jaxpr, scope)
        return scope, [self.ids_of(v, scope) for v in jaxpr.outvars]
