"""The stretches of a trace that a plan tells apart: what stands before a stack of layers, one layer, what comes after.

A stretch is made of bodies: lists of equations that run one after the other, as often as the loops around them turn.
Calls are looked through, so that a body's steps say who reads what; an attention is one step, as it is one thing to
whoever computes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.trace.attention.find import Attention
from cjax.trace.attention.positions import attention_groups
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import layer_of
from cjax.trace.jaxpr.cost import cost
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.view import bodies, cond_of, opened, scan_of, while_of
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import LayerStack, find_stacks

Equations = tuple[Sequence[Equation], Sequence[Atom], Scope]


@dataclass(frozen=True)
class Spot:
    """A value where it stands: JAX may use one jaxpr, and so its variables, in several calls."""

    path: tuple[int, ...]
    var: Var


@dataclass(frozen=True)
class Operation:
    """An equation, or an attention, with the values that it reads (None for a number) and writes."""

    of: Equation | Attention
    scope: Scope
    reads: tuple[Spot | None, ...]
    writes: tuple[Spot, ...]

    @property
    def eqn(self) -> Equation | None:
        """The equation; None of an attention."""
        return None if isinstance(self.of, Attention) else self.of

    @property
    def name(self) -> str:
        return "attention" if isinstance(self.of, Attention) else name_of(self.of)


@dataclass(frozen=True)
class Body:
    """Steps that run one after the other, `times` times in one pass over their stretch.

    Args:
      steps: in order.
      results: values that are read outside.
      times: how often.
      scopes: by a value's path, the scope that knows its dims.
      lists: the lists of equations that the steps were taken from, with what is read of each later, and its scope.
    """

    steps: tuple[Operation, ...]
    results: frozenset[Spot]
    times: int
    scopes: Mapping[tuple[int, ...], Scope]
    lists: tuple[Equations, ...]
    is_loop: bool = False  # whether a loop turns around it, be it once


@dataclass(frozen=True)
class Stretch:
    """A part of a trace.

    Args:
      name: as people call it.
      repeats: how many layers it stands for; 1 for what is no stack.
      bodies: its equations.
      stack: the stack that it is a layer of, if it is.
    """

    name: str
    repeats: int
    bodies: tuple[Body, ...]
    stack: LayerStack | None = None


def stretches(trace: Trace) -> tuple[Stretch, ...]:
    """The parts of a trace in the order in which they run.

    A stack of layers is one that a pipeline could cut: others, too cheap for that, belong to what stands around them.
    """
    stacks = find_stacks(trace)
    top = trace.closed.jaxpr
    found: list[Stretch] = []
    at = 0
    for number, stack in enumerate(stacks, 1):
        found.append(Stretch(_between(number - 1, len(stacks)), 1, tuple(_top(trace, at, stack.start))))
        name = "layers" if len(stacks) == 1 else f"layers {number}"
        found.append(Stretch(name, stack.length, tuple(_layer(trace, stack)), stack))
        at = stack.stop
    found.append(Stretch(_between(len(stacks), len(stacks)), 1, tuple(_top(trace, at, len(top.eqns)))))
    return tuple(stretch for stretch in found if stretch.bodies or stretch.stack)


def _between(number: int, count: int) -> str:
    if not count:
        return "model"
    return "before" if number == 0 else "after" if number == count else f"between {number} and {number + 1}"


def _layer(trace: Trace, stack: LayerStack) -> Iterator[Body]:
    if isinstance(stack.of, RepeatedLayers):
        eqns, results = layer_of(trace.closed.jaxpr.eqns, stack.of)
        return _bodies(trace, eqns, results, trace.dims.top, (), 1)
    return _inside(trace, stack.of, scan_of(stack.of).body, trace.dims.top, (), 1)


def _top(trace: Trace, start: int, stop: int) -> Iterator[Body]:
    """The bodies of a stretch of the trace's own equations; stacks in it that are too cheap to be cut at turn there."""
    eqns = trace.closed.jaxpr.eqns
    later = {v for eqn in eqns[stop:] for v in variables(eqn)}
    later |= {v for v in trace.closed.jaxpr.outvars if not isinstance(v, Literal)}
    for run in (run for run in trace.runs if start <= run.start < stop):
        yield from _stretch(trace, start, run.start, later)
        layer, results = layer_of(eqns, run)
        yield from _bodies(trace, layer, results, trace.dims.top, (), run.repeats)
        start = run.stop
    yield from _stretch(trace, start, stop, later)


def _stretch(trace: Trace, start: int, stop: int, later: set[Var]) -> Iterator[Body]:
    eqns = trace.closed.jaxpr.eqns
    if start < stop:
        read = {v for eqn in eqns[stop:] for v in variables(eqn)} | later
        yield from _bodies(trace, eqns[start:stop], list(read), trace.dims.top, (), 1)


def _inside(
    trace: Trace, eqn: Equation, jaxpr: Jaxpr, scope: Scope, path: tuple[int, ...], times: int
) -> Iterator[Body]:
    yield from _bodies(trace, jaxpr.eqns, jaxpr.outvars, scope.inner[id(eqn)], (*path, id(eqn)), times)


def _bodies(
    trace: Trace, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, path: tuple[int, ...], times: int
) -> Iterator[Body]:
    """A list of equations as a body, and those of the loops in it."""
    flat = _Flat(trace)
    flat.add(eqns, results, scope, path)
    read = {flat.node(path, v) for v in results if not isinstance(v, Literal)}
    yield Body(
        tuple(flat.steps),
        frozenset(node for node in read if node is not None),
        times,
        flat.scopes,
        tuple(flat.lists),
        bool(path) or times > 1,
    )
    for eqn, inner, where in flat.loops:
        if name_of(eqn) == "scan":
            loop = scan_of(eqn)
            yield from _inside(trace, eqn, loop.body, inner, where, times * loop.length)
        elif name_of(eqn) == "while":  # nobody knows how often it turns: once, as `cost` has it
            yield from _inside(trace, eqn, while_of(eqn).body, inner, where, times)
        else:
            dearest = max(cond_of(eqn).branches, key=lambda branch: cost(branch).flops)
            yield from _inside(trace, eqn, dearest.jaxpr, inner, where, times)


@dataclass
class _Flat:
    """The steps of a list of equations, calls looked through."""

    trace: Trace
    steps: list[Operation] = field(default_factory=list)
    loops: list[tuple[Equation, Scope, tuple[int, ...]]] = field(default_factory=list)
    alias: dict[Spot, Spot | None] = field(default_factory=dict)
    scopes: dict[tuple[int, ...], Scope] = field(default_factory=dict)
    lists: list[Equations] = field(default_factory=list)

    def node(self, path: tuple[int, ...], atom: Atom) -> Spot | None:
        """The value that an atom stands for; None for a number."""
        if isinstance(atom, Literal):
            return None
        found: Spot | None = Spot(path, atom)
        while found is not None and found in self.alias:
            found = self.alias[found]
        return found

    def add(self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, path: tuple[int, ...]) -> None:
        self.scopes[path] = scope
        self.lists.append((eqns, results, scope))
        groups = attention_groups(self.trace, eqns, results, scope)
        inside = {id(eqn): group for group in groups for eqn in group.eqns}
        last = {id(group.eqns[-1]) for group in groups}
        for eqn in eqns:
            group = inside.get(id(eqn))
            if group is None:
                self._one(eqn, scope, path)
            elif id(eqn) in last:
                self._step(group.of, group.ins, group.outs, scope, path)

    def _step(
        self, of: Equation | Attention, ins: Sequence[Atom], outs: Sequence[Var], scope: Scope, path: tuple[int, ...]
    ) -> None:
        reads = tuple(self.node(path, atom) for atom in ins)
        writes = tuple(Spot(path, var) for var in outs)
        self.steps.append(Operation(of, scope, reads, writes))

    def _one(self, eqn: Equation, scope: Scope, path: tuple[int, ...]) -> None:
        facts = facts_of(eqn)
        body = opened(eqn.params[facts.body]) if facts.body else None
        if body is not None and id(eqn) in scope.inner and len(body.invars) == len(eqn.invars):
            where, inner = (*path, id(eqn)), scope.inner[id(eqn)]
            for var, atom in zip(body.invars, eqn.invars, strict=True):
                self.alias[Spot(where, var)] = self.node(path, atom)
            self.add(body.eqns, body.outvars, inner, where)
            for var, atom in zip(eqn.outvars, body.outvars, strict=True):
                self.alias[Spot(path, var)] = self.node(where, atom)
            return
        if (facts.loop or facts.branches) and any(bodies(eqn)) and id(eqn) in scope.inner:
            self.loops.append((eqn, scope, path))
        self._step(eqn, eqn.invars, eqn.outvars, scope, path)
