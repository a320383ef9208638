"""What a step keeps between its forward and its backward pass, by the parts of a model, and what stands beside it.

Read off the step itself: the loss and its gradients are written down as one trace, as a program would emit it, and the
lifetimes of its values are followed.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from cjax.jax_compat.core import Literal
from cjax.plan import Remat
from cjax.planner.reading.derivative import Planned, StepTrace, derive
from cjax.planner.reading.live import Array, LiveOperation, Moment, Timeline, timeline
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.staged import Staged, staged_of
from cjax.planner.reading.stretches import Stretch
from cjax.planner.work import Form, Kept, NamedTensor
from cjax.trace.dims.find import find_dims
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.view import is_scan, scan_of
from cjax.trace.layers.at_once import all_at_once
from cjax.trace.layers.repeats import find_runs
from cjax.trace.reading import Trace

_FEWER = 8  # devices along an axis: dims that may be split into so many decide which moments are kept


class KeptBy(Mapping[tuple[Remat, Form, bool], tuple[Kept, ...]]):
    """For each way to compute a step, what the parts of a model keep; each is read off when it is asked for.

    Args:
      trace: of the loss.
      naming: of its dims.
      parts: of the model, in the order in which they run.
    """

    def __init__(self, trace: Trace, naming: Naming, parts: Sequence[Stretch]) -> None:
        self._trace, self._naming, self._parts = trace, naming, parts
        self._at_once: Trace | None = None
        self._found: dict[tuple[Remat, Form, bool], tuple[Kept, ...]] = {}

    def __getitem__(self, key: tuple[Remat, Form, bool]) -> tuple[Kept, ...]:
        if key not in self._found:
            remat, form, at_once = key
            trace = self._whole() if at_once else self._trace
            precision = "float32" if form == "float32" else "bfloat16"
            whole, staged = (Planned(trace, remat, precision, form == "fused", keeps) for keeps in (False, True))
            self._found[key] = _kept(trace, self._naming, self._parts, whole, staged)
        return self._found[key]

    def __iter__(self) -> Iterator[tuple[Remat, Form, bool]]:
        return itertools.product(get_args(Remat), get_args(Form), (False, True))

    def __len__(self) -> int:
        return 2 * len(get_args(Remat)) * len(get_args(Form))

    def _whole(self) -> Trace:
        """The trace with loops that add up over parts of the examples evaluated at once."""
        if self._at_once is None:
            closed, num = self._trace.closed, sum(leaf.kind in ("params", "frozen") for leaf in self._trace.leaves)
            made = all_at_once(closed, num)
            given = {i for i, leaf in enumerate(self._trace.leaves) if leaf.kind in ("model_state", "key", "index")}
            self._at_once = dataclasses.replace(
                self._trace, closed=made, dims=find_dims(made, num, given), runs=find_runs(made), at_once=True
            )
        return self._at_once


def _kept(trace: Trace, naming: Naming, parts: Sequence[Stretch], hooks: Planned, staged: Planned) -> tuple[Kept, ...]:
    """For each part of a model, what its backward pass needs of its forward pass, and what stands while it runs;
    without a pipeline, and in one."""
    step = derive(trace, naming, hooks)
    jaxpr, scope = step.of.closed.jaxpr, step.of.classes.top
    inputs = [Array(var, scope) for var in jaxpr.invars]
    line = timeline(jaxpr, scope, inputs)
    turn = _turn(line.ops, inputs[0])
    loops = [_loops(step, part, line.ops) for part in parts]
    ends = _ends(parts, loops, turn, len(line.ops))
    results = {line.form(array) for array in line.results}
    saved: list[list[Array]] = [[] for _ in parts]
    stacked: dict[Array, int] = {}
    for array, born in line.born.items():
        if not born < turn <= line.dies[array]:
            continue
        at = _part_at(ends, line.dies[array])
        if loops[at] and array in line.ops[loops[at][-1]].reads:
            stacked[array] = at
        elif loops[at]:
            # What a loop reads and layers have no part in was made in front of it, or is what it handed on.
            at = min(at + 1, len(parts) - 1) if born >= loops[at][0] else max(at - 1, 0)
        saved[at].append(array)
    owner = {array: at for at, arrays in enumerate(saved) for array in arrays}
    moments: list[list[Moment]] = [[] for _ in parts]
    forward: list[list[Moment]] = [[] for _ in parts]
    for moment in line.moments():
        if moment.at < turn:
            forward[_in_front(loops, moment.at)].append(moment)
        else:
            at = _part_at(ends, moment.at)
            own = [a for a in moment.arrays if a not in results and (owner.get(a, at) == at and a not in stacked)]
            moments[at].append(Moment(moment.op, moment.at, tuple(own)))
    stacks = [part.stack for part in parts if part.stack is not None]
    none: Staged = ((), (), (), ())
    of_stages = iter(staged_of(trace, naming, stacks, staged) if stacks else [])
    found = []
    for at, (part, arrays, each) in enumerate(zip(parts, saved, moments, strict=True)):
        working = tuple(_values(step, moment.arrays) for moment in _fullest(step, each))
        mine = next(of_stages, none) if part.stack is not None else none
        staged_, crossing, payload, passing = mine
        waiting = _values(step, _waiting(line, ends[at], turn)) if not loops[at] else ()
        ahead = _values(step, _ahead(line, loops, at, forward[at]))
        own = _values(step, arrays, {a for a in arrays if a in stacked})
        found.append(Kept(own, working, staged_, crossing, payload, passing, waiting, ahead))
    return tuple(found)


def _in_front(loops: Sequence[tuple[int, ...]], at: int) -> int:
    """What a forward operation belongs to: the part in front of the next loop over layers, with the loop's start."""
    return max(0, next((part for part, own in enumerate(loops) if own and at <= own[0]), len(loops)) - 1)


def _waiting(line: Timeline, ends: tuple[int, int], turn: int) -> list[Array]:
    """The largest value of a backward pass that products read which are for parameters' gradients alone."""
    wanted, found = set(line.results), list[Array]()
    for at, op in reversed([*enumerate(line.ops)][turn:]):
        if not wanted.intersection(op.writes):
            continue
        if facts_of(op.eqn).product and ends[0] <= at <= ends[1]:
            made = (line.form(array) for array in op.reads)
            found += [array for array in made if line.born.get(array, -1) >= turn]
        elif op.is_fused:
            wanted.update(op.reads)
    return sorted(found, key=lambda array: -array.size)[:1]


def _ahead(line: Timeline, loops: Sequence[tuple[int, ...]], at: int, moments: Sequence[Moment]) -> list[Array]:
    """What stands in front of a later stack while the forward pass runs, where backward loops' results have room."""
    if loops[at] or not any(loops[:at]) or not any(loops[at:]) or not moments:
        return []
    last = next(own[-1] for own in loops[at:] if own)
    results = set(line.results)
    written = scan_of(line.ops[last].eqn).ys(line.ops[last].writes)
    cleared = [array for array in written if line.form(array) not in results]
    standing = [[array for array in m.arrays if array not in line.inner.get(m.at, ())] for m in moments]
    return [*max(standing, key=lambda arrays: sum(array.size for array in arrays)), *cleared]


def _turn(ops: Sequence[LiveOperation], seed: Array) -> int:
    """Where the backward pass begins: at the first operation on the loss's own derivative."""
    return next((at for at, op in enumerate(ops) if seed in op.reads), len(ops))


def _loops(step: StepTrace, part: Stretch, ops: Sequence[LiveOperation]) -> tuple[int, ...]:
    """The loops over a stack's layers: forward, and backward if they are trained."""
    if part.stack is None:
        return ()
    weights = {step.of.closed.jaxpr.invars[step.places[i]] for group in part.stack.weights for i in group}
    found = []
    for at, op in enumerate(ops):
        if is_scan(op.eqn) and any(v in weights for v in op.eqn.invars if not isinstance(v, Literal)):
            found.append(at)
    return tuple(found) if len(found) > 1 else ()


def _ends(parts: Sequence[Stretch], loops: Sequence[tuple[int, ...]], turn: int, last: int) -> list[tuple[int, int]]:
    """For each part, the first and the last operation of its backward pass."""
    found: list[tuple[int, int]] = []
    start = turn
    for at in range(len(parts) - 1, -1, -1):
        if loops[at]:
            found.append((start, loops[at][-1]))
            start = loops[at][-1] + 1
            continue
        before = next((loops[i][-1] for i in range(at - 1, -1, -1) if loops[i]), last + 1)
        found.append((start, before - 1))
        start = max(start, before)
    return found[::-1]


def _part_at(ends: Sequence[tuple[int, int]], at: int) -> int:
    return next((part for part, (first, last) in enumerate(ends) if first <= at <= last), 0)


def _values(step: StepTrace, arrays: Iterable[Array], stacked: Iterable[Array] = ()) -> tuple[NamedTensor, ...]:
    """Arrays by the names of their dims, equal ones together; of `stacked` ones what a layer has."""
    counts: dict[NamedTensor, int] = {}
    whole = set(stacked)
    for array in arrays:
        value = step.of.value(array.var, array.scope, 1 if array in whole else 0)
        counts[value] = counts.get(value, 0) + 1
    return tuple(NamedTensor(v.dims, v.itemsize, v.is_computed, n) for v, n in counts.items())


def _fullest(step: StepTrace, moments: Sequence[Moment]) -> list[Moment]:
    """The moments that need the most, whichever dim a plan splits."""
    sizes = [
        [(array.size, {name for name, _ in step.of.dims(array.var, array.scope)}) for array in m.arrays]
        for m in moments
    ]
    names = {name for each in sizes for _, dims in each for name in dims}
    best: dict[int, Moment] = {}
    for name in ("", *sorted(names)):
        totals = [sum(size / (_FEWER if name in dims else 1) for size, dims in each) for each in sizes]
        if totals:
            best[totals.index(max(totals))] = moments[totals.index(max(totals))]
    return list(best.values())
