"""An optimizer's update as slices: what each pass over the layers makes, and what is made of all of them in between."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cjax.jax_compat.core import Literal, Var
from cjax.trace.jaxpr.groups import variables
from cjax.walk.ends import Ends
from cjax.walk.owners import Owned, Owner
from cjax.walk.slices import Read, Slice, SliceProgram, cut, share
from cjax.walk.unstack import size_of

SMALL = 64 * 1024  # bytes that a layer may give to others, or take from the outside

Places = Mapping[Var, Read]


class Refused(Exception):
    """What is read that is not there, by whom."""

    def __init__(self, var: Var, owner: Owner | None) -> None:
        super().__init__(var, owner)
        self.var, self.owner = var, owner


@dataclass(frozen=True)
class Passes:
    """Slices of an update, and what is handed from one to the next.

    Attributes:
      exports: of round and layer, what it gives to the round.
      updates: of each layer, its new row.
      joins: of each round (from 0), what is known of the outside behind it: `known`.
      outside: the outside's new values.
      programs: of a layer's slices, by ("export", round, owner) and ("update", owner).
    """

    exports: Mapping[tuple[int, Owner], Slice]
    updates: Mapping[Owner, Slice]
    joins: tuple[Slice, ...]
    known: tuple[tuple[Var, ...], ...]
    outside: Slice
    programs: Mapping[tuple[object, ...], SliceProgram]


def plan_passes(owned: Owned, ends: Ends) -> Passes:
    """Cut an update into slices.

    Raises:
      Refused: a layer needs what is large and not its own, or layers together need what is large of one.
    """
    for layers in owned.exports.values():
        for owner, read in layers.items():
            if sum(map(size_of, read)) > SMALL:
                raise Refused(max(read, key=size_of), owner)
    taken: dict[Var, None] = {}
    least = _least_bytes(owned)
    exports: dict[tuple[int, Owner], Slice] = {}
    for number, layers in owned.exports.items():
        for owner, read in layers.items():
            exports[number, owner] = cut(read, owned.made, layer_given(owned, ends.given[owner], owner, least, taken))
    updates = {
        owner: cut(outs, owned.made, layer_given(owned, ends.given[owner], owner, least, taken))
        for owner, outs in ends.outs.items()
        if owner is not None
    }
    taken.update(dict.fromkeys(atom for atom in ends.more if type(atom) is not Literal))
    # From the end: what a program reads of those before it is what these have to give.
    outside = cut(ends.outs[None], owned.made, _outside_given(owned, ends, owned.num_rounds + 1, taken))
    joins: list[Slice] = []
    known: list[tuple[Var, ...]] = []
    for number in reversed(range(owned.num_rounds + 1)):
        known.append(tuple(var for var in taken if owned.round_of[var] == number))
        joins.append(cut(known[-1], owned.made, _outside_given(owned, ends, number, taken)))
    named: dict[tuple[object, ...], Slice] = {("update", owner): piece for owner, piece in updates.items()}
    named |= {("export", *key): piece for key, piece in exports.items()}
    return Passes(exports, updates, tuple(joins[::-1]), tuple(known[::-1]), outside, share(named))


def layer_given(
    owned: Owned, places: Places, owner: Owner, least: Mapping[Var, int] | None, taken: dict[Var, None]
) -> Callable[[Var], Read | None]:
    """How a layer's slice comes by a variable: it is in its row, the outside has it (noted in `taken`), or it is made.

    Args:
      owned: whose each value is.
      places: what is in the layer's row.
      owner: the layer.
      least: of `_least_bytes`. What the outside has is made anew where less is needed for that than it has bytes, such
        as zeros and drawn numbers; with None, always.
      taken: what is read of the outside.
    """

    def given(var: Var) -> Read | None:
        if var in places:
            return places[var]
        if owned.owner[var] is not None:
            if owned.owner[var] != owner:
                raise Refused(var, owner)
            return None
        if var in owned.consts:
            return Read("const")
        is_made = var in owned.made and var not in owned.joint
        if is_made and (least is None or least[var] < size_of(var) or size_of(var) > SMALL):
            return None
        if least is None or size_of(var) > SMALL:
            raise Refused(var, owner)
        taken[var] = None
        return Read("joint")

    return given


def _least_bytes(owned: Owned) -> dict[Var, int]:
    """For each value that is made outside, the fewest bytes it can be made of: its own, or those of what it is made of.
    Numbers and constants are at hand."""
    least: dict[Var, int] = {}
    for var, eqn in owned.made.items():
        if owned.owner[var] is None:
            read = [v for v in variables(eqn) if v not in owned.consts]
            parts = sum(least.get(v, size_of(v)) for v in dict.fromkeys(read))
            least[var] = size_of(var) if var in owned.joint else min(size_of(var), parts)
    return least


def _outside_given(owned: Owned, ends: Ends, number: int, taken: dict[Var, None]) -> Callable[[Var], Read | None]:
    """How the program behind a round's pass comes by a variable: as an input, out of the pass, or from the programs
    before it, which is noted in `taken`."""
    places = ends.given[None]

    def given(var: Var) -> Read | None:
        if owned.owner[var] is not None:
            return Read("export")
        if var in owned.consts:
            return Read("const")
        if (var in taken or var in owned.joint) and owned.round_of[var] < number and var not in places:
            taken[var] = None
            return Read("joint")
        return places.get(var)

    return given


def plan_init(owned: Owned, ends: Ends) -> dict[Owner | None, Slice]:
    """Cut what makes the first state into slices: a layer's reads its own parameters and nothing else.

    Raises:
      Refused: it reads another's.
    """

    def outside(var: Var) -> Read | None:
        if owned.owner[var] is not None:
            raise Refused(var, None)
        return Read("const") if var in owned.consts else ends.given[None].get(var)

    return {
        owner: cut(
            outs, owned.made, outside if owner is None else layer_given(owned, ends.given[owner], owner, None, {})
        )
        for owner, outs in ends.outs.items()
    }
