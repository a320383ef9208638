"""Which inputs of a trace index a table, and how large it is: so that a token outside the vocabulary, or a label that
is no class, is named before it turns into NaN or a wrong row on the devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core as jex

from cjax.trace.simplify import scan_counts

PASSES = frozenset(
    ["broadcast_in_dim", "convert_element_type", "copy", "pad", "reshape", "slice", "squeeze", "transpose"]
)
ENTERED = frozenset(["checkpoint", "jit", "pjit", "remat2", "scan"])  # bodies that take the equation's own inputs
COMPARES = frozenset(["eq", "ne", "lt", "ge"])


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an index may be: `low` <= index < `size`, or one of `others`, which something else replaces."""

    size: int
    low: int
    others: frozenset[int] = frozenset()

    def join(self, other: "Limits") -> "Limits":
        """What satisfies two lookups."""
        return Limits(min(self.size, other.size), max(self.low, other.low), self.others & other.others)


@dataclasses.dataclass(frozen=True)
class _Index:
    """An input's own values; `shifted` if a number was added to them, which is another index, unless NumPy's rule for
    negative ones chooses between the two."""

    input: int
    shifted: bool = False
    others: frozenset[int] = frozenset()
    for_negative: int | None = None

    def limits(self, size: int) -> Limits:
        low = -size
        if self.for_negative is not None:
            low = -(2**63) if 0 <= self.for_negative < size else 0
        return Limits(size, low, self.others)


@dataclasses.dataclass(frozen=True)
class _Compared:
    """Where an input's values are equal to a number, or less than it; or not, if `negated`."""

    input: int
    less: bool
    number: int
    negated: bool


def index_limits(closed: jex.ClosedJaxpr, inputs: Sequence[int]) -> dict[int, Limits]:
    """For each of `inputs` that is looked up unchanged, the size of the smallest table it is looked up in.

    A lookup whose author asks for indices to be clipped takes any. An index that is first compared with a number and
    then replaced, as a label of -100 often is, may be that number; loops over an input are followed.

    Args:
      closed: a flat trace.
      inputs: positions among its inputs, of integer arrays.

    >>> import jax, jax.numpy as jnp
    >>> index_limits(jax.make_jaxpr(lambda t, i: t[i])(jnp.ones(7), jnp.zeros(3, int)), [1])
    {1: Limits(size=7, low=-7, others=frozenset())}
    """
    limits: dict[int, Limits] = {}
    _walk(closed.jaxpr, {closed.jaxpr.invars[i]: _Index(i) for i in inputs}, limits)
    return limits


def _walk(jaxpr: jex.Jaxpr, known: dict[Any, _Index | _Compared | int], limits: dict[int, Limits]) -> None:
    """Adds to `limits` what the equations of `jaxpr` look up; `known` are its variables, and gets more of them."""
    for eqn in jaxpr.eqns:
        found = [_constant(v) if isinstance(v, jex.Literal) else known.get(v) for v in eqn.invars]
        name, result = eqn.primitive.name, None
        if name in PASSES:
            result = found[0]
        elif name == "select_n" and len(found) == 3:
            result = _selected(*found)
        elif name == "gather":
            _look_up(eqn, found[1], limits)
        elif name in ENTERED:
            _enter(eqn, found, limits)
        elif isinstance(index := found[0] if found else None, _Index):
            second: Any = eqn.invars[-1].aval
            if name == "add" and not second.shape:
                result = dataclasses.replace(index, shifted=True)
            elif name in COMPARES and not index.shifted and isinstance(number := found[1], int):
                result = _Compared(index.input, name in ("lt", "ge"), number, name in ("ne", "ge"))
        if result is not None:
            known[eqn.outvars[0]] = result


def _constant(literal: Any) -> int | None:
    return int(literal.val) if literal.aval.dtype.kind in "iu" and not literal.aval.shape else None


def _selected(condition: Any, if_false: Any, if_true: Any) -> _Index | None:
    if isinstance(if_false, _Index) and isinstance(if_true, _Index):
        # i < 0 ? i + size : i is NumPy's negative index
        return min(if_false, if_true, key=lambda case: case.shifted) if if_false.input == if_true.input else None
    if not isinstance(condition, _Compared):
        return None
    replaced, index = (if_false, if_true) if condition.negated else (if_true, if_false)
    if not (isinstance(index, _Index) and isinstance(replaced, int) and index.input == condition.input):
        return None
    if not condition.less:
        return dataclasses.replace(index, others=index.others | {condition.number})
    return dataclasses.replace(index, for_negative=replaced) if condition.number == 0 else None


def _look_up(eqn: jex.JaxprEqn, index: Any, limits: dict[int, Limits]) -> None:
    dims = eqn.params["dimension_numbers"].collapsed_slice_dims
    clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    if isinstance(index, _Index) and not index.shifted and len(dims) == 1 and not clips:
        table: Any = eqn.invars[0].aval
        found = index.limits(table.shape[dims[0]])
        limits[index.input] = found.join(limits[index.input]) if index.input in limits else found


def _enter(eqn: jex.JaxprEqn, found: list[Any], limits: dict[int, Limits]) -> None:
    """Follows what is not carried from turn to turn into a loop, or all into a block that is made again."""
    body = eqn.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    num_consts, num_carry = scan_counts(eqn) if eqn.primitive.name == "scan" else (0, 0)
    carried = range(num_consts, num_consts + num_carry)
    inside = zip(body.invars, found, strict=True)
    _walk(body, {v: each for i, (v, each) in enumerate(inside) if each is not None and i not in carried}, limits)
