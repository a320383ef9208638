"""Equations that do the same at each place of a dim: what becomes of them where the places come in another order.

An elementwise equation does, a product along a dim that it does not sum over, a lookup along its rows. Sums and
maxima over a dim do not ask for its order at all. Whatever is not known to do either looks at places across the dim.
"""

import math
from collections.abc import Callable

import numpy as np

from cjax.jax_compat.core import ClosedJaxpr, Equation
from cjax.trace.jaxpr.primitives import FACTS, facts_of, goes_by_element, name_of

Places = list[int | None]  # for each operand the dim that is the same as one of the results'; None where it has none
Rule = Callable[[Equation, int], Places | None]


def along(eqn: Equation, dim: int) -> Places | None:
    """The dims of operands whose elements, one by one, are those of dim `dim` of all results; None where an element of
    the results may be made of others, or its number matters.

    `iota` and `random_bits` are told of as if they had no number along `dim`: whoever asks has to see to it.

    >>> import jax, jax.numpy as jnp
    >>> function = lambda x, w: jax.lax.cumsum(x @ w, axis=1)
    >>> eqns = jax.make_jaxpr(function)(jnp.ones((2, 3, 4)), jnp.ones((4, 5))).jaxpr.eqns
    >>> along(eqns[0], 1), along(eqns[0], 2)
    ([1, None], [None, 1])
    >>> along(eqns[-1], 0), along(eqns[-1], 1)
    ([0], None)
    """
    facts, shape = facts_of(eqn), eqn.outvars[0].aval.shape
    if any(out.aval.shape != shape for out in eqn.outvars):
        return None
    if goes_by_element(eqn) or (facts.same and len(eqn.invars) == 1):
        shapes = [atom.aval.shape for atom in eqn.invars]
        if any(own and (len(own) != len(shape) or own[dim] not in (1, shape[dim])) for own in shapes):
            return None
        return [dim if own and own[dim] == shape[dim] else None for own in shapes]
    rule = RULES.get(name_of(eqn))
    if rule is None and facts.reduces:
        rule = _reduced
    elif rule is None and facts.cumulates:
        rule = _beside
    return None if rule is None else rule(eqn, dim)


def summed(eqn: Equation) -> list[Places]:
    """For each dim that an equation brings together in no order, where its operands have it: all in the same order."""
    if name_of(eqn) == "dot_general":
        (lhs, rhs), _ = eqn.params["dimension_numbers"]
        return [[left, right] for left, right in zip(lhs, rhs, strict=True)]
    facts = facts_of(eqn)
    return [[axis] for axis in eqn.params["axes"]] if facts.reduces and not facts.tells_place else []


def _reduced(eqn: Equation, dim: int) -> Places | None:
    axes = eqn.params["axes"]
    return [[d for d in range(len(eqn.invars[0].aval.shape)) if d not in axes][dim]]


def _beside(eqn: Equation, dim: int) -> Places | None:
    """All dims but the one that it works along."""
    return [dim] if eqn.params["axis"] != dim else None


def _broadcast(eqn: Equation, dim: int) -> Places | None:
    dims = eqn.params["broadcast_dimensions"]
    if len(eqn.invars) > 1:
        return None
    found = dims.index(dim) if dim in dims else None
    if found is not None and eqn.invars[0].aval.shape[found] != eqn.outvars[0].aval.shape[dim]:
        found = None  # one number for all places
    return [found]


def _transposed(eqn: Equation, dim: int) -> Places | None:
    return [eqn.params["permutation"][dim]]


def _squeezed(eqn: Equation, dim: int) -> Places | None:
    gone = eqn.params["dimensions"]
    return [[d for d in range(len(eqn.invars[0].aval.shape)) if d not in gone][dim]]


def _reshaped(eqn: Equation, dim: int) -> Places | None:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if len(eqn.invars) > 1 or eqn.params["dimensions"] is not None:
        return None
    same = [d for d in range(len(old)) if old[d] == new[dim] and math.prod(old[:d]) == math.prod(new[:dim])]
    return [same[0]] if len(same) == 1 else None


def _joined(eqn: Equation, dim: int) -> Places | None:
    return [dim for _ in eqn.invars] if eqn.params["dimension"] != dim else None


def _padded(eqn: Equation, dim: int) -> Places | None:
    return [dim, None] if tuple(eqn.params["padding_config"][dim]) == (0, 0, 0) else None


def _reversed(eqn: Equation, dim: int) -> Places | None:
    return [dim] if dim not in eqn.params["dimensions"] else None


def _sliced(eqn: Equation, dim: int) -> Places | None:
    """What is as long as before is all of it, if no step is taken."""
    strides = eqn.params["strides"]
    is_whole = eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[dim]
    return [dim] if is_whole and (strides is None or strides[dim] == 1) else None


def _taken(eqn: Equation, dim: int) -> Places | None:
    same = eqn.invars[0].aval.shape[dim] == eqn.outvars[0].aval.shape[dim]
    return [dim, *[None] * (len(eqn.invars) - 1)] if same else None


def _put(eqn: Equation, dim: int) -> Places | None:
    same = eqn.invars[0].aval.shape[dim] == eqn.invars[1].aval.shape[dim]
    return [dim, dim, *[None] * (len(eqn.invars) - 2)] if same else None


def _multiplied(eqn: Equation, dim: int) -> Places | None:
    contracting, batch = eqn.params["dimension_numbers"]
    if dim < len(batch[0]):
        return [batch[0][dim], batch[1][dim]]
    free: list[tuple[int, int]] = []
    for side in (0, 1):
        inner = {*contracting[side], *batch[side]}
        free += [(side, d) for d in range(len(eqn.invars[side].aval.shape)) if d not in inner]
    found: Places = [None, None]
    side, place = free[dim - len(batch[0])]
    found[side] = place
    return found


def _looked_up(eqn: Equation, dim: int) -> Places | None:
    """Along rows of indices, and what has the same rows in the operand; along dims of it that are taken whole."""
    numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    if dim not in numbers.offset_dims:
        row = [d for d in range(len(eqn.outvars[0].aval.shape)) if d not in numbers.offset_dims].index(dim)
        batched = numbers.start_indices_batching_dims
        return [numbers.operand_batching_dims[batched.index(row)] if row in batched else None, row]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    place = [d for d in range(len(operand)) if d not in gone][numbers.offset_dims.index(dim)]
    is_whole = eqn.params["slice_sizes"][place] == operand[place]
    return [place, None] if is_whole and place not in numbers.start_index_map else None


def _made(eqn: Equation, dim: int) -> Places | None:
    return [None for _ in eqn.invars]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast, "transpose": _transposed, "squeeze": _squeezed, "reshape": _reshaped,
    "concatenate": _joined, "pad": _padded, "rev": _reversed, "slice": _sliced, "dynamic_slice": _taken,
    "dynamic_update_slice": _put, "split": _beside, "dot_general": _multiplied, "gather": _looked_up, "iota": _made,
    "random_bits": _made,
}  # fmt: skip
assert RULES.keys() <= FACTS.keys()


def is_made_by_number(eqn: Equation, dim: int) -> bool:
    """Whether an element along a dim of the result is made of its number there, and of nothing else that has it."""
    return (name_of(eqn) == "iota" and eqn.params["dimension"] == dim) or name_of(eqn) == "random_bits"


def goes_by_elements(closed: ClosedJaxpr) -> bool:
    """Whether each element of a trace's results is made of the elements at its place, and of numbers."""
    numbers = all(np.ndim(const) == 0 for const in closed.consts)
    return numbers and all(
        goes_by_element(eqn) or (name_of(eqn) == "broadcast_in_dim" and eqn.invars[0].aval.shape == ())
        for eqn in closed.jaxpr.eqns
    )
