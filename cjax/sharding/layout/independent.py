"""The best set of things of which no two exclude each other: exact by variable elimination, however many there are.

Each thing has a worth, what several of them bring together is a *bonus* that counts once, and pairs exclude each other.
Things are decided one after the other, the one with the fewest neighbours first: a table says, for every choice among
its neighbours, what it is best to do with it. The tables stay small where neighbourhoods are, as the layers of a
network are chained; the number of things does not matter.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

Worth = tuple[int, ...]  # compared from the left
Table = tuple[tuple[int, ...], dict[frozenset[int], Worth]]  # its things, and what each choice among them is worth

MAX_CHOICES = 4096  # rows of a table; of a denser knot of things the least is given up


def best_set(
    worth: Mapping[int, Worth], exclusions: Iterable[Collection[int]], bonuses: Sequence[tuple[Collection[int], Worth]]
) -> list[int]:
    """The set of most worth, in the order of `worth`; that order also decides between equals.

    Args:
      worth: by thing; worths of a set add up.
      exclusions: of each of these collections one thing may be taken at most.
      bonuses: worth that is added once if any of these things is taken.

    >>> best_set({0: (3,), 1: (4,), 2: (3,)}, [(0, 1), (1, 2)], [])
    [0, 2]
    """
    order = list(worth)
    excluded = {thing: set() for thing in order}
    for group in exclusions:
        for a, b in itertools.permutations(set(group) & set(order), 2):
            excluded[a].add(b)
    # Behind what they are worth, equal sets differ by the first thing that one has and the other lacks.
    zero: Worth = (0,) * (len(next(iter(worth.values()), ())) + 1)
    tables: list[Table] = []
    for rank, thing in enumerate(order):
        tables.append(((thing,), {frozenset(): zero, frozenset([thing]): (*worth[thing], 1 << (len(order) - rank))}))
    for things, amount in bonuses:
        scope = tuple(sorted(set(things) & set(order)))
        if scope:
            tables.append((scope, {taken: (*amount, 0) if taken else zero for taken in _choices(scope, excluded)}))
    decided: list[tuple[int, tuple[int, ...], dict[frozenset[int], bool]]] = []
    left = set(order)
    while left:
        scopes = {t: _scope(t, tables, excluded) & left for t in left}
        thing = min(left, key=lambda t: (len(scopes[t]), order.index(t)))
        if len(_choices(sorted(scopes[thing]), excluded, MAX_CHOICES)) > MAX_CHOICES:
            thing = min(left, key=lambda t: (worth[t], -order.index(t)))
            tables = [_without(table, thing) for table in tables]
            left.remove(thing)
            continue
        tables, decision = _eliminate(thing, tuple(sorted(scopes[thing])), tables, excluded, zero)
        decided.append(decision)
        left.remove(thing)
    taken: set[int] = set()
    for thing, scope, decision in reversed(decided):
        if decision[frozenset(taken & set(scope))]:
            taken.add(thing)
    return [thing for thing in order if thing in taken]


def _scope(thing: int, tables: Sequence[Table], excluded: Mapping[int, set[int]]) -> set[int]:
    """What has to be known to decide `thing`."""
    near = set(excluded[thing])
    for things, _ in tables:
        if thing in things:
            near.update(things)
    return near - {thing}


def _choices(things: Sequence[int], excluded: Mapping[int, set[int]], enough: float = math.inf) -> list[frozenset[int]]:
    """All sets of `things` of which no two exclude each other; not all of them, once there are more than `enough`."""
    found: list[frozenset[int]] = [frozenset()]
    for thing in things:
        found += [taken | {thing} for taken in found if not taken & excluded[thing]]
        if len(found) > enough:
            break
    return found


def _eliminate(
    thing: int, scope: tuple[int, ...], tables: Sequence[Table], excluded: Mapping[int, set[int]], zero: Worth
) -> tuple[list[Table], tuple[int, tuple[int, ...], dict[frozenset[int], bool]]]:
    """The tables without `thing`, and whether to take it, for every choice among its neighbours."""
    here = [table for table in tables if thing in table[0]]
    rest = [table for table in tables if thing not in table[0]]
    values, decision = {}, {}
    for taken in _choices(scope, excluded):
        without = _value(taken, here, zero)
        having = None if taken & excluded[thing] else _value(taken | {thing}, here, zero)
        decision[taken] = having is not None and having > without
        values[taken] = max(without, having or without)
    return [*rest, (scope, values)], (thing, scope, decision)


def _value(taken: frozenset[int], tables: Sequence[Table], zero: Worth) -> Worth:
    total = zero
    for things, values in tables:
        row = values[taken & frozenset(things)]
        total = tuple(a + b for a, b in zip(total, row, strict=True))
    return total


def _without(table: Table, thing: int) -> Table:
    things, values = table
    if thing not in things:
        return table
    return tuple(t for t in things if t != thing), {t: v for t, v in values.items() if thing not in t}
