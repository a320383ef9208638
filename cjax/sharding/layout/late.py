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
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.groups import Group, make_group, variables, waits_for_itself
from cjax.trace.jaxpr.primitives import facts_of, name_of, named

# The backward pass makes the parts again, so at least this share of what would be reduced has to be saved.
MOST = 0.75
# What is the same of a device's own shards, whose shapes are others than the trace says.
_SUMS = named("add add_any")
_OF_SHARDS = named("add sub add_any neg mul div convert_element_type transpose squeeze reduce_sum dot_general")


@dataclass(frozen=True)
class Late:
    """Equations of whose results devices have parts, over the tensor axis.

    Args:
      parts: the variables that are such results.
      sums: the equations that add them to each other and to what devices have whole, where it is products whose results
        are reduced; none where only results of the group are.
    """

    parts: frozenset[Var]
    sums: tuple[Equation, ...] = ()


class LateSums:
    """Finds products, with what is linear in them, of which less is reduced at the end than there and then."""

    def __init__(self, dims: Dims, layout: Layout) -> None:
        self._dims, self._layout = dims, layout
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
        if self._size == 1 or self._layout.grid is not None:
            return []
        taken = {id(eqn) for group in others for eqn in group.eqns}
        zeros = {eqn.outvars[0] for eqn in eqns if _is_zero(eqn)}
        sums = _Together()
        for eqn in eqns:
            if id(eqn) in taken or name_of(eqn) not in _OF_SHARDS:
                continue
            read = [v for v in variables(eqn) if v in sums.of]
            is_part = self._is_linear(eqn, {*read}, zeros, scope) if read else self._is_product(eqn, scope)
            if is_part and self._in_place(eqn, scope):
                sums.add(eqn, eqn.outvars[0], read)
        found: list[Group[Late]] = []
        for members in sums.members():
            parts = frozenset(eqn.outvars[0] for eqn in members)
            group = make_group(members, eqns, results, Late(parts))
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
                elif self._is_product(maker, scope) and self._in_place(maker, scope):
                    products.append(maker)
            if len(products) > 1:
                yield products, [each for each in eqns if any(each is one for one in added)]

    def entries(self, var: Atom, scope: Scope) -> list[tuple[str, ...]]:
        """For each dim of a value, the axes that split it."""
        if isinstance(var, Literal):
            return [()] * len(np.shape(var.val))
        spec = self._layout.spec(self._dims.of(var, scope), var.aval.shape)
        return [tuple(a for a in axes_of_entry(entry) if self._layout.axis_sizes.get(a, 1) > 1) for entry in spec]

    def _in_place(self, eqn: Equation, scope: Scope) -> bool:
        """Whether devices' shards of the operands give their shards of the result, or parts of them."""
        out, ins = eqn.outvars[0], [self.entries(v, scope) for v in eqn.invars]
        made, params = self.entries(out, scope), eqn.params
        if not all(self._is_even(v, entries) for v, entries in zip((*eqn.invars, out), (*ins, made), strict=True)):
            return False
        if any(TENSOR in axes for axes in made):
            return False
        match name_of(eqn):
            case "dot_general":
                contracted, batched = params["dimension_numbers"]
                both = [[entries[d] for d in dims] for entries, dims in zip(ins, batched, strict=True)]
                free = [
                    axes for entries, *bound in zip(ins, contracted, batched, strict=True)
                    for d, axes in enumerate(entries) if d not in {*bound[0], *bound[1]}
                ]  # fmt: skip
                summed = {a for entries, dims in zip(ins, contracted, strict=True) for d in dims for a in entries[d]}
                return both[0] == both[1] and made == [*both[0], *free] and summed <= {TENSOR}
            case "reduce_sum":
                gone = params["axes"]
                return made == [x for d, x in enumerate(ins[0]) if d not in gone] and not any(ins[0][d] for d in gone)
            case "squeeze":
                return made == [x for d, x in enumerate(ins[0]) if d not in params["dimensions"]]
            case "transpose":
                return made == [ins[0][d] for d in params["permutation"]]
        return all(entries in ([], made) for entries in ins)

    def _is_even(self, var: Atom, entries: Sequence[tuple[str, ...]]) -> bool:
        sizes, shape = self._layout.axis_sizes, np.shape(var.val) if isinstance(var, Literal) else var.aval.shape
        return all(n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, entries, strict=True))

    def _is_product(self, eqn: Equation, scope: Scope) -> bool:
        """Whether this sums over a dim of which devices have parts."""
        if name_of(eqn) != "dot_general" or not _is_real(eqn.outvars[0]):
            return False
        contracted, _ = eqn.params["dimension_numbers"]
        sides = [self.entries(v, scope) for v in eqn.invars]
        found = [[TENSOR in entries[d] for d in dims] for entries, dims in zip(sides, contracted, strict=True)]
        return found[0] == found[1] and any(found[0])

    def _is_linear(self, eqn: Equation, parts: set[Var], zeros: set[Var], scope: Scope) -> bool:
        """Whether this of every device's part gives its part of the result; every device has the same part of zero."""
        facts = facts_of(eqn)
        places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in parts]
        if not all(map(_is_real, (*eqn.outvars, *parts))):
            return False
        # An author who rounds a sum wants it summed first.
        if any(v.aval.dtype.itemsize > eqn.outvars[0].aval.dtype.itemsize for v in parts):
            return False
        others = [v for i, v in enumerate(eqn.invars) if i not in places]
        if facts.linear:
            return all(not isinstance(v, Literal) and v in zeros for v in others)
        whole = all(TENSOR not in axes for v in others for axes in self.entries(v, scope))
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
