"""Products that leave a part of their result on every device, and what may be done before the parts are added up.

Where a product sums over a dim that the tensor axis splits, XLA reduces its result there and then. What is linear in it
may as well be done with the parts: where each of eight experts' results is weighed and added to the others', the sum is
all that has to be reduced, and of the gradients of the weights, which sum over features, next to nothing.

Where attention and feed-forward part read one input and are added to it and to their biases (Wang and Komatsuzaki,
GPT-J, 2021; Chowdhery et al., PaLM, 2022), the two products are added first, and reduced once in place of twice; then
what every device has whole is added, in the author's order.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.layout import Layout
from cjax.sharding.layout.shards import OF_SHARDS, OwnShards
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.groups import Group, make_group, variables, waits_for_itself
from cjax.trace.jaxpr.primitives import facts_of, name_of, named
from cjax.trace.jaxpr.view import is_by_rows

# The backward pass makes the parts of most products again, so at least this share of what would be reduced has to be
# saved.
MOST = 0.75
_SUMS = named("add add_any")


@dataclass(frozen=True)
class Late:
    """Equations of whose results devices have parts, over the tensor axis.

    Args:
      parts: the variables that are such results.
      sums: the equations that add them to each other and to what devices have whole, where it is products whose results
        are reduced; none where only results of the group are.
      fed: what is looked up in weights that devices have whole, to be added to parts: by one device of them all.
    """

    parts: frozenset[Var]
    sums: tuple[Equation, ...] = ()
    fed: frozenset[Var] = frozenset()


class LateSums:
    """Finds products, with what is linear in them, of which less is reduced at the end than there and then."""

    def __init__(self, dims: Dims, layout: Layout) -> None:
        self._grid, self.shards = layout.grid, OwnShards(dims, layout)
        self._size = layout.axis_sizes.get(TENSOR, 1)

    def find(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, others: Sequence[Group[Any]]
    ) -> list[Group[Late]]:
        """Groups of such equations.

        Args:
          eqns: a jaxpr's equations, or a layer's.
          results: variables read after the last of them.
          scope: the dims of their variables.
          others: groups of other equations.
        """
        if self._size == 1 or self._grid is not None:
            return []
        taken = {id(eqn) for group in others for eqn in group.eqns}
        zeros = {eqn.outvars[0] for eqn in eqns if _is_zero(eqn)}
        sums, biases, fed = _Together(), self._biases(eqns, results, scope, taken), set[Var]()
        for eqn in eqns:
            if id(eqn) in taken or name_of(eqn) not in OF_SHARDS:
                continue
            read = [v for v in variables(eqn) if v in sums.of]
            is_part = self._is_linear(eqn, {*read}, zeros, scope) if read else self._is_product(eqn, scope)
            added = [v for v in variables(eqn) if v in biases] if len(read) == 1 and name_of(eqn) in _SUMS else []
            if (is_part or added) and self.shards.in_place(eqn, scope):
                sums.add(eqn, eqn.outvars[0], read)
                for var in added:
                    sums.add(biases[var], var, read)
                fed.update(added)
        found: list[Group[Late]] = []
        for members in sums.members():
            parts = frozenset(eqn.outvars[0] for eqn in members) - fed
            group = make_group(members, eqns, results, Late(parts, fed=frozenset(fed)))
            made = sum(_num_bytes(eqn.outvars[0]) for eqn in members if parts.isdisjoint(variables(eqn)))
            if group is None or sum(map(_num_bytes, group.outs)) > MOST * made:
                continue
            if not waits_for_itself(group, eqns, [*others, *found]):
                found.append(group)
        taken |= {id(eqn) for group in found for eqn in group.eqns}
        for products, added in self._added(eqns, results, scope, taken):
            late = Late(frozenset(eqn.outvars[0] for eqn in products), tuple(added))
            group = make_group([*products, *added], eqns, results, late)
            if group is not None and not waits_for_itself(group, eqns, [*others, *found]):
                found.append(group)
        return found

    def _biases(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, taken: Set[int]
    ) -> dict[Var, Equation]:
        """What is looked up in weights and read once, such as each row's expert's bias."""
        reads = Counter(v for eqn in eqns for v in variables(eqn))
        reads.update(v for v in results if not isinstance(v, Literal))
        lookups = [eqn for eqn in eqns if name_of(eqn) == "gather" and id(eqn) not in taken]
        return {
            eqn.outvars[0]: eqn
            for eqn in lookups
            if eqn.invars[0] in scope.origin and reads[eqn.outvars[0]] == 1 and self.shards.in_place(eqn, scope)
        }

    def _added(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, taken: Set[int]
    ) -> Iterator[tuple[list[Equation], list[Equation]]]:
        """Products, two or more, and the equations that add them up; of both, nobody else reads any but the last."""
        makers = {eqn.outvars[0]: eqn for eqn in eqns if eqn.outvars and id(eqn) not in taken}
        reads = Counter(v for eqn in eqns for v in variables(eqn))
        reads.update(v for v in results if not isinstance(v, Literal))
        inner: set[int] = set()  # sums that another sum reads
        for eqn in reversed(eqns):
            if id(eqn) in inner or id(eqn) in taken or not _is_sum(eqn):
                continue
            added, products, left = [eqn], list[Equation](), list(variables(eqn))
            while left:
                maker = makers.get(var := left.pop())
                if maker is None or reads[var] > 1 or var.aval.shape != eqn.outvars[0].aval.shape:
                    continue
                if _is_sum(maker):
                    inner.add(id(maker))
                    added.append(maker)
                    left += variables(maker)
                elif self._is_product(maker, scope) and not is_by_rows(maker) and self.shards.in_place(maker, scope):
                    products.append(maker)
            if len(products) > 1:
                yield products, [each for each in eqns if any(each is one for one in added)]

    def _is_product(self, eqn: Equation, scope: Scope) -> bool:
        return _is_real(eqn.outvars[0]) and self.shards.is_product(eqn, scope)

    def _is_linear(self, eqn: Equation, parts: set[Var], zeros: set[Var], scope: Scope) -> bool:
        """Whether this of every device's part gives its part of the result; every device has the same part of zero."""
        facts = facts_of(eqn)
        if is_by_rows(eqn):  # each is a product of its own
            return False
        places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in parts]
        if not all(map(_is_real, (*eqn.outvars, *parts))):
            return False
        # An author who rounds a sum wants it summed first.
        if any(v.aval.dtype.itemsize > eqn.outvars[0].aval.dtype.itemsize for v in parts):
            return False
        others = [v for i, v in enumerate(eqn.invars) if i not in places]
        if facts.linear:
            return all(not isinstance(v, Literal) and v in zeros for v in others)
        if facts.linear_with:
            return places == [2] and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in zeros
        whole = all(TENSOR not in axes for v in others for axes in self.shards.entries(v, scope))
        return len(places) == 1 and places[0] in facts.linear_in and whole


class _Together:
    """Equations that read each other's results, in sets."""

    def __init__(self) -> None:
        self.of: dict[Var, int] = {}
        self._eqns: dict[int, list[Equation]] = {}
        self._next = 0

    def add(self, eqn: Equation, out: Var, read: Sequence[Var]) -> None:
        """`eqn` is of one set with all that made what it reads."""
        first, *rest = sorted({self.of[var] for var in read}) or [self._next]
        self._next += not read
        for other in rest:
            self._eqns[first] += self._eqns.pop(other)
        self.of = {var: first if number in rest else number for var, number in self.of.items()} if rest else self.of
        self._eqns.setdefault(first, []).append(eqn)
        self.of[out] = first

    def members(self) -> list[list[Equation]]:
        return list(self._eqns.values())


def _is_zero(eqn: Equation) -> bool:
    """Whether an equation makes zeros, as authors begin sums with."""
    value = eqn.invars[0] if len(eqn.invars) == 1 else None
    return name_of(eqn) == "broadcast_in_dim" and isinstance(value, Literal) and not np.any(value.val)


def _is_sum(eqn: Equation) -> bool:
    return name_of(eqn) in _SUMS and len(variables(eqn)) == 2 and _is_real(eqn.outvars[0])


def _is_real(var: Atom) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating)


def _num_bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * np.dtype(var.aval.dtype).itemsize
