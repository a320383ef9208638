"""Lookups that find every row equally often: tokens put in another order, once each or once for each expert of theirs.

Where a lookup's gradient would be scattered and added up, such a lookup's rows can be found again in turn, and summed
as they lie: no zeros are written first, and nothing is added in an order that changes from run to run. A trace says
that a lookup is one: its places are made, number by number, of where a sort has put each of a range, and of nothing
else. Then each of these numbers is there once, and what is made of them is counted.
"""

import math
from collections.abc import Mapping

import numpy as np

from cjax.jax_compat.core import Equation, Jaxpr, Literal, Var, jaxprs_in_params
from cjax.trace.jaxpr.evaluate import Step, demanded, evaluate
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.view import literal_of

MOST = 2**22  # rows: of more, making them numbers here would take longer than is saved
_ORDERS = ("sort", "rev")
Made = Mapping[Var, tuple[Equation, tuple[Var | None, ...]]]


def found_evenly(jaxpr: Jaxpr) -> dict[int, int]:
    """How often each row is found, by the id of the equation that looks them up, at every depth.

    >>> import jax, jax.numpy as jnp
    >>> from cjax.trace.jaxpr.simplify import simplify
    >>> twice = lambda x, key: x[jnp.argsort(key) // 2]
    >>> closed = simplify(jax.make_jaxpr(twice)(jnp.ones((4, 3)), jnp.ones(8)))
    >>> list(found_evenly(closed.jaxpr).values())
    [2]
    """
    made: dict[Var, tuple[Equation, tuple[Var | None, ...]]] = {}
    found: dict[int, int] = {}
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            found |= found_evenly(inner)
        reads = tuple(None if isinstance(var, Literal) else var for var in eqn.invars)
        made |= dict.fromkeys(eqn.outvars, (eqn, reads))
        if takes_rows(eqn) and reads[1] is not None:
            times = _times(reads[1], eqn.invars[0].aval.shape[0], made)
            found |= {} if times is None else {id(eqn): times}
    return found


def takes_rows(eqn: Equation) -> bool:
    """Whether a gather looks up whole rows, its places in front of what it finds."""
    if name_of(eqn) != "gather":
        return False
    numbers, (rows, places) = eqn.params["dimension_numbers"], (var.aval.shape for var in eqn.invars)
    return (
        len(rows) > 0
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *rows[1:])
        and tuple(numbers.offset_dims) == tuple(range(len(places) - 1, len(places) + len(rows) - 2))
    )


def _times(places: Var, num_rows: int, made: Made) -> int | None:
    """How often each row is among `places`, if all are equally often."""
    size = math.prod(places.aval.shape)
    if not 0 < num_rows <= size <= MOST or size % num_rows:
        return None
    order = _order_of(places, made)
    if order is None:
        return None
    values = numbers_of(places, {order: np.arange(size, dtype=order.aval.dtype)}, made)
    count = np.bincount(np.clip(values.reshape(-1), -1, num_rows) + 1, minlength=num_rows + 2)
    return size // num_rows if (count[1:-1] == size // num_rows).all() else None


def numbers_of(var: Var, known: Mapping[Var, np.ndarray], made: Made) -> np.ndarray:
    """The numbers of a variable that is made of known ones, number by number.

    Args:
      var: the variable.
      known: the numbers of variables.
      made: the equation that makes a variable, and what it reads.
    """
    values = dict(known)

    def apply(step: Step[Equation, Var], ins: list[np.ndarray]) -> list[np.ndarray]:
        aval, arithmetic = step.of.outvars[0].aval, facts_of(step.of).numpy
        # What is no arithmetic gives the same numbers another shape, or the same number to all.
        found = np.broadcast_to(ins[0].reshape(-1), aval.size) if arithmetic is None else arithmetic(*ins)
        return [np.asarray(found).reshape(aval.shape).astype(aval.dtype)]

    literal = lambda eqn, at: np.asarray(literal_of(eqn, at).val)  # noqa: E731
    evaluate(demanded(var, made, values), values.__getitem__, values.update, literal, apply)
    return values[var]


def _order_of(places: Var, made: Made) -> Var | None:
    """The order that each of these numbers is made of, by itself and nothing else; None if they are made otherwise."""
    orders, seen, todo = set[Var](), set[Var](), [places]
    while todo:
        var = todo.pop()
        if var in seen:
            continue
        seen.add(var)
        eqn, reads = made.get(var, (None, ()))
        if eqn is None or not _is_by_number(eqn, places.aval.size):
            return None
        if _is_order(eqn, var, made):
            orders.add(var)
        elif name_of(eqn) in _ORDERS:
            return None
        else:
            todo.extend(read for read in reads if read is not None)
    # Of two of them, number by number, any pairs of numbers are made.
    return orders.pop() if len(orders) == 1 else None


def _is_by_number(eqn: Equation, size: int) -> bool:
    """Whether a result has a number for each of an operand's, in their order; of a sort, that is for `_is_order`."""
    if any(var.aval.size not in (1, size) for var in (*eqn.invars, *eqn.outvars)):
        return False
    facts, name = facts_of(eqn), name_of(eqn)
    return name in _ORDERS or facts.numpy is not None or (facts.view and name != "transpose")


def _is_order(eqn: Equation, var: Var, made: Made) -> bool:
    """Whether a result is where a sort has put each number of a range, from the first or from the last on."""
    eqn, var = _turned_back(eqn, var, made)
    if var.aval.ndim != 1 or name_of(eqn) != "sort":
        return False
    read = eqn.invars[eqn.outvars.index(var)]
    if isinstance(read, Literal) or read not in made:
        return False
    return name_of(_turned_back(made[read][0], read, made)[0]) == "iota"


def _turned_back(eqn: Equation, var: Var, made: Made) -> tuple[Equation, Var]:
    """What was turned round to become this result, and the equation that made it."""
    while name_of(eqn) == "rev":
        below = eqn.invars[0]
        if isinstance(below, Literal) or below not in made:
            break
        var, eqn = below, made[below][0]
    return eqn, var
