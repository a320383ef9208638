"""Rows that are put in the order of a key, multiplied by the weight of each key, and put back: nobody sees another.

Whatever else is sorted with it, a row comes back as it would alone. So devices may each sort their own rows, and send
nothing. A trace tells: the order is a sort's, of whole numbers from zero on; what is made of rows in that order is made
row by row, and multiplied by how many rows each key has; and they come back by the order, or by its inverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.lax import GatherScatterMode

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.trace.jaxpr.along import along, is_made_by_number
from cjax.trace.jaxpr.evenly import MOST, Made, numbers_of, takes_rows
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import facts_of, goes_by_element, name_of, named
from cjax.trace.jaxpr.view import is_by_rows, literal_of

_NUMBERED = named("argmax argmin")
ROWS, PLACES, INVERSE, GONE = "rows", "places", "inverse", "gone"


@dataclass(frozen=True)
class SortedRows:
    """Equations that put rows in order, and all that looks them up or adds them up by it; by id.

    Args:
      eqns: all of them; as long as they are there, no others have their ids.
      num_keys: how many groups there are.
      sort: the equation that makes the order.
      inverses: sorts of the order, which make its inverse.
      places: of what is made of either, number by number.
      lookups: those of rows in order, and of rows put back.
      additions: of rows to what they came from.
      products: of rows in groups.
    """

    eqns: tuple[Equation, ...]
    num_keys: int
    sort: int
    inverses: frozenset[int]
    places: frozenset[int]
    lookups: frozenset[int]
    additions: frozenset[int]
    products: frozenset[int]


def sorted_rows(eqns: Sequence[Equation], results: Sequence[Atom]) -> list[SortedRows]:
    """All such rows of a list of equations.

    Args:
      eqns: a jaxpr's equations, or a layer's.
      results: variables read after the last of them.
    """
    if not any(map(is_by_rows, eqns)):
        return []
    made = {
        v: (eqn, tuple(None if isinstance(a, Literal) else a for a in eqn.invars)) for eqn in eqns for v in eqn.outvars
    }
    found = [_Follower(eqns, results, made, eqn).follow() for eqn in eqns if _is_sort(eqn, made)]
    return [each for each in found if each is not None]


class _Refused(Exception):
    """A row may see another, or its place."""


class _Follower:
    """Follows what is made of an order."""

    def __init__(self, eqns: Sequence[Equation], results: Sequence[Atom], made: Made, sort: Equation) -> None:
        self._eqns, self._results, self._made, self._sort = eqns, results, made, sort
        assert isinstance(sort.invars[0], Var)
        self._keys, self._num = _root(sort.invars[0], made), sort.invars[0].aval.shape[0]
        self._role: dict[Var, str] = {sort.outvars[0]: ROWS, sort.outvars[1]: PLACES}
        self._begins = {PLACES: sort.outvars[1]}
        self._uniform = {v for eqn in eqns if _is_uniform(eqn) for v in eqn.outvars}
        self._inverses, self._lookups, self._additions, self._products = (set[int]() for _ in range(4))
        self._places, self._found = set[int](), list[Equation]()
        self._num_keys: int | None = None

    def follow(self) -> SortedRows | None:
        """What was found; None where a row may see others."""
        if self._num > MOST or not _is_number(self._keys, self._made):
            return None
        try:
            for eqn in self._eqns[self._eqns.index(self._sort) + 1 :]:
                if any(v in self._role for v in variables(eqn)):
                    self._found.append(eqn)
                    self._role |= dict.fromkeys(eqn.outvars, role) if (role := self._made_of(eqn)) else {}
        except _Refused:
            return None
        if self._num_keys is None or any(not isinstance(v, Literal) and v in self._role for v in self._results):
            return None
        return SortedRows(
            (self._sort, *self._found),
            self._num_keys,
            id(self._sort),
            inverses=frozenset(self._inverses),
            places=frozenset(self._places),
            lookups=frozenset(self._lookups),
            additions=frozenset(self._additions),
            products=frozenset(self._products),
        )

    def _made_of(self, eqn: Equation) -> str | None:
        """What an equation that reads rows in order, or the order, makes; None for what is in no order."""
        roles = [None if isinstance(v, Literal) else self._role.get(v) for v in eqn.invars]
        if GONE in roles:
            raise _Refused
        if _is_sort(eqn, self._made) and roles == [PLACES, None] and self._counts_up(eqn.invars[0], PLACES, 1):
            self._inverses.add(id(eqn))
            self._role[eqn.outvars[0]] = GONE
            self._begins[INVERSE] = eqn.outvars[1]
            self._role[eqn.outvars[1]] = INVERSE
            return None
        if name_of(eqn) == "gather" and roles[1] in (PLACES, INVERSE):
            return self._looked_up(eqn, roles)
        if name_of(eqn) == "scatter-add":
            return self._added(eqn, roles)
        if is_by_rows(eqn):
            return self._multiplied(eqn, roles)
        places = along(eqn, 0) if eqn.outvars[0].aval.shape[:1] == (self._num,) else None
        if places is None or is_made_by_number(eqn, 0):
            raise _Refused
        for var, role, place in zip(eqn.invars, roles, places, strict=True):
            in_order = place == 0 and (isinstance(var, Literal) or role is not None or var in self._uniform)
            if not in_order and (role is not None or place is not None):
                raise _Refused
        held = {role for role in roles if role is not None}
        if len(held) > 1 or (held != {ROWS} and not _keeps_numbers(eqn)):
            raise _Refused
        if ROWS not in held:
            self._places.add(id(eqn))
        return held.pop()

    def _looked_up(self, eqn: Equation, roles: Sequence[str | None]) -> str | None:
        """Rows put in order, each as often as any other, or back."""
        looked_up, places = eqn.invars[:2]
        times = self._num // max(1, looked_up.aval.shape[0]) if looked_up.aval.shape else 0
        is_back = roles[0] == ROWS
        role = INVERSE if is_back else PLACES
        if not takes_rows(eqn) or roles[1] != role or roles[0] not in (ROWS, None) or isinstance(places, Literal):
            raise _Refused
        if is_back and times != 1 or not self._counts_up(places, role, times):
            raise _Refused
        self._lookups.add(id(eqn))
        return None if is_back else ROWS

    def _added(self, eqn: Equation, roles: Sequence[str | None]) -> str | None:
        """Rows added to what they came from."""
        numbers = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        slices = tuple(d for d in range(1, len(eqn.invars[2].aval.shape)))
        whole = numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        if roles != [None, PLACES, ROWS] or not whole or tuple(numbers.update_window_dims) != slices:
            raise _Refused
        if eqn.invars[2].aval.shape[1:] != shape[1:] or numbers.operand_batching_dims:
            raise _Refused
        if not self._counts_up(eqn.invars[1], PLACES, self._num // max(1, shape[0])):
            raise _Refused
        self._additions.add(id(eqn))
        return None

    def _multiplied(self, eqn: Equation, roles: Sequence[str | None]) -> str:
        num_keys = eqn.invars[1].aval.shape[0]
        if roles != [ROWS, None, None] or self._num_keys not in (None, num_keys):
            raise _Refused
        if not _are_counts(eqn.invars[2], self._keys, num_keys, self._made):
            raise _Refused
        self._num_keys = num_keys
        self._products.add(id(eqn))
        return ROWS

    def _counts_up(self, places: Atom, role: str, times: int) -> bool:
        """Whether places are the numbers of the order, of each so many in a row one."""
        assert isinstance(places, Var)
        first = self._begins[role]
        if not times or not _is_made_by_numbers(places, first, self._made):
            return False
        order = np.arange(self._num, dtype=first.aval.dtype)
        return np.array_equal(numbers_of(places, {first: order}, self._made).reshape(-1), order // times)


def _is_sort(eqn: Equation, made: Made) -> bool:
    """Whether this sorts numbers in a row, and tells where each was."""
    if name_of(eqn) != "sort" or len(eqn.invars) != 2 or eqn.params["num_keys"] != 1:
        return False
    keys, count = eqn.invars
    if (
        isinstance(keys, Literal)
        or isinstance(count, Literal)
        or keys.aval.ndim != 1
        or keys.aval.dtype.kind not in "iu"
    ):
        return False
    return count in made and name_of(made[count][0]) == "iota"


def _root(keys: Var, made: Made) -> Var:
    """What keys are another form of."""
    while keys in made:
        eqn, reads = made[keys]
        if len(reads) != 1 or reads[0] is None or reads[0].aval.size != keys.aval.size:
            break
        if not (facts_of(eqn).view or facts_of(eqn).same) or name_of(eqn) == "transpose":
            break
        keys = reads[0]
    return keys


def _is_number(root: Var, made: Made) -> bool:
    """Whether these are numbers from zero on, such as which of some is the largest."""
    eqn, _ = made.get(root, (None, ()))
    if eqn is None:
        return False
    return name_of(eqn) in _NUMBERED or (name_of(eqn) == "top_k" and root is eqn.outvars[1])


def _is_uniform(eqn: Equation) -> bool:
    """Whether all rows of a result are the same."""
    return name_of(eqn) == "broadcast_in_dim" and 0 not in eqn.params["broadcast_dimensions"]


def _keeps_numbers(eqn: Equation) -> bool:
    """Whether what this makes of an order can be told (`numbers_of`)."""
    return (goes_by_element(eqn) and facts_of(eqn).numpy is not None) or facts_of(eqn).view or _adds_a_dim(eqn)


def _adds_a_dim(eqn: Equation) -> bool:
    return name_of(eqn) == "broadcast_in_dim" and eqn.outvars[0].aval.size == eqn.invars[0].aval.size


def _are_counts(sizes: Atom, keys: Var, num_keys: int, made: Made) -> bool:
    """Whether these are how many of `keys` are each number, as `jnp.bincount` counts them."""
    while not isinstance(sizes, Literal) and sizes in made and name_of(made[sizes][0]) == "convert_element_type":
        (sizes,) = made[sizes][0].invars
    if isinstance(sizes, Literal) or sizes not in made or name_of(made[sizes][0]) != "scatter-add":
        return False
    eqn, _ = made[sizes]
    zeros, places, ones = eqn.invars
    numbers = eqn.params["dimension_numbers"]
    if zeros.aval.shape != (num_keys,) or numbers.inserted_window_dims != (0,) or numbers.update_window_dims:
        return False
    if not (_is_all(zeros, 0, made) and _is_all(ones, 1, made)) or isinstance(places, Literal):
        return False
    if not _is_made_by_numbers(places, keys, made):
        return False
    if eqn.params["mode"] == GatherScatterMode.CLIP:  # what has no weight would count for the last
        return False
    given = np.arange(keys.aval.size, dtype=keys.aval.dtype)
    found = numbers_of(places, {keys: given.reshape(keys.aval.shape)}, made)
    return np.array_equal(found.reshape(-1), given)


def _is_all(atom: Atom, number: int, made: Made) -> bool:
    """Whether all numbers of a value are this one."""
    eqn = None if isinstance(atom, Literal) else made.get(atom, (None,))[0]
    if eqn is None or name_of(eqn) != "broadcast_in_dim" or not isinstance(eqn.invars[0], Literal):
        return False
    return bool(np.all(literal_of(eqn, 0).val == number))


def _is_made_by_numbers(var: Var, keys: Var, made: Made) -> bool:
    """Whether a value is made of keys alone, number by number."""
    seen, left = set[Var](), [var]
    while left:
        var = left.pop()
        if var is keys or var in seen:
            continue
        seen.add(var)
        eqn, reads = made.get(var, (None, ()))
        if eqn is None or var.aval.size not in (1, keys.aval.size) or not (_keeps_numbers(eqn) or _is_uniform(eqn)):
            return False
        left += [read for read in reads if read is not None]
    return True
