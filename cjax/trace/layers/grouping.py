"""Which equations of a flat trace do the same to corresponding leaves: what `vectorize` evaluates at once.

Two searches find groups. Backwards from the stored outputs: the equations that make corresponding leaves are a group if
they are alike, and so are the ones that make their operands. Forwards from the stored inputs: equations alike that read
member i of the same stacks are a group too, although what uses them (a global norm) does not keep layers apart.
"""

import collections
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.trace.jaxpr.identity import equation_key
from cjax.trace.jaxpr.primitives import name_of

Source = tuple[str, int, int]  # a stacked value: ("input", slot, 0), ("group", id, result) or ("branch", equation, n)
Node = tuple[str, int]  # what is evaluated at once: ("group", id) or ("equation", index)


@dataclass(frozen=True)
class One:
    """A value that all members share, or the only one."""

    atom: Atom


@dataclass(frozen=True)
class Whole:
    """A stacked value, as it is."""

    source: Source


@dataclass(frozen=True)
class Take:
    """Some members of a stacked value, or all in another order."""

    source: Source
    indices: tuple[int, ...]


@dataclass(frozen=True)
class StackedLeaves:
    """Values that are evaluated one by one, and stacked."""

    atoms: tuple[Atom, ...]


Operand = One | Whole | Take | StackedLeaves


class Chain(NamedTuple):
    """What reduces a stack as a chain of one primitive does its members, and the kinds of dtype of which that is so."""

    kinds: str
    reduce: Callable[..., jax.Array]


# Long chains of these over all leaves (a global norm, "is everything finite?") are reductions of stacks.
CHAINED = {
    "add": Chain("f", jnp.sum), "max": Chain("fiu", jnp.max), "min": Chain("fiu", jnp.min), "and": Chain("b", jnp.all),
    "or": Chain("b", jnp.any),
}  # fmt: skip


class Grouping:
    """Groups of like equations: `groups` by id, `member` says of which stack a variable is which member.

    Variables that are computed twice from the same operands are one (`canonical`), so that what layers share is found
    even where each of them computes it anew. `chains` are the terms that an equation and those before it add up.
    """

    def __init__(self, jaxpr: Jaxpr, in_groups: Sequence[tuple[int, ...]], out_groups: Sequence[tuple[int, ...]]):
        self.eqns: list[Equation] = list(jaxpr.eqns)
        self.groups: dict[int, tuple[int, ...]] = {}
        self.branch_outs: dict[int, list[tuple[int, ...]]] = {}
        self.member: dict[Var, tuple[Source, int]] = {}
        self.size: dict[Source, int] = {}
        self.producer: dict[Var, tuple[int, int]] = {}
        self._alias: dict[Var, Var] = {}
        self._kinds = self._share()
        for slot, group in enumerate(in_groups):
            if len(group) > 1:
                self._declare(("input", slot, 0), [jaxpr.invars[i] for i in group])
        self.outs = [tuple(self.canonical(jaxpr.outvars[i]) for i in group) for group in out_groups]
        self._search_backwards([atoms for atoms in self.outs if len(atoms) > 1])
        self._search_forwards()
        self.chains = self._search_chains()

    def canonical(self, atom: Atom) -> Atom:
        return atom if type(atom) is Literal else self._alias.get(atom, atom)

    def operands(self, index: int) -> list[Atom]:
        return [self.canonical(atom) for atom in self.eqns[index].invars]

    def resolve(self, atoms: tuple[Atom, ...]) -> Operand:
        """How the stack of `atoms` comes about, given the groups."""
        if all(atom is atoms[0] for atom in atoms) or _equal_literals(atoms):
            return One(atoms[0])
        places = [self.member.get(atom) if type(atom) is not Literal else None for atom in atoms]
        first = places[0]
        if first is None or any(place is None or place[0] != first[0] for place in places):
            return StackedLeaves(atoms)
        indices = tuple(place[1] for place in places if place is not None)
        return Whole(first[0]) if indices == tuple(range(self.size[first[0]])) else Take(first[0], indices)

    def node(self, atom: Atom) -> Node | None:
        """What has to be evaluated for a value: None for inputs and literals."""
        if type(atom) is Literal:
            return None
        if atom in self.member:
            return self.node_of(self.member[atom][0])
        return ("equation", self.producer[atom][0]) if atom in self.producer else None

    def node_of(self, source: Source) -> Node | None:
        kind, number, _ = source
        return None if kind == "input" else ("group" if kind == "group" else "equation", number)

    def dissolve(self, group: int) -> None:
        for index in self.groups.pop(group):
            for var in self.eqns[index].outvars:
                del self.member[var]

    def _share(self) -> list[int]:
        """Alias equal computations; number the kinds of equations."""
        kinds: dict[Hashable, int] = {}
        firsts: dict[Hashable, int] = {}
        numbers = []
        for index, eqn in enumerate(self.eqns):
            kind = kinds.setdefault(equation_key(eqn), len(kinds))
            numbers.append(kind)
            operands = tuple(_bits(a) if type(a) is Literal else a for a in self.operands(index))
            first = index if eqn.effects else firsts.setdefault((kind, operands), index)
            if first != index:
                self._alias.update(zip(eqn.outvars, self.eqns[first].outvars, strict=True))
            else:
                self.producer.update((var, (index, result)) for result, var in enumerate(eqn.outvars))
        return numbers

    def _declare(self, source: Source, variables: Sequence[Var]) -> None:
        self.size[source] = len(variables)
        for position, var in enumerate(variables):
            self.member[var] = source, position

    def _group(self, indices: Sequence[int]) -> None:
        number = min(indices)  # an equation is in one group at most
        self.groups[number] = tuple(indices)
        for result in range(len(self.eqns[number].outvars)):
            self._declare(("group", number, result), [self.eqns[i].outvars[result] for i in indices])

    def _search_backwards(self, demands: list[tuple[Atom, ...]]) -> None:
        seen = set()
        demands = demands[::-1]  # the last is taken first
        while demands:
            atoms = demands.pop()
            if any(type(a) is Literal or a in self.member or a not in self.producer for a in atoms) or atoms in seen:
                continue
            seen.add(atoms)
            indices, results = zip(*(self.producer[a] for a in atoms if type(a) is not Literal), strict=True)
            if len(set(results)) == len(results) and len(set(indices)) == 1:
                if name_of(self.eqns[indices[0]]) == "cond":
                    outs = self.branch_outs.setdefault(indices[0], [])
                    self._declare(("branch", indices[0], len(outs)), [a for a in atoms if type(a) is not Literal])
                    outs.append(results)
                continue
            if len(set(indices)) < len(indices) or len(set(results)) > 1:
                continue
            if len({self._kinds[i] for i in indices}) > 1 or self.eqns[indices[0]].effects:
                continue
            if any(var in self.member for i in indices for var in self.eqns[i].outvars):
                continue
            self._group(indices)
            demands.extend(reversed(list(zip(*(self.operands(i) for i in indices), strict=True))))

    def _search_forwards(self) -> None:
        """Bucket the equations left by kind and operands, member number aside; full buckets are groups."""
        buckets: dict[tuple[int, tuple[object, ...], int], dict[int, int]] = {}
        label = {var: place for var, place in self.member.items()}
        for index, eqn in enumerate(self.eqns):
            if eqn.effects or any(var in label or var not in self.producer for var in eqn.outvars):
                continue
            operands = self.operands(index)
            places = [label.get(atom) if type(atom) is not Literal else None for atom in operands]
            numbers = {place[1] for place in places if place is not None}
            if len(numbers) != 1:
                continue
            number = numbers.pop()
            parts = tuple(
                place[0] if place is not None else None if type(atom) is Literal else atom
                for atom, place in zip(operands, places, strict=True)
            )
            signature = (self._kinds[index], parts, 0)
            while number in buckets.get(signature, ()):  # the same again with another literal
                signature = (*signature[:2], signature[2] + 1)
            buckets.setdefault(signature, {})[number] = index
            for result, var in enumerate(eqn.outvars):
                label[var] = ("bucket", min(buckets[signature].values()), result), number
        for (_, parts, _), bucket in buckets.items():
            stacks = [self._found(part) for part in parts if isinstance(part, tuple)]
            if None not in stacks and len({self.size[s] for s in stacks if s}) == 1:
                if len(bucket) == self.size[stacks[0]] and len(bucket) > 1:  # type: ignore[index]
                    self._group([bucket[number] for number in range(len(bucket))])

    def _search_chains(self) -> dict[int, tuple[Atom, ...]]:
        uses = collections.Counter(
            atom
            for index, eqn in enumerate(self.eqns)
            if any(var in self.producer for var in eqn.outvars) or eqn.effects
            for atom in self.operands(index)
            if type(atom) is not Literal
        )
        uses.update(atom for atoms in self.outs for atom in atoms if type(atom) is not Literal)
        chains: dict[int, tuple[Atom, ...]] = {}
        inner: set[int] = set()
        for root in reversed(range(len(self.eqns))):
            name = name_of(self.eqns[root])
            if name not in CHAINED or root in inner:
                continue
            out = self.eqns[root].outvars[0]
            if out in self.member or out not in self.producer or out.aval.dtype.kind not in CHAINED[name].kinds:
                continue
            terms: list[Atom] = []
            pending = self.operands(root)[::-1]
            while pending:
                atom = pending.pop()
                before = self.producer.get(atom, (-1, 0))[0] if type(atom) is not Literal else -1
                alike = before >= 0 and name_of(self.eqns[before]) == name and atom.aval == out.aval
                if alike and type(atom) is not Literal and uses[atom] == 1 and atom not in self.member:
                    inner.add(before)
                    pending.extend(self.operands(before)[::-1])
                else:
                    terms.append(atom)
            chains[root] = tuple(terms)
        return chains

    def together(self, atoms: Sequence[Atom]) -> list[tuple[int, ...]]:
        """Positions of `atoms`, together where they are all members of one stack."""
        found: dict[Source, dict[int, int]] = {}
        for position, atom in enumerate(atoms):
            if type(atom) is not Literal and atom in self.member:
                source, member = self.member[atom]
                found.setdefault(source, {}).setdefault(member, position)
        groups = [
            tuple(positions[member] for member in range(self.size[source]))
            for source, positions in found.items()
            if len(positions) == self.size[source]
        ]
        grouped = {position for group in groups for position in group}
        return sorted([*groups, *((position,) for position in range(len(atoms)) if position not in grouped)])

    def _found(self, source: Source) -> Source | None:
        """The stack that a bucket has become, if it was full; buckets come in the order of their first equation."""
        if source[0] != "bucket":
            return source
        return ("group", source[1], source[2]) if source[1] in self.groups else None


def _bits(atom: Literal) -> tuple[object, bytes]:
    return atom.aval, np.asarray(atom.val, dtype=atom.aval.dtype).tobytes()


def _equal_literals(atoms: tuple[Atom, ...]) -> bool:
    if any(type(atom) is not Literal for atom in atoms):
        return False
    return len({_bits(atom) for atom in atoms if type(atom) is Literal}) == 1
