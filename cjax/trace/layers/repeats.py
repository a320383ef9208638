"""The repeated layers of a trace: finding the stack of layers, and saying how one layer hangs on the next.

Equations that look alike (same primitive, parameters and shapes) get the same number; the longest stretch of numbers
that repeats with a period is the stack. `RepeatedLayers` are such a stretch after every variable that crosses a layer's
border has been given its role: the same for all layers, handed from layer to layer, one for each layer, or read
afterwards. That is all a `lax.scan` needs to know, so a stack of any depth compiles as one layer.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cjax.jax_compat.core import ClosedJaxpr, Equation, Literal, Var, jaxprs_in_params
from cjax.trace.jaxpr.identity import equation_key

Number = int | float | np.generic  # what a literal stands for
MIN_EQUATIONS = 4  # shorter repeats (chains of adds) are not layers, and a loop over them costs more than it saves


@dataclass(frozen=True)
class RepeatedLayers:
    """`repeats` equal stretches of `period` equations from equation `start` on.

    `stacked` and `outputs` list, for each role, the variables of all repeats in order: `stacked` come from
    outside (a weight for each layer), `outputs` are read outside; of `last_only`, the last repeat's alone is.
    `carries` are (variable the first repeat reads, the one the template reads, the one it writes, the last written).
    `literals` are operands (equation, position) whose literal differs from layer to layer, with all its values.
    `template` is the repeat whose equations stand for all: in it, no variable has two roles. In the first one may,
    where all layers read what the first is handed: a skip from the embedding to every layer.
    """

    start: int
    period: int
    repeats: int
    stacked: tuple[tuple[Var, ...], ...]
    carries: tuple[tuple[Var, Var, Var, Var], ...]
    outputs: tuple[tuple[Var, ...], ...]
    last_only: tuple[tuple[Var, ...], ...]
    literals: dict[tuple[int, int], tuple[Number, ...]] = field(default_factory=dict)
    template: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeats

    def corresponding(self, eqns: Sequence[Equation]) -> list[tuple[Var, ...]]:
        """Groups of variables, one of each repeat, that have the same role; `eqns` are the trace's."""
        return _groups(eqns, self.start, self.period, self.repeats)


def find_runs(closed: ClosedJaxpr) -> tuple[RepeatedLayers, ...]:
    """All stacks of a flat trace, in program order (an encoder's and a decoder's, say); empty if there is none."""
    eqns = closed.jaxpr.eqns
    numbers: dict[Hashable, int] = {}
    keys = np.array([numbers.setdefault(equation_key(eqn), len(numbers)) for eqn in eqns], dtype=np.int64)
    context = _Context(closed)
    runs: list[RepeatedLayers] = []
    pieces = [(0, len(eqns))]
    while pieces:
        low, high = pieces.pop()
        run = _longest(keys, low, high, context)
        if run is not None:
            runs.append(run)
            pieces += [(low, run.start), (run.stop, high)]
    return tuple(sorted(runs, key=lambda run: run.start))


def paired(closed: ClosedJaxpr, run: RepeatedLayers) -> RepeatedLayers | None:
    """The same stretch with two layers to a repeat; None if that leaves no two repeats. An odd last layer stays out."""
    return _read(run.start, 2 * run.period, run.repeats // 2, _Context(closed)) if run.repeats >= 4 else None


def part_of(closed: ClosedJaxpr, run: RepeatedLayers, first: int, count: int) -> RepeatedLayers | None:
    """`count` of its layers, from layer `first` on; None if these alone are no loop."""
    return _read(run.start + first * run.period, run.period, count, _Context(closed))


class _Context:
    """Where each variable of the trace is made, and where it is last read."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.eqns = closed.jaxpr.eqns
        self.made: dict[Var, tuple[int, int]] = {}
        self.readers: dict[Var, list[int]] = {}
        for index, eqn in enumerate(self.eqns):
            for position, var in enumerate(eqn.outvars):
                self.made[var] = (index, position)
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    self.readers.setdefault(atom, []).append(index)
        for atom in closed.jaxpr.outvars:
            if not isinstance(atom, Literal):
                self.readers.setdefault(atom, []).append(len(self.eqns))

    def size(self, start: int, period: int) -> int:
        """How many equations a period stands for, those inside its remats and loops counted."""
        if period >= MIN_EQUATIONS:
            return period
        eqns = self.eqns[start : start + period]
        return period + sum(len(inner.eqns) for eqn in eqns for inner in jaxprs_in_params(eqn.params))


def _longest(keys: np.ndarray, low: int, high: int, context: _Context) -> RepeatedLayers | None:
    """The run of most equations within [low, high), among equals the one of the shortest period."""
    candidates = []
    piece = keys[low:high]
    for period in range(1, len(piece) // 2 + 1):
        same = np.flatnonzero(np.diff(np.concatenate(([0], piece[:-period] == piece[period:], [0]))))
        for begin, end in zip(same[::2], same[1::2], strict=True):
            repeats = (end - begin) // period + 1
            if repeats >= 2 and context.size(low + int(begin), period) >= MIN_EQUATIONS:
                candidates.append((-repeats * period, period, low + int(begin), int(end - begin) + period))
    for _, period, start, length in sorted(candidates)[:8]:
        run = _best_rotation(start, period, length, context)
        if run is not None:
            return run
    return None


def _best_rotation(start: int, period: int, length: int, context: _Context) -> RepeatedLayers | None:
    """Cut the stretch where the least is handed from layer to layer: at the residual stream, in a transformer."""
    repeats = length // period
    for fewer in (0, 1):  # a neighbour that merely looks like part of a layer may spoil the first or the last
        if repeats - fewer < 2:
            return None
        shifts = range(length - (repeats - fewer) * period + 1)
        probe = min(repeats - fewer, 3)  # what crosses the border shows within three layers; all are read once, below
        probes = [_read(start + shift, period, probe, context) for shift in shifts]
        loops = [run for run in probes if run is not None and run.stacked and run.carries]
        for run in sorted(loops, key=_carried_bytes):
            whole = _read(run.start, period, repeats - fewer, context)
            if whole is not None:
                return whole
    return None


def _carried_bytes(run: RepeatedLayers) -> tuple[int, int]:
    def size(var: Var) -> int:
        aval = var.aval
        return int(np.prod(aval.shape, dtype=np.int64)) * getattr(aval.dtype, "itemsize", 4)

    return sum(size(carry[0]) for carry in run.carries), run.start


def _read(start: int, period: int, repeats: int, context: _Context) -> RepeatedLayers | None:
    """Give every border variable its role; None if one fits none, so that these repeats are no loop."""
    eqns, made = context.eqns, context.made
    stop = start + period * repeats
    stacked: dict[tuple[Var, ...], None] = {}
    carries: dict[tuple[Var, ...], tuple[int, int]] = {}  # and where in a repeat the next one's is made
    shared: dict[Var, None] = {}
    literals: dict[tuple[int, int], tuple[Number, ...]] = {}
    for position in range(period):
        rows = [eqns[start + r * period + position].invars for r in range(repeats)]
        for place, atoms in enumerate(zip(*rows, strict=True)):
            if any(isinstance(atom, Literal) for atom in atoms):
                if not all(isinstance(atom, Literal) for atom in atoms):
                    return None
                values = tuple(atom.val for atom in atoms if isinstance(atom, Literal))
                if any(not np.array_equal(value, values[0]) for value in values[1:]):
                    literals[position, place] = values
                continue
            places = tuple(atom for atom in atoms if not isinstance(atom, Literal))
            origin = [made.get(var, (-1, 0)) for var in places]
            relative = {(i - start - r * period, k) for r, (i, k) in enumerate(origin)}
            if len(relative) == 1 and 0 <= next(iter(relative))[0] < period:
                continue  # made within its own repeat
            outside = [index < start for index, _ in origin]
            if all(outside):
                if any(var is not places[0] for var in places):
                    stacked[places] = None
                else:
                    shared[places[0]] = None
                continue
            handed = {(i - start - (r - 1) * period, k) for r, (i, k) in enumerate(origin) if r}
            if not outside[0] or len(handed) != 1 or not 0 <= next(iter(handed))[0] < period:
                return None
            carries[places] = next(iter(handed))
    parts = len(shared) + len(stacked) + len(carries)
    template = next((t for t in range(repeats) if len({*shared, *(g[t] for g in (*stacked, *carries))}) == parts), None)
    if template is None:
        return None

    def written(r: int, place: tuple[int, int]) -> Var:
        return eqns[start + r * period + place[0]].outvars[place[1]]

    crossing = tuple((c[0], c[template], written(template, p), written(repeats - 1, p)) for c, p in carries.items())
    handed_on = {id(last) for *_, last in crossing}
    outputs, last_only = [], []
    for group in _groups(eqns, start, period, repeats):
        later = [any(reader >= stop for reader in context.readers.get(var, ())) for var in group]
        if any(later[:-1]):
            outputs.append(group)
        elif later[-1] and id(group[-1]) not in handed_on:
            last_only.append(group)
    return RepeatedLayers(
        start, period, repeats, tuple(stacked), crossing, tuple(outputs), tuple(last_only), literals, template
    )


def _groups(eqns: Sequence[Equation], start: int, period: int, repeats: int) -> list[tuple[Var, ...]]:
    """Groups of result variables that have the same role in each repeat."""
    groups: list[tuple[Var, ...]] = []
    for position in range(period):
        rows = [eqns[start + r * period + position].outvars for r in range(repeats)]
        groups += zip(*rows, strict=True)
    return groups
