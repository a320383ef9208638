"""A loss traced a second time, on fewer rows, matched equation by equation with the trace that was read.

A device that computes on rows of its own needs the loss as its author's Python makes it for that many rows: the divisor
of a mean, the shapes. What is known of the first trace (dims, stacks of layers) then holds for the second, provided
that the two differ in nothing but the number of rows; where they differ in more, `Unlike` says where.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from cjax.jax_compat.jaxprs import name_stack
from cjax.trace.dims.find import Scope
from cjax.trace.dims.refine_rules import shape_of
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named
from cjax.trace.jaxpr.view import every_equation, open_bodies, variable_of
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.reading import Trace

# What one trace may do and the other leave out, the shape being right already: [1, seq] needs no broadcast to one row.
_REARRANGES = named("broadcast_in_dim reshape squeeze")
# What may be done to the numbers of rows on their way to becoming indices.
_INDEXING = _REARRANGES | having("joins") | named("convert_element_type add sub lt ge select_n transpose")
_INDEXED = named("gather scatter scatter-add scatter-sub")
_NESTED = having("remat") | named("scan")
_BODIES = _NESTED | having("own_derivative")


class Unlike(Exception):
    """Two traces of one loss differ in more than the number of rows; the message says where."""


@dataclass(frozen=True)
class Draw:
    """Random numbers for all rows: their shape, and which of its dims are the rows."""

    shape: tuple[int, ...]
    dim: int


class Mirror:
    """`trace` for one of `times` equal parts of its rows.

    Args:
      trace: of all rows.
      closed: a flat trace of the same loss on a part of them.
      times: how many parts there are.

    Raises:
      Unlike: the loss does other things on fewer rows.
    """

    def __init__(self, trace: Trace, closed: ClosedJaxpr, times: int) -> None:
        self._times, self._dims = times, trace.dims
        self._batch = None if trace.batch_class is None else trace.dims.class_of(trace.batch_class)
        self._other: dict[Var, Var] = {}  # variable of the whole -> of the part
        self._made: dict[Var, tuple[Equation, int]] = {}
        self._scaled: dict[int, int] = {}  # equations that divide by the number of rows (-1) or multiply
        self._scales: dict[Var, int | None] = {}
        # Denominators of the whole batch grow with it as the sums that they divide.
        if trace.shared is not None:
            weights, divisors = trace.shared.weights, dict.fromkeys(trace.shared.divisors.values())
            self._scales.update((v, 0 if w.is_mean else 1) for v, w in zip(divisors, weights, strict=True))
        self.draws: dict[int, Draw] = {}  # by id of the part's equation
        # The dims that were found hold for both traces only if they are the same equations on the same constants.
        # Everything below asks that, one by one; what can't be shown is `Unlike`, and gradients are then reduced once
        # per micro-batch, which is slower and right.
        if len(trace.closed.consts) != len(closed.consts) or not all(
            map(_same_array, trace.closed.consts, closed.consts)
        ):
            raise Unlike("a constant array depends on the number of rows")
        self._whole = trace.closed.jaxpr
        scope, positions = self._body(self._whole, closed.jaxpr, trace.dims.top)
        dims = copy.copy(trace.dims)
        dims.top = scope
        # A lifted loss is two results where it was one.
        more = len(self._whole.outvars) - len(closed.jaxpr.outvars)
        self._results: list[Atom | None] = [*[None] * more, *closed.jaxpr.outvars]
        outvars: list[Atom] = []
        for whole, part in zip(self._whole.outvars, self._results, strict=True):
            if isinstance(whole, Literal):
                assert part is not None, "a lifted loss is made of examples"
                outvars.append(part)
            else:
                outvars.append(self._other[whole])
        jaxpr = closed.jaxpr.replace(outvars=outvars)
        leaves = tuple(
            replace(leaf, shape=tuple(var.aval.shape)) for leaf, var in zip(trace.leaves, jaxpr.invars, strict=True)
        )
        self.trace = replace(
            trace,
            closed=ClosedJaxpr(jaxpr, closed.consts),
            leaves=leaves,
            dims=dims,
            runs=tuple(self._run(run, jaxpr.eqns, positions) for run in trace.runs),
        )

    # -- matching -------------------------------------------------------------------------------------------------
    def _body(self, whole: Jaxpr, part: Jaxpr, scope: Scope | None) -> tuple[Scope, list[int]]:
        """The dims of the part's variables, and for each equation of the whole how many of the part come before it."""
        inner = Scope()
        for a, b in zip((*whole.constvars, *whole.invars), (*part.constvars, *part.invars), strict=True):
            self._name(a, b, scope, inner)
        counters: set[Var] = set()
        positions, at = [], 0
        for eqn in whole.eqns:
            positions.append(at)
            other = part.eqns[at] if at < len(part.eqns) else None
            if other is not None and self._matches(eqn, other):
                self._pair(eqn, other, scope, inner, counters)
                at += 1
            # JAX makes no broadcast to a shape that is there already, as it is with one row.
            elif name_of(eqn) in _REARRANGES and self._left_out(eqn):
                self._name(eqn.outvars[0], self._other[variable_of(eqn, 0)], scope, inner)
            else:
                raise Unlike(f"{_where(eqn)} is not there for fewer rows")
        if at < len(part.eqns):
            raise Unlike(f"{_where(part.eqns[at])} is there for fewer rows alone")
        # Rows 0 to n - 1 of a device's own are not rows 0 to n - 1 of the batch: as indices into its own rows they are
        # right, as numbers they are not.
        if counters & {atom for atom in part.outvars if not isinstance(atom, Literal)}:
            raise Unlike("row numbers are a result")
        return inner, [*positions, at]

    def _name(self, whole: Var, part: Var, scope: Scope | None, inner: Scope) -> None:
        self._other[whole] = part
        if scope is not None and whole in scope.ids:
            inner.ids.setdefault(part, scope.ids[whole])
        if scope is not None and whole in scope.origin:
            inner.origin.setdefault(part, scope.origin[whole])

    def _matches(self, eqn: Equation, other: Equation) -> bool:
        """Whether two equations are the same one on the same operands."""
        if eqn.primitive is not other.primitive or len(eqn.invars) != len(other.invars):
            return False
        return all(
            isinstance(b, Literal) if isinstance(a, Literal) else self._other.get(a) is b
            for a, b in zip(eqn.invars, other.invars, strict=True)
        )

    def _left_out(self, eqn: Equation) -> bool:
        source = self._other.get(eqn.invars[0]) if not isinstance(eqn.invars[0], Literal) else None
        return source is not None and self._fits(shape_of(eqn.outvars[0]), shape_of(source))

    def _fits(self, whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
        if len(whole) != len(part):
            return False
        return all(a in (b, b * self._times) for a, b in zip(whole, part, strict=True))

    def _pair(self, eqn: Equation, other: Equation, scope: Scope | None, inner: Scope, counters: set[Var]) -> None:
        """Two equations that take each other's place: what they make must differ in the number of rows alone."""
        for position, (a, b) in enumerate(zip(eqn.outvars, other.outvars, strict=True)):
            if not self._fits(shape_of(a), shape_of(b)):
                raise Unlike(f"{_where(eqn)} makes {shape_of(a)} of all rows and {shape_of(b)} of a part")
            self._name(a, b, scope, inner)
            self._made[a] = (eqn, position)
        name = name_of(eqn)
        differs = shape_of(eqn.outvars[0]) != shape_of(other.outvars[0]) if eqn.outvars else False
        facts = facts_of(eqn)
        # Some samplers draw until they are satisfied: a row's numbers then depend on the rows in front of it.
        if differs and facts.opaque:
            raise Unlike(f"{_where(eqn)} draws for each row in an order of its own")
        # A device draws what its rows would have been given in the whole batch, so that dropout is the same under every
        # plan; for that it has to be known which dim the rows are.
        if differs and facts.draws and eqn.params["shape"] != other.params["shape"]:
            self.draws[id(other)] = self._draw(eqn, other, scope)
        self._count(eqn, other, counters)
        self._literals(eqn, other, counters)
        for a, b in zip(open_bodies(eqn), open_bodies(other), strict=True):
            nested = scope.inner.get(id(eqn)) if scope is not None and name in _NESTED else None
            inner.inner[id(other)], _ = self._body(a, b, nested)

    def _draw(self, eqn: Equation, other: Equation, scope: Scope | None) -> Draw:
        """The shape of random numbers for all rows, and the dim that the rows are."""
        whole, part = eqn.params["shape"], other.params["shape"]
        rows = [i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        lead = len(shape_of(eqn.outvars[0])) - len(whole)
        ids = scope.ids.get(eqn.outvars[0]) if scope is not None else None
        if len(rows) != 1 or ids is None or self._dims.class_of(ids[lead + rows[0]]) != self._batch:
            raise Unlike(f"{_where(eqn)} draws numbers whose rows are not known to be the batch's")
        return Draw(tuple(whole), rows[0])

    def _count(self, eqn: Equation, other: Equation, counters: set[Var]) -> None:
        """Follow the numbers of rows: as indices they say the same on a part, as values they do not."""
        name = name_of(eqn)
        if name == "iota":
            dim = eqn.params["dimension"]
            if shape_of(eqn.outvars[0])[dim] != shape_of(other.outvars[0])[dim]:
                counters.add(other.outvars[0])
            return
        numbered = [i for i, atom in enumerate(other.invars) if not isinstance(atom, Literal) and atom in counters]
        if not numbered or (name in _INDEXED and numbered == [1]):
            return
        if name not in _INDEXING:
            raise Unlike(f"{_where(eqn)} computes with the numbers of rows")
        counters.update(other.outvars)

    def _literals(self, eqn: Equation, other: Equation, counters: set[Var]) -> None:
        """Numbers that differ may be the number of rows, where they divide or multiply; elsewhere the loss knows how
        many there are."""
        for a, b in zip(eqn.invars, other.invars, strict=True):
            if not isinstance(a, Literal):
                continue
            assert isinstance(b, Literal), "operands were matched"
            if np.array_equal(a.val, b.val):
                continue
            # x[-1] is written as n - 1.
            if counters & set(other.outvars):
                continue  # negative indices are counted from the number of rows
            # The author's n, as a number: dividing by it makes a mean, whose parts are averaged. In any other place it
            # is something that only the whole batch knows.
            power = {"div": -1, "mul": 1}.get(name_of(eqn), 0) * self._ratio(a, b)
            if not power or shape_of(eqn.outvars[0]) != shape_of(other.outvars[0]):
                raise Unlike(f"{_where(eqn)} computes with the number of rows")
            self._scaled[id(eqn)] = power

    def _ratio(self, whole: Literal, part: Literal) -> int:
        """1 where the literal of the whole is `times` that of the part, -1 where the reverse, 0 where neither."""
        a, b = float(whole.val), float(part.val)
        if np.isclose(a, b * self._times, rtol=1e-6, atol=0):
            return 1
        return -1 if np.isclose(a * self._times, b, rtol=1e-6, atol=0) else 0

    def _run(self, run: RepeatedLayers, eqns: Sequence[Equation], positions: list[int]) -> RepeatedLayers:
        """The same repeated layers in the other trace, where their equations start elsewhere."""
        starts = [positions[run.start + r * run.period] for r in range(run.repeats + 1)]
        periods = {b - a for a, b in zip(starts, starts[1:], strict=False)}
        # Layers are matched by where they start; were one of them longer here, the weights of all behind it would be
        # the wrong ones.
        if len(periods) != 1:
            raise Unlike("layers that are equal for all rows differ for fewer")
        start, period = starts[0], periods.pop()
        literals, of = {}, self._other
        for position in range(period):
            rows = [eqns[start + r * period + position].invars for r in range(run.repeats)]
            for place, atoms in enumerate(zip(*rows, strict=True)):
                values = tuple(atom.val for atom in atoms if isinstance(atom, Literal))
                if any(not np.array_equal(value, values[0]) for value in values):
                    literals[position, place] = values

        def others(groups: tuple[tuple[Var, ...], ...]) -> tuple[tuple[Var, ...], ...]:
            return tuple(tuple(self._other[var] for var in group) for group in groups)

        carries = [(of[first], of[read], of[written], of[last]) for first, read, written, last in run.carries]
        return RepeatedLayers(
            start, period, run.repeats, others(run.stacked), tuple(carries), others(run.outputs),
            others(run.last_only), literals, run.template,
        )  # fmt: skip

    # -- how results grow with the rows ---------------------------------------------------------------------------
    def growth(self, result: int) -> int | None:
        """How a result of the whole follows from those of the parts: 1 their sum, 0 their mean, None each of them.

        It is meant for results known to be sums, means or independent of the batch (`cjax.trace.examples.verdict`);
        this tells a sum divided by the number of rows from one divided by a number that only looks like it.
        """
        atom = self._whole.outvars[result]
        if not isinstance(atom, Literal):
            return self._growth(atom)
        part = self._results[result]
        assert isinstance(part, Literal), "a result is a number for all rows and a variable for fewer"
        if np.array_equal(atom.val, part.val):
            return None
        if self._ratio(atom, part) != 1:
            raise Unlike(f"a result is {atom.val} for all rows and {part.val} for a part of them")
        return 1

    def _growth(self, atom: Atom) -> int | None:
        if isinstance(atom, Literal) or (atom not in self._made and atom not in self._scales):
            return None
        if atom not in self._scales:
            self._scales[atom] = self._grown(*self._made[atom])
        return self._scales[atom]

    def _grown(self, eqn: Equation, position: int) -> int | None:
        """How one result of an equation grows with the rows, from how its operands do."""
        rows = [not isinstance(atom, Literal) and shape_of(atom) != shape_of(self._other[atom]) for atom in eqn.invars]
        name = name_of(eqn)
        known = [None if is_rows else self._growth(atom) for atom, is_rows in zip(eqn.invars, rows, strict=True)]
        found = {growth for growth in known if growth is not None}
        bodies = list(open_bodies(eqn))
        if bodies:
            if found or name not in _BODIES:
                raise Unlike(f"{_where(eqn)} hides how its results grow with the rows")
            return self._growth(bodies[0].outvars[position])
        # Results are followed back to their sums: an operand that has the rows in a dim is where they were added up.
        if any(rows):
            return 1
        if name == "div" and known[1] is not None:
            return (known[0] or 0) - known[1]
        if name == "mul" and len([growth for growth in known if growth is not None]) == 2:
            return sum(growth or 0 for growth in known)
        if id(eqn) in self._scaled and not found:
            raise Unlike(f"{_where(eqn)} computes with the number of rows")
        if len(found) > 1:
            raise Unlike(f"{_where(eqn)} adds what grows with the rows to what does not")
        return found.pop() + self._scaled.get(id(eqn), 0) if found else None


def drawing(jaxpr: Jaxpr) -> Iterator[Equation]:
    """The equations of a trace that draw random numbers, those within others included, in order."""
    for eqn in jaxpr.eqns:
        if facts_of(eqn).draws:
            yield eqn
        for body in open_bodies(eqn):
            yield from drawing(body)


def counterparts(wanted: Sequence[Atom], jaxpr: Jaxpr, other: Jaxpr) -> list[Atom]:
    """The variables of `other` that are what `wanted` are in `jaxpr`, found by going back from the first result.

    Raises:
      Unlike: the two differ on the way.
    """
    made = [{var: eqn for eqn in j.eqns for var in eqn.outvars} for j in (jaxpr, other)]
    found: dict[Atom, Atom] = {}
    left = [(jaxpr.outvars[0], other.outvars[0])]
    while left and not all(var in found for var in wanted):
        a, b = left.pop(0)
        if isinstance(a, Literal) or isinstance(b, Literal) or a in found:
            continue
        found[a] = b
        eqn, twin = made[0].get(a), made[1].get(b)
        # Backwards from the result, side by side, only where both do the same; a variable that can't be reached like
        # that has no counterpart that could be trusted.
        if eqn is not None and twin is not None and eqn.primitive is twin.primitive:
            left += zip(eqn.invars, twin.invars, strict=False)
    if not all(var in found for var in wanted):
        raise Unlike("the weight of the loss is made otherwise for one row")
    return [found[var] for var in wanted]


def check_growth(one: Jaxpr, two: Jaxpr, many: Jaxpr, num: int) -> None:
    """That a loss does with one row what it does with two and with `num`: the same operations, on sizes that follow.

    Raises:
      Unlike: an operation is left out, or works on another dim (`x.squeeze().mean(0)`).
    """
    lists = [[eqn for eqn in every_equation(jaxpr) if name_of(eqn) not in _REARRANGES] for jaxpr in (one, two, many)]
    for eqns in zip_longest(*lists):
        found = next(eqn for eqn in eqns if eqn is not None)
        if len({None if eqn is None else name_of(eqn) for eqn in eqns}) > 1:
            raise Unlike(f"{_where(found)} is not there for every number of rows")
        for outs in zip(*(eqn.outvars for eqn in eqns), strict=True):
            first, second, last = (math.prod(shape_of(out)) for out in outs)
            if not any((second, last) == (first * 2**p, first * num**p) for p in (0, 1, 2)):
                raise Unlike(f"{_where(found)} makes {first} numbers of one row, {second} of two and {last} of {num}")


def _same_array(a: ArrayLike, b: ArrayLike) -> bool:
    if a is b:
        return True
    if isinstance(a, jax.Array) and isinstance(b, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.array_equal(a, b)


def _where(eqn: Equation) -> str:
    return f"{name_stack(eqn) or 'the loss itself'} ({name_of(eqn)})"
