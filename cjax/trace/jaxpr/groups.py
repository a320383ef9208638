"""Groups of equations that are evaluated as one: matmuls that share an input, an attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax

from cjax.jax_compat.core import Atom, Equation, Literal, Var

# Literals that differ from layer to layer, by equation (its id) and operand: an array in the place of a number.
Changed = Mapping[tuple[int, int], jax.Array]


Of = TypeVar("Of", covariant=True)


@dataclass(frozen=True)
class Group(Generic[Of]):
    """Equations evaluated as one.

    Args:
      eqns: its equations, in order; none of them depends on the group by way of an equation outside of it.
      ins: the variables that they read and do not write.
      outs: the variables that they write and others read.
      of: what whoever made the group knows about it.
    """

    eqns: tuple[Equation, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    of: Of


def make_group(
    members: Sequence[Equation], eqns: Sequence[Equation], results: Sequence[Atom], of: Of
) -> Group[Of] | None:
    """The group of `members` among `eqns`, or None if they can't be evaluated at once.

    Args:
      members: equations out of `eqns`.
      eqns: the jaxpr's equations, or a layer's.
      results: variables read after the last of `eqns`.
      of: kept with the group.
    """
    inside = {id(eqn) for eqn in members}
    members = [eqn for eqn in eqns if id(eqn) in inside]
    written = {var for eqn in members for var in eqn.outvars}
    ins = dict.fromkeys(v for eqn in members for v in variables(eqn) if v not in written)
    read = {v for v in results if not isinstance(v, Literal)}
    after: set[Var] = set()  # variables that depend on the group, outside of it
    for eqn in eqns:
        if id(eqn) in inside:
            if after & {v for v in variables(eqn) if v not in written}:
                return None
            continue
        if any(v in written or v in after for v in variables(eqn)):
            after.update(eqn.outvars)
        read.update(variables(eqn))
    outs = tuple(var for eqn in members for var in eqn.outvars if var in read)
    return Group(tuple(members), tuple(ins), outs, of)


def waits_for_itself(group: Group[Of], eqns: Sequence[Equation], others: Sequence[Group[Of]]) -> bool:
    """Whether what a group reads depends on it once others are evaluated at once as well: of two groups, each may have
    an equation that reads what one of the other's writes, and neither could come first.

    Args:
      group: of `eqns`.
      eqns: the jaxpr's equations, or a layer's.
      others: groups of others of `eqns`.
    """
    group_of = {id(eqn): other for other in (*others, group) for eqn in other.eqns}
    writer = {var: eqn for eqn in eqns for var in eqn.outvars}
    left, seen = list(group.ins), set[int]()
    while left:
        eqn = writer.get(left.pop())
        if eqn is None:
            continue
        item = group_of.get(id(eqn), eqn)
        if item is group:
            return True
        if id(item) not in seen:
            seen.add(id(item))
            left += item.ins if isinstance(item, Group) else variables(item)
    return False


def variables(eqn: Equation) -> list[Var]:
    """The variables that an equation reads."""
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def arrange(eqns: Sequence[Equation], groups: Sequence[Group[Of]]) -> list[Equation | Group[Of]]:
    """Equations and groups in an order in which each comes after what it reads; equations keep theirs where they can.

    A group comes where its first equation stood, and what the rest of it reads is moved before it.
    """
    if not groups:
        return list(eqns)
    group_of = {id(eqn): group for group in groups for eqn in group.eqns}
    writer = {var: eqn for eqn in eqns for var in eqn.outvars}
    done: set[int] = set()
    order: list[Equation | Group[Of]] = []

    def place(eqn: Equation) -> None:
        item = group_of.get(id(eqn), eqn)
        if id(item) in done:
            return
        done.add(id(item))
        for var in item.ins if isinstance(item, Group) else variables(item):
            if var in writer:
                place(writer[var])
        order.append(item)

    for eqn in eqns:
        place(eqn)
    return order
