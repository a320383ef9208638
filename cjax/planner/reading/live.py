"""Which values of a flat trace are in memory at once, as a compiler that fuses would have it.

Numbers that are moved, rounded or combined one by one are made where they are read: what stands in memory is what a
product, a lookup, a loop or a reduction makes, and what a product, a lookup or a loop reads. A value stands from the
operation that makes it to the last that reads it, or reads what is made of it on the way.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.planner.reading.derivative import KERNEL, itemsize_of
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.identity import equation_key
from cjax.trace.jaxpr.primitives import FUSED, facts_of, name_of, named
from cjax.trace.jaxpr.view import is_scan, open_bodies, scan_of

# What takes a chip many instructions: made once where several operations read it.
DEAR = named("tanh erf erfc erf_inv atan2 lgamma digamma")


@dataclass(eq=False)
class Array:
    """A value of a trace: where it stands, as one jaxpr may be called in several places.

    Args:
      var: the variable.
      scope: that knows its dims.
      size: in bytes.
    """

    var: Var
    scope: Scope
    size: int = 0

    def __post_init__(self) -> None:
        aval = self.var.aval
        self.size = math.prod(aval.shape) * itemsize_of(aval)


@dataclass(eq=False)
class LiveOperation:
    """An equation, what it reads and writes, and the operations inside of it that are not its own body's."""

    eqn: Equation
    scope: Scope
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]

    @property
    def is_fused(self) -> bool:
        name = name_of(self.eqn)
        return name in FUSED or (name == "name" and self.eqn.params["name"] != KERNEL)

    @property
    def is_view(self) -> bool:
        """Whether it makes the same numbers, in the same dtype, known by another shape."""
        return (
            self.is_fused
            and bool(facts_of(self.eqn).view)
            and self.reads != ()
            and (
                self.reads[0].size == self.writes[0].size
                and self.reads[0].var.aval.dtype == self.writes[0].var.aval.dtype
            )
        )

    @property
    def takes_values(self) -> bool:
        """Whether it needs its operands in memory, rather than reading what they are made of."""
        return not (self.is_fused or facts_of(self.eqn).reduces)


def ops_of(jaxpr: Jaxpr, scope: Scope, inputs: Sequence[Array]) -> tuple[list[LiveOperation], list[Array | None]]:
    """The operations of a jaxpr, remats and custom derivatives looked through, and its results."""
    env: dict[Var, Array] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var in jaxpr.constvars:
        env[var] = Array(var, scope)
    ops: list[LiveOperation] = []
    same: dict[Hashable, LiveOperation] = {}

    def read(atom: Atom) -> Array | None:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        reads = tuple(x for x in map(read, eqn.invars) if x is not None)
        facts, inner = facts_of(eqn), scope.inner.get(id(eqn))
        body = next(open_bodies(eqn), None)
        if body is not None and inner is not None and (facts.remat or facts.own_derivative or facts.inlined):
            given = [read(a) or _constant(v, inner) for a, v in zip(eqn.invars, body.invars, strict=False)]
            if len(given) == len(body.invars):
                more, outs = ops_of(body, inner, given)
                ops += more
                for var, out in zip(eqn.outvars, outs, strict=True):
                    env[var] = out or _constant(var, scope)
                continue
        op = LiveOperation(eqn, scope, reads, tuple(Array(var, scope) for var in eqn.outvars))
        if op.is_fused:  # a compiler makes no number twice
            numbers = tuple(str(atom.val) if isinstance(atom, Literal) else env.get(atom) for atom in eqn.invars)
            op = same.setdefault((equation_key(eqn), numbers), op)
        if op.eqn is eqn:
            ops.append(op)
        env.update(zip(eqn.outvars, op.writes, strict=True))
    return ops, [read(atom) for atom in jaxpr.outvars]


def _constant(var: Var, scope: Scope) -> Array:
    array = Array(var, scope)
    array.size = 0
    return array


@dataclass
class Moment:
    """What is in memory while one operation runs."""

    op: LiveOperation
    at: int
    arrays: tuple[Array, ...]

    @property
    def size(self) -> int:
        return sum(array.size for array in self.arrays)


@dataclass
class Timeline:
    """The operations of a body, and when its values are in memory.

    Args:
      ops: in order.
      born, dies: by value that stands in memory, the first and the last operation that it is there for.
    """

    ops: list[LiveOperation]
    born: dict[Array, int] = field(default_factory=dict)
    dies: dict[Array, int] = field(default_factory=dict)
    inner: dict[int, tuple[Array, ...]] = field(default_factory=dict)
    roots: dict[Array, Array] = field(default_factory=dict)
    results: list[Array] = field(default_factory=list)

    def form(self, array: Array) -> Array:
        """What a value is but another shape of."""
        return self.roots.get(array, array)

    def moments(self) -> Iterator[Moment]:
        """What is alive at each operation that makes something."""
        starts: dict[int, list[Array]] = {}
        ends: dict[int, list[Array]] = {}
        for array, at in self.born.items():
            starts.setdefault(at, []).append(array)
            ends.setdefault(self.dies[array], []).append(array)
        alive: dict[Array, None] = {}
        for at in sorted({*starts, *ends, *self.inner}):
            mine = starts.get(at, [])
            dying = ends.get(at, [])
            alive.update(dict.fromkeys(mine))
            if 0 <= at < len(self.ops):
                shown = dict(alive)
                _reuse(shown, *_in_place(self.ops[at], mine, dying))
                yield Moment(self.ops[at], at, (*shown, *self.inner.get(at, ())))
            for array in dying:
                alive.pop(array, None)


def _in_place(op: LiveOperation, made: list[Array], dying: list[Array]) -> tuple[list[Array], list[Array]]:
    """What an operation makes in the place of what, of all that it reads for the last time."""
    if is_scan(op.eqn):
        loop = scan_of(op.eqn)
        carries = {atom for atom in loop.carries(op.eqn.invars) if not isinstance(atom, Literal)}
        last = set(loop.last(op.writes))
        return [x for x in made if x in last], [x for x in dying if x.var in carries]
    if op.is_fused or facts_of(op.eqn).scatter or name_of(op.eqn) == "dynamic_update_slice":
        # What is scattered to may be made here as well, as zeros are.
        return [x for x in made if x in op.writes], dying
    return [], []


def _reuse(shown: dict[Array, None], made: Sequence[Array], dying: Sequence[Array]) -> None:
    """Leaves out what an operation reads for the last time, where its result takes the place."""
    free = [array for array in dying if array not in made]
    for array in made:
        match = next((other for other in free if other.size == array.size and other in shown), None)
        if match is not None:
            free.remove(match)
            del shown[match]


def timeline(
    jaxpr: Jaxpr, scope: Scope, given: Sequence[Array], counted: Sequence[Array] = (), keeps: bool = True
) -> Timeline:
    """When the values of a body are in memory.

    Args:
      jaxpr: the body.
      scope: that knows its dims.
      given: its inputs, in memory before and after, and counted by whoever gives them.
      counted: of these, which are the body's own: slices that a loop hands it.
      keeps: whether its results stay to the end.
    """
    ops, results = ops_of(jaxpr, scope, given)
    flow = _Flow(ops, [array for array in results if array is not None])
    found = Timeline(ops, roots=flow.roots, results=flow.results)
    last, first = len(ops), {}
    # What is made of other values one by one is made where it is first read.
    for at in range(len(ops) - 1, -1, -1):
        op = ops[at]
        mine = [array for array in op.writes if array in flow.stands]
        if not mine:
            continue
        when = max(at, min(first.get(array, at) for array in mine)) if flow.waits(op) else at
        found.born.update(dict.fromkeys(mine, when))
        for source in flow.made_of[op.writes[0]]:
            first[source] = min(first.get(source, last), when)
            found.dies[source] = max(found.dies.get(source, -1), when)
    for array in map(flow.form, flow.results if keeps else ()):
        if array in found.born:
            found.dies[array] = last
    own = set(counted)
    for array in found.dies.keys() - found.born.keys():
        if array in own:
            found.born[array] = first[array]
        else:
            del found.dies[array]
    for array, at in found.born.items():
        found.dies.setdefault(array, at)
    found.inner.update((at, inside) for at, op in enumerate(ops) if (inside := _inside(op)))
    return found


class _Flow:
    """Which values of some operations stand in memory, and what each is made of."""

    def __init__(self, ops: Sequence[LiveOperation], results: list[Array]) -> None:
        self.results = results
        self.roots: dict[Array, Array] = {}
        for op in ops:
            if op.is_view:
                self.roots[op.writes[0]] = self.form(op.reads[0])
        self._readers = self._count(ops)
        self._sums = self._added(ops)
        self.stands = {array for op in ops if not op.is_fused or op in self._sums for array in op.writes}
        self.stands |= {self.form(array) for op in ops if op.takes_values for array in op.reads}
        dear = (array for op in ops if name_of(op.eqn) in DEAR for array in op.writes)
        self.stands |= {array for array in dear if self._readers.get(array, 0) > 1}
        self.stands |= {self.form(array) for array in results}
        self._makes = {array for op in ops for array in op.writes}
        self.made_of: dict[Array, tuple[Array, ...]] = {}
        for op in ops:
            if not op.is_view or op.writes[0] in self.stands:
                read = tuple(dict.fromkeys(source for array in op.reads for source in self._sources(array)))
                self.made_of.update(dict.fromkeys(op.writes, read))

    def form(self, array: Array) -> Array:
        """What a value is but another shape of."""
        return self.roots.get(array, array)

    def waits(self, op: LiveOperation) -> bool:
        """Whether an operation runs when its result is wanted."""
        return op.is_fused and op not in self._sums

    def _count(self, ops: Sequence[LiveOperation]) -> dict[Array, int]:
        """How many operations read each value, in whatever form."""
        readers: dict[Array, int] = {}
        for op in ops:
            for array in op.reads if not op.is_view else ():
                readers[self.form(array)] = readers.get(self.form(array), 0) + 1
        return readers

    def _added(self, ops: Sequence[LiveOperation]) -> set[LiveOperation]:
        """Additions of a product that nobody else reads: it is added to what is there as it is made."""
        kept = {self.form(array) for array in self.results}
        products = {array for op in ops if facts_of(op.eqn).product for array in op.writes}
        once = {array for array in products - kept if self._readers.get(array) == 1}
        sums = (op for op in ops if facts_of(op.eqn).adds)
        return {op for op in sums if any(self.form(array) in once for array in op.reads)}

    def _sources(self, array: Array) -> tuple[Array, ...]:
        """The values in memory that one is made of: itself, where it stands there or comes from outside."""
        array = self.form(array)
        return (array,) if array in self.stands or array not in self._makes else self.made_of[array]


def _inside(op: LiveOperation) -> tuple[Array, ...]:
    """What is alive inside a loop or a branch at its fullest moment, beside its operands and results."""
    inner = op.scope.inner.get(id(op.eqn))
    if inner is None or not (facts_of(op.eqn).loop or facts_of(op.eqn).branches):
        return ()
    fullest: tuple[Array, ...] = ()
    for body in open_bodies(op.eqn):
        given = [Array(var, inner) for var in body.invars]
        slices = scan_of(op.eqn).xs(given) if is_scan(op.eqn) else []
        line = timeline(body, inner, given, slices, keeps=False)
        turned = tuple(_turned(op, line, given)) if is_scan(op.eqn) else ()
        for moment in line.moments():
            if moment.size > sum(array.size for array in fullest[len(turned) :]):
                fullest = (*turned, *moment.arrays)
    return fullest


def _turned(op: LiveOperation, line: Timeline, given: Sequence[Array]) -> Iterator[Array]:
    """What a loop multiplies by in all turns, both ways: it is there in two layouts."""
    for array in scan_of(op.eqn).consts(given):
        products = [each for each in line.ops if facts_of(each.eqn).product and array in map(line.form, each.reads)]
        if len(products) > 1:
            yield Array(array.var, array.scope)
