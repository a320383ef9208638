"""Which inputs of a trace index a table, and how large it is: so that a token outside the vocabulary, or a label that
is no class, is named before it turns into NaN or a wrong row on the devices."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from jax import lax

from cjax.jax_compat.core import ClosedJaxpr, Equation, Jaxpr, Literal, Var, jaxprs_in_params
from cjax.trace.dims.parts import Taken, parts_of
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named
from cjax.trace.jaxpr.view import is_scan, opened, scan_of

PASSES = having("view") | having("takes") | named("pad")  # an index stays the index that it is
COMPARES = named("eq ne lt ge")
# Comparisons of an input with a number that tell negative ones from the rest, by the largest number that does.
TELL_NEGATIVE = {"lt": 1, "ge": 1, "gt": 0, "le": 0}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an index may be: `least` <= index < `size`, or one of `others`, which something else replaces.

    Attributes:
      size: of the smallest table.
      low: the least that the lookup itself takes. NumPy's rule counts negative numbers from the table's end.
      others: numbers outside of that which something else replaces, or that the author tells apart elsewhere.
      tells_negative: whether the author tells negative numbers from others somewhere, as a mask of labels does.
      part: of the input, of which this is true: the columns of an array may each have a table of their own. None: all.
    """

    size: int
    low: int
    others: frozenset[int] = frozenset()
    tells_negative: bool = False
    part: Taken | None = None

    @property
    def least(self) -> int:
        """The least that is meant. A table's last rows are no one's token -1: where nothing in the loss looks for
        negative numbers, one is a mistake, and would read a wrong row."""
        return 0 if -self.size <= self.low < 0 and not self.tells_negative else self.low

    def join(self, other: "Limits") -> "Limits":
        """What satisfies two lookups of the same part."""
        return Limits(min(self.size, other.size), max(self.low, other.low), self.others & other.others, part=self.part)


@dataclasses.dataclass(frozen=True)
class _Index:
    """An input's own values; `shifted` if a number was added to them, which is another index, unless NumPy's rule for
    negative ones chooses between the two."""

    input: int
    part: Taken
    shifted: bool = False
    others: frozenset[int] = frozenset()
    for_negative: int | None = None

    def limits(self, size: int) -> Limits:
        low = -size
        if self.for_negative is not None:
            low = -(2**63) if 0 <= self.for_negative < size else 0
        return Limits(size, low, self.others, part=None if self.part.is_all else self.part)


@dataclasses.dataclass(frozen=True)
class _Compared:
    """Where an input's values are equal to a number, or less than it; or not, if `negated`."""

    input: int
    part: Taken
    less: bool
    number: int
    negated: bool
    tells_negative: bool = False
    or_equal: bool = False  # less than or equal to it


_NO_PART = Taken(None, ())
Known = _Index | _Compared | int | None  # of a variable; a number is a constant


_Found = dict[int, dict[tuple[object, ...] | None, Limits]]  # of an input, by what it has of each dim; None: not known


def index_limits(closed: ClosedJaxpr, inputs: Sequence[int]) -> dict[int, tuple[Limits, ...]]:
    """For each of `inputs` that is looked up unchanged, the size of the smallest table it is looked up in: one for all
    of it, or for each part that has a table of its own.

    A lookup whose author asks for indices to be clipped takes any. An index that is first compared with a number and
    then replaced, as a label of -100 often is, may be that number; loops over an input are followed. Where it is not
    known which part of an input a lookup takes, the largest of all the input's tables is the limit of all of it.

    Args:
      closed: a flat trace.
      inputs: positions among its inputs, of integer arrays.

    >>> import jax, jax.numpy as jnp
    >>> [found] = index_limits(jax.make_jaxpr(lambda t, i: t[i])(jnp.ones(7), jnp.zeros(3, int)), [1])[1]
    >>> found.size, found.low
    (7, -7)
    """
    found: _Found = defaultdict(dict)
    told: set[_Compared] = set()
    starts = {i: closed.jaxpr.invars[i] for i in inputs}
    _walk(closed.jaxpr, {var: _Index(i, Taken.all_of(len(var.aval.shape))) for i, var in starts.items()}, found, told)
    limits: dict[int, tuple[Limits, ...]] = {}
    for i, by_part in found.items():
        said = [each for each in told if each.input == i]
        limits[i] = tuple(_as_told(_loosest(by_part) if at is None else one, said) for at, one in by_part.items())
    return limits


def _loosest(by_part: dict[tuple[object, ...] | None, Limits]) -> Limits:
    """What no lookup of any part takes is outside, wherever it is."""
    every = by_part.values()
    others = frozenset[int]().union(*(one.others for one in every))
    return Limits(max(one.size for one in every), min(one.low for one in every), others)


def _as_told(limits: Limits, told: Sequence["_Compared"]) -> Limits:
    """With what the author's other comparisons of this input say of negative numbers that the lookup takes."""
    equal = {each.number for each in told if not each.less and limits.low <= each.number < 0}
    return dataclasses.replace(
        limits, others=limits.others | equal, tells_negative=any(each.less and each.tells_negative for each in told)
    )


def _walk(
    jaxpr: Jaxpr,
    known: dict[Var, _Index | _Compared | int],
    limits: _Found,
    told: set[_Compared],
) -> None:
    """Adds to `limits` what the equations of `jaxpr` look up, and to `told` the comparisons that something else than a
    lookup reads; `known` are its variables, and gets more of them."""
    for eqn in jaxpr.eqns:
        found = [_constant(v) if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        name, inside, result = name_of(eqn), _body(eqn), None
        if name in PASSES:
            result = None
            if found[0] is not None:
                known.update(zip(eqn.outvars, _passed(eqn, found[0]), strict=True))
                continue
        elif name == "select_n" and len(found) == 3:
            result = _selected(*found)
        elif name == "gather":
            _look_up(eqn, found[1], limits)
        elif inside:
            _enter(eqn, found, limits, told)
        elif isinstance(index := found[0] if found else None, _Index):
            second = eqn.invars[-1].aval
            if name == "add" and not second.shape:
                result = dataclasses.replace(index, shifted=True)
            elif not index.shifted and len(found) == 2 and isinstance(number := found[1], int):
                result = _compared(name, index, number)
        if result is not None:
            known.update(dict.fromkeys(eqn.outvars, result))
        elif not inside:
            told.update(each for each in found if isinstance(each, _Compared))
            if any(True for _ in jaxprs_in_params(eqn.params)):  # not followed: it may tell anything from anything
                inputs = {each.input for each in found if isinstance(each, _Index)}
                told.update(_Compared(i, _NO_PART, True, 0, False, True) for i in inputs)
    outs = [known.get(v) for v in jaxpr.outvars if not isinstance(v, Literal)]
    told.update(each for each in outs if isinstance(each, _Compared))


def _passed(eqn: Equation, known: Known) -> Sequence[_Index | _Compared | int]:
    """What the results of an equation are that moves a known value about, or takes parts of it."""
    if isinstance(known, _Index | _Compared):
        return [dataclasses.replace(known, part=part) for part in parts_of(eqn, known.part)]
    return [known] * len(eqn.outvars) if known is not None else []


def _compared(name: str, index: _Index, number: int) -> _Compared | None:
    tells, of = number <= TELL_NEGATIVE.get(name, number - 1), (index.input, index.part)
    if name in COMPARES:
        return _Compared(*of, name in ("lt", "ge"), number, name in ("ne", "ge"), tells)
    return _Compared(*of, True, number, name == "gt", tells, or_equal=True) if name in TELL_NEGATIVE else None


def _is_same(one: _Index | _Compared, other: _Index | _Compared) -> bool:
    return one.input == other.input and one.part.ranges == other.part.ranges


def _constant(literal: Literal) -> int | None:
    return int(literal.val) if literal.aval.dtype.kind in "iu" and not literal.aval.shape else None


def _selected(condition: Known, if_false: Known, if_true: Known) -> _Index | None:
    if isinstance(if_false, _Index) and isinstance(if_true, _Index):
        # i < 0 ? i + size : i is NumPy's negative index
        return min(if_false, if_true, key=lambda case: case.shifted) if _is_same(if_false, if_true) else None
    if not isinstance(condition, _Compared) or condition.or_equal:
        return None
    replaced, index = (if_false, if_true) if condition.negated else (if_true, if_false)
    if not (isinstance(index, _Index) and isinstance(replaced, int) and _is_same(index, condition)):
        return None
    if not condition.less:
        return dataclasses.replace(index, others=index.others | {condition.number})
    return dataclasses.replace(index, for_negative=replaced) if condition.number == 0 else None


def _look_up(eqn: Equation, index: Known, limits: _Found) -> None:
    dims = eqn.params["dimension_numbers"].collapsed_slice_dims
    clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    if isinstance(index, _Index) and not index.shifted and len(dims) == 1 and not clips:
        table = eqn.invars[0].aval
        found, by_part, at = index.limits(table.shape[dims[0]]), limits[index.input], index.part.ranges
        by_part[at] = by_part[at].join(found) if at in by_part else found


def _body(eqn: Equation) -> str:
    """The parameter with the jaxpr that takes an equation's own inputs, be it once or at each turn."""
    return "jaxpr" if is_scan(eqn) else facts_of(eqn).body


def _enter(eqn: Equation, found: list[Known], limits: _Found, told: set[_Compared]) -> None:
    """Follows what is not carried from turn to turn into a loop, or all into a block that is made again."""
    body = opened(eqn.params[_body(eqn)])
    loop = scan_of(eqn) if is_scan(eqn) else None
    carries = range(loop.num_consts, loop.first_x) if loop else ()
    known: dict[Var, _Index | _Compared | int] = {}
    for i, (var, each) in enumerate(zip(body.invars, found, strict=True)):
        if each is None or i in carries:
            continue
        if loop is not None and i >= loop.first_x and isinstance(each, _Index | _Compared):
            each = dataclasses.replace(each, part=each.part.turn())
        known[var] = each
    _walk(body, known, limits, told)
