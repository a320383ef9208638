"""Dims of a score matrix, followed through the equations around it.

A *label* is a dim of the matrix of scores. A dim of another variable is some labels, major first: one where it is that
dim, several where heads and their groups are merged, none where it is of size 1 or no dim of the matrix. With labels
known, an equation can be evaluated on a block of the matrix: the shapes in its parameters follow from them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from cjax.jax_compat.core import Equation, Var
from cjax.trace.jaxpr.primitives import facts_of, goes_by_element, having, name_of, named

Labels = tuple[tuple[int, ...], ...]


class Node(NamedTuple):
    """A variable as one equation reads it: positions counted once serve as those of queries and of keys."""

    var: Var
    labels: Labels


MOVES = having("view")
# On a block these are made for the global places of its elements, so that each position counts, and is dropped, as in
# the whole.
MAKES = named("iota random_bits")  # out of nothing but its shape (and a key)


def is_form(eqn: Equation) -> bool:
    """Whether a result is its operand in another form, and so are their gradients: none is stopped, or cut to whole
    numbers."""
    if name_of(eqn) not in MOVES or facts_of(eqn).stops:
        return False
    old, new = (jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in (eqn.invars[0], eqn.outvars[0]))
    return new or not old


def outgoing(eqn: Equation, ins: Mapping[int, Labels], sizes: Mapping[int, int]) -> Labels | None:
    """Labels of an equation's result from those of some operands (by position), or None if they can't be followed."""
    name, shape = name_of(eqn), eqn.outvars[0].aval.shape
    if goes_by_element(eqn):
        found: list[tuple[int, ...]] = [()] * len(shape)
        for place, labels in ins.items():
            for dim, (label, size) in enumerate(zip(labels, eqn.invars[place].aval.shape, strict=True)):
                # A dim of size 1 that is broadcast is the same for all positions: it has no label to hand on.
                if label and size == shape[dim]:
                    # Query i meets key i in one dim (`scores + scores.T`): no block of the result is one of the scores.
                    if found[dim] not in ((), label):
                        return None
                    found[dim] = label
        return tuple(found)
    if list(ins) != [0]:
        return None
    labels, before = ins[0], eqn.invars[0].aval.shape
    if name == "broadcast_in_dim":
        found = [()] * len(shape)
        for dim, place in enumerate(eqn.params["broadcast_dimensions"]):
            found[place] = labels[dim]
        return tuple(found)
    if name == "transpose":
        return tuple(labels[i] for i in eqn.params["permutation"])
    if name == "squeeze":
        return tuple(label for dim, label in enumerate(labels) if dim not in eqn.params["dimensions"])
    if name == "reshape":
        return _regroup(labels, before, shape, sizes)
    return None


def incoming(eqn: Equation, labels: Labels, sizes: Mapping[int, int]) -> list[Labels] | None:
    """Labels of each operand from those of the result, or None where the equation can't be evaluated on a block."""
    name, shape = name_of(eqn), eqn.outvars[0].aval.shape
    shapes = [atom.aval.shape for atom in eqn.invars]
    if goes_by_element(eqn):
        if any(before and len(before) != len(shape) for before in shapes):
            return None
        return [
            tuple(label if size == whole else () for label, size, whole in zip(labels, before, shape, strict=False))
            for before in shapes
        ]
    if name in MAKES and all(not before for before in shapes):
        return [()] * len(shapes)
    # Whatever else has several operands does more than move elements, and on a block its parameters would mean
    # something else.
    if len(shapes) != 1:
        return None
    (before,) = shapes
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
        return [tuple(labels[p] if before[d] == shape[p] else () for d, p in enumerate(places))]
    if name == "transpose":
        order = eqn.params["permutation"]
        return [tuple(labels[order.index(dim)] for dim in range(len(before)))]
    if name == "squeeze":
        rest = iter(labels)
        return [tuple(() if dim in eqn.params["dimensions"] else next(rest) for dim in range(len(before)))]
    if name == "reshape":
        found = _regroup(labels, shape, before, sizes)
        return None if found is None else [found]
    return None


def _regroup(labels: Labels, before: Sequence[int], after: Sequence[int], sizes: Mapping[int, int]) -> Labels | None:
    """Labels after a reshape, if it splits no label."""
    parts = []
    for label, size in zip(labels, before, strict=True):
        if math.prod(sizes[one] for one in label) == size:
            parts += label
        elif size != 1:
            return None  # a dim of another kind moves along
    rest = iter(parts)
    found = []
    for size in after:
        taken: tuple[int, ...] = ()
        while math.prod(sizes[one] for one in taken) < size:
            one = next(rest, None)
            if one is None:
                return None
            taken += (one,)
        if math.prod(sizes[one] for one in taken) != size:
            return None
        found.append(taken)
    return tuple(found)
