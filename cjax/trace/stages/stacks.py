"""A trace cut at its layer stacks: which values cross the cuts, and how each gets to the layers that read it.

A pipeline runs the layers of a stack on different devices, and for each micro-batch at other times. Of what a layer
reads besides what it is handed, there are three kinds: what depends on no micro-batch is made *once*; what depends on
the micro-batch but on no parameter (masks, random keys) is *recomputed* by each layer that reads it; only what depends
on both is *transferred* with the activations, and its gradient back.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.trace.emit.emit import Hooks, layer_of
from cjax.trace.jaxpr.cost import cost, equation_cost
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import scan_of, standing_for
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.reading import Trace
from cjax.trace.stages.counters import depends

# A value, or the values of all layers that are stacked on a new dim 0.
Entry = tuple[Var, ...]
MOVES = frozenset({"batch", "key", "model_state"})  # differ from micro-batch to micro-batch
MADE_OF = frozenset({"params", "batch", "stack"})  # what a counter does not depend on
NONE: frozenset[str] = frozenset()
# Each stack is cut over all stages, and a further one costs every stage a chunk more: two small layers of a tokenizer
# in front are not worth that, and run whole, before the first stage's layers.
LEAST_SHARE = 0.1  # of the arithmetic of the dearest stack; a cheaper one stays where it is


@dataclass(frozen=True)
class LayerStack:
    """A stack of layers among the equations of a trace: a `RepeatedLayers`, or a loop that the author wrote.

    `weights` are the inputs of the trace that layers have one each of: the leaves of all layers in order, or the one
    leaf that holds them all on its dim 0. `reads` is all else that a layer reads from outside, as entries; `xs` names
    the variable inside of a layer and the entry it is a layer's part of, weights included.
    """

    start: int
    stop: int
    length: int
    of: RepeatedLayers | Equation  # repeated layers, or the author's own scan
    weights: tuple[tuple[int, ...], ...]
    reads: tuple[Entry, ...]
    xs: tuple[tuple[Var, Entry], ...]
    initial: tuple[Atom, ...]
    final: tuple[Var, ...]
    outputs: tuple[Entry, ...]  # that layers give, one each; empty where nobody reads them
    last_only: tuple[Var | None, ...]  # None where nobody reads it
    flops: int
    layered: bool  # whether layers have weights of their own, be they kept apart or not

    @property
    def is_run(self) -> bool:
        return isinstance(self.of, RepeatedLayers)


@dataclass(frozen=True)
class States:
    """Leaves of the model state that are made of examples, such as the running averages of a BatchNorm, by who makes
    them.

    Each is a tuple of leaves of the model state, counted from 0: one for each layer, or one alone. `layers` has for
      each stack the
    place among its layers' outputs and the values; `before` and `after` are made outside of the stacks.
    """

    layers: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def every(self) -> set[int]:
        return {i for of in self.layers for _, group in of for i in group} | {*self.before, *self.after}


@dataclass(frozen=True)
class CutTrace:
    """The stacks of a trace in order, and for each what its layers read: see the module."""

    trace: Trace
    stacks: tuple[LayerStack, ...]
    once: tuple[tuple[Entry, ...], ...]
    learned: tuple[tuple[bool, ...], ...]  # which of `once` depend on parameters
    recomputed: tuple[tuple[Entry, ...], ...]
    transferred: tuple[tuple[Entry, ...], ...]  # also what is only read after the stack
    states: "States"

    @functools.cached_property
    def items(self) -> tuple[Equation | RepeatedLayers, ...]:
        """What is evaluated outside of the stacks, in order: equations, and runs too cheap to be cut at."""
        return tuple(_items(self.trace, self.stacks))

    def results(self) -> list[Atom]:
        """The variables that are results of the loss, the new model state aside."""
        outvars = self.trace.closed.jaxpr.outvars
        return list(outvars[: len(outvars) - len(self.trace.leaves_of("model_state"))])

    def needed(self, targets: Iterable[Atom], known: Iterable[Var]) -> list[Equation | RepeatedLayers]:
        """The items that compute `targets`, from `known` and the inputs."""
        live = {v for v in targets if not isinstance(v, Literal)} - set(known)
        known, found = set(known), []
        for item in reversed(self.items):
            if live & set(writes(item, self.trace)):
                found.append(item)
                live |= set(reads(item, self.trace)) - known
        return found[::-1]


def find_stacks(trace: Trace, least: float = LEAST_SHARE) -> tuple[LayerStack, ...]:
    """All stacks of layers with weights of their own, in order; empty if there is none. One with less than `least` of
    the arithmetic of the dearest is left out."""
    eqns = trace.closed.jaxpr.eqns
    found = [stack_of_run(trace, run) for run in trace.runs]
    # A scan within one of the repeated layers is part of that layer.
    inside = [range(run.start, run.stop) for run in trace.runs]
    for at, eqn in enumerate(eqns):
        if name_of(eqn) == "scan" and not any(at in places for places in inside):
            found.append(_of_scan(trace, eqn, at))
    # Layers without weights need no stage to keep them, and those that hand nothing on are no stack that activations
    # pass through.
    found = [stack for stack in found if stack.layered and stack.initial]
    most = max((stack.flops for stack in found), default=0)
    return tuple(sorted((s for s in found if s.flops >= least * most), key=lambda stack: stack.start))


def cut(trace: Trace, stacks: Sequence[LayerStack]) -> CutTrace:
    """Say what crosses the borders of the stacks."""
    on_what, states = _depends(trace, stacks), find_states(trace, stacks)
    made = _made(trace, stacks)
    outside = _items(trace, stacks)
    maker = {var: item for item in outside for var in writes(item, trace)}

    def kind(entry: Entry) -> str:
        """once, recomputed or transferred: by what the entry depends on."""
        on = frozenset().union(*(on_what.get(v, frozenset()) for v in entry))
        # To recompute what parameters are in, each stage would compute its gradient too, and all would have to be added
        # up: it is transferred, and its gradient comes back the same way. What only the micro-batch decides is cheaper
        # made again than sent, and has no gradient.
        if "stack" in on or ("params" in on and on & MOVES):
            return "transferred"
        return "recomputed" if on & MOVES else "once"

    once = [tuple(e for e in stack.reads if kind(e) == "once") for stack in stacks]
    recomputed = [tuple(e for e in stack.reads if kind(e) == "recomputed") for stack in stacks]
    transferred: list[tuple[Entry, ...]] = []
    used: set[Var] = set()
    outvars = trace.closed.jaxpr.outvars
    num_results = len(outvars) - len(trace.leaves_of("model_state"))
    targets = [*outvars[:num_results], *(outvars[num_results + i] for i in states.after)]
    # Last stack first: what is read behind a stack, and was made in front of it, has to pass through it too, and so
    # through all that are in front.
    for k in reversed(range(len(stacks))):
        mine = {v for e in (stacks[k].final, stacks[k].last_only, *stacks[k].outputs) for v in e if v is not None}
        wanted = dict.fromkeys(e for e in stacks[k].reads if kind(e) == "transferred")
        seen: set[Var] = set()
        queue = [v for v in targets if not isinstance(v, Literal)]
        while queue:
            var = queue.pop()
            if var in mine:
                used.add(var)
            if var in seen or var in mine or var not in made:
                continue
            seen.add(var)
            if kind((var,)) == "transferred" and made[var] < stacks[k].start:
                wanted[(var,)] = None
            else:
                # Neither made by this stack nor in front of it: whoever made it tells what it needs.
                assert var in maker, var
                queue += reads(maker[var], trace)
        transferred.append(tuple(wanted))
        targets = [*stacks[k].initial, *(v for entry in wanted for v in entry)]
    learned = [tuple(any("params" in on_what.get(v, ()) for v in entry) for entry in entries) for entries in once]
    kept = [
        replace(
            stack,
            outputs=tuple(entry if used & set(entry) else () for entry in stack.outputs),
            last_only=tuple(var if var in used else None for var in stack.last_only),
        )
        for stack in stacks
    ]
    return CutTrace(
        trace, tuple(kept), tuple(once), tuple(learned), tuple(recomputed), tuple(transferred[::-1]), states
    )


def widened(stack: LayerStack, trace: Trace, hooks: Hooks) -> LayerStack:
    """`stack` with all that its layers read as these hooks evaluate them: an attention may be read from where its masks
    are made, not from the masks."""
    if not isinstance(stack.of, RepeatedLayers):
        return stack
    eqns, results = layer_of(trace.closed.jaxpr.eqns, stack.of)
    own = {inner for inner, _ in stack.xs} | {read for _, read, _, _ in stack.of.carries}
    own |= {var for eqn in eqns for var in eqn.outvars} | {entry[0] for entry in stack.reads if len(entry) == 1}
    # A ring's attention makes its masks again from positions, which the layer itself, reading the mask, does not.
    groups = hooks.groups(eqns, results, trace.dims.top)
    more = dict.fromkeys((v,) for group in groups for v in group.ins if v not in own)
    return replace(stack, reads=(*stack.reads, *more))


def find_states(trace: Trace, stacks: Sequence[LayerStack]) -> States:
    """Leaves of the model state that are made of examples. One that is only cast behind a stack is its layers'."""
    casts = _casts(trace, stacks)
    # State keeps its own dtype, so under bfloat16 a cast follows the layers' result; without looking through it, their
    # state would seem to be made behind the stack, on another stage.
    new, on = [standing_for(var, casts) for var in _new_model_state(trace)], _depends(trace, stacks)
    mine = {var: i for i, var in enumerate(new) if not isinstance(var, Literal) and on.get(var, NONE) & MADE_OF}
    layers = tuple(
        tuple((j, tuple(mine[v] for v in entry)) for j, entry in enumerate(stack.outputs) if set(entry) <= set(mine))
        for stack in stacks
    )
    inside = {i for of in layers for _, group in of for i in group}
    outside = {i: "stack" in on[var] for var, i in mine.items() if i not in inside}
    return States(
        layers, tuple(i for i, late in outside.items() if not late), tuple(i for i, late in outside.items() if late)
    )


def reads_states(trace: Trace, stacks: Sequence[LayerStack]) -> list[str]:
    """Names of leaves of the model state that are made of examples and decide about results: no micro-batch could start
    before the one in front of it is through."""
    states = find_states(trace, stacks).every
    names = [trace.leaves[i].name for i in trace.leaves_of("model_state")]
    # In a pipeline, micro-batches overlap: the second one enters before the state that the first one makes is there. As
    # long as no result reads that state, its order does not show.
    on = _depends(trace, stacks, {i: f"state {i}" for i in states})
    outvars = trace.closed.jaxpr.outvars
    results = outvars[: len(outvars) - len(names)]
    found = frozenset().union(*(on.get(v, NONE) for v in results if not isinstance(v, Literal)))
    return [names[i] for i in sorted(states) if f"state {i}" in found]


def torn_states(trace: Trace, stacks: Sequence[LayerStack]) -> list[str]:
    """Names of leaves of the model state that are made of examples in one place, by layers of a stack, before or behind
    them, and read in another: a stage would read what it was before the step."""
    states = find_states(trace, stacks)
    layers = {i: k for k, of in enumerate(states.layers) for _, group in of for i in group}
    maker: dict[int, str | int] = dict.fromkeys(states.before, "before") | dict.fromkeys(states.after, "after") | layers
    on, casts = _depends(trace, stacks, {i: f"state {i}" for i in maker}), _casts(trace, stacks)
    new = _new_model_state(trace)

    def others(variables: Iterable[Atom | None], here: str | int | None) -> set[int]:
        kinds = frozenset().union(*(on.get(v, NONE) for v in variables if isinstance(v, Var)))
        return {i for i, where in maker.items() if where != here and f"state {i}" in kinds}

    torn = set().union(*(others([new[i]], where) for i, where in maker.items()))
    mine = {trace.closed.jaxpr.invars[at] for at in trace.leaves_of("model_state")}
    for k, stack in enumerate(stacks):
        # A layer may read its own state, as BatchNorm does to average: that is where it is kept up to date.
        own = {entry for _, entry in stack.xs if {standing_for(v, casts) for v in entry} <= mine}
        torn |= others((*stack.final, *stack.last_only, *(v for entry in stack.outputs for v in entry)), k)
        torn |= others((v for entry in stack.reads if entry not in own for v in entry), None)
    names = [trace.leaves[i].name for i in trace.leaves_of("model_state")]
    return [names[i] for i in sorted(torn)]


def _casts(trace: Trace, stacks: Sequence[LayerStack]) -> dict[Var, Atom]:
    """What results of casts outside of the stacks are made of."""
    eqns = _items(trace, stacks)
    return {eqn.outvars[0]: eqn.invars[0] for eqn in eqns
            if not isinstance(eqn, RepeatedLayers) and name_of(eqn) == "convert_element_type"}  # fmt: skip


def _new_model_state(trace: Trace) -> list[Atom]:
    outvars = trace.closed.jaxpr.outvars
    return list(outvars[len(outvars) - len(trace.leaves_of("model_state")) :])


def reads(item: Equation | RepeatedLayers, trace: Trace) -> list[Var]:
    """The variables from outside that an equation or a run reads."""
    if not isinstance(item, RepeatedLayers):
        return variables(item)
    eqns = trace.closed.jaxpr.eqns[item.start : item.stop]
    written = {var for eqn in eqns for var in eqn.outvars}
    return list(dict.fromkeys(v for eqn in eqns for v in variables(eqn) if v not in written))


def writes(item: Equation | RepeatedLayers, trace: Trace) -> list[Var]:
    eqns = trace.closed.jaxpr.eqns[item.start : item.stop] if isinstance(item, RepeatedLayers) else (item,)
    return [var for eqn in eqns for var in eqn.outvars]


def _items(trace: Trace, stacks: Sequence[LayerStack]) -> list[Equation | RepeatedLayers]:
    """What stands outside of the stacks, in order: equations, and repeated layers too cheap to be cut at."""
    starts: dict[int, LayerStack | RepeatedLayers] = {stack.start: stack for stack in stacks}
    # Of repeated layers that only a part is a stack of, the others are equations among others.
    starts |= {run.start: run for run in trace.runs if not any(_overlap(run, stack) for stack in stacks)}
    items: list[Equation | RepeatedLayers] = []
    at = 0
    while at < len(trace.closed.jaxpr.eqns):
        found = starts.get(at)
        if not isinstance(found, LayerStack):
            items.append(found or trace.closed.jaxpr.eqns[at])
        at = found.stop if found else at + 1
    return items


def _overlap(run: RepeatedLayers, stack: LayerStack) -> bool:
    return run.start < stack.stop and stack.start < run.stop


def _made(trace: Trace, stacks: Sequence[LayerStack]) -> dict[Var, int]:
    """The number of the equation that makes each variable; for results of a stack its last."""
    made = {var: at for at, eqn in enumerate(trace.closed.jaxpr.eqns) for var in eqn.outvars}
    for stack in stacks:
        made.update({v: stack.stop - 1 for v in made if stack.start <= made[v] < stack.stop})
    return made


def _depends(
    trace: Trace, stacks: Sequence[LayerStack], named: Mapping[int, str] = MappingProxyType({})
) -> dict[Var, frozenset[str]]:
    """The kinds of inputs that each variable depends on; "stack" if on what layers have made of examples. Some leaves
    of the model state may have names of their own."""
    # A micro-batch's index is only ever folded into keys, and moves as they do.
    kinds = {"index": "key"}
    own = {trace.leaves_of("model_state")[i]: name for i, name in named.items()}
    on = {
        var: frozenset({own.get(i, kinds.get(leaf.kind, leaf.kind))})
        for i, (var, leaf) in enumerate(zip(trace.closed.jaxpr.invars, trace.leaves, strict=True))
    }
    eqns = trace.closed.jaxpr.eqns
    inside = {id(eqn) for stack in stacks for eqn in eqns[stack.start : stack.stop]}

    def mark(eqn: Equation, kinds: frozenset[str]) -> frozenset[str]:
        return kinds | {"stack"} if id(eqn) in inside and kinds & {"batch", "params", "frozen"} else kinds

    depends(eqns, on, mark)
    return on


def _weights(trace: Trace) -> tuple[dict[Var, int], set[int]]:
    """The place of each input of the trace, and which of them are weights."""
    index: dict[Var, int] = {var: i for i, var in enumerate(trace.closed.jaxpr.invars)}
    return index, {*trace.leaves_of("params"), *trace.leaves_of("frozen")}


def stack_of_run(trace: Trace, run: RepeatedLayers) -> LayerStack:
    """Repeated layers, found in an unrolled trace, as a layer stack."""
    index, weights = _weights(trace)
    eqns = trace.closed.jaxpr.eqns[run.start : run.stop]
    t = run.template
    layer = trace.closed.jaxpr.eqns[run.start + t * run.period : run.start + (t + 1) * run.period]
    own = {group[t] for group in run.stacked} | {read for _, read, _, _ in run.carries}
    own |= {var for eqn in layer for var in eqn.outvars}
    shared = dict.fromkeys(v for eqn in layer for v in variables(eqn) if v not in own)
    # A weight that is read outside of its layer too (tied embeddings) gets gradients from two places, on two stages. It
    # stays with the parameters that all stages have, whose gradients are added up over them.
    elsewhere = _read_elsewhere(trace, run)
    kinds = [{trace.leaves[index[v]].kind if index.get(v, -1) in weights else "" for v in g} for g in run.stacked]
    # One slot holds a leaf of all layers, trained or frozen; where some layers' is and others' is not (LoRA on half of
    # them), they are read from outside, one by one.
    alike = [kind in ({"params"}, {"frozen"}) for kind in kinds]
    groups = [g for g, fits in zip(run.stacked, alike, strict=True) if fits and not elsewhere & set(g)]
    others = [g for g in run.stacked if g not in groups]
    return LayerStack(
        run.start, run.stop, run.repeats, run, tuple(tuple(index[v] for v in g) for g in groups),
        (*((v,) for v in shared), *others), tuple((g[t], g) for g in run.stacked),
        tuple(first for first, *_ in run.carries), tuple(last for *_, last in run.carries),
        run.outputs, tuple(group[-1] for group in run.last_only), sum(equation_cost(eqn).matmul_flops for eqn in eqns),
        any("" not in kind for kind in kinds),
    )  # fmt: skip


def _read_elsewhere(trace: Trace, run: RepeatedLayers) -> set[Var]:
    """Variables that are read outside of a run too, or by another layer than their own: tied weights."""
    jaxpr = trace.closed.jaxpr
    eqns = [*jaxpr.eqns[: run.start], *jaxpr.eqns[run.stop :]]
    found = {v for eqn in eqns for v in variables(eqn)} | {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    counts: dict[Var, int] = {}
    for group in run.stacked:
        for var in group:
            counts[var] = counts.get(var, 0) + 1
    return found | {var for var, count in counts.items() if count > 1}


def _of_scan(trace: Trace, eqn: Equation, at: int) -> LayerStack:
    (index, weights), loop = _weights(trace), scan_of(eqn)
    pairs = [
        (inner, v)
        for inner, v in zip(loop.xs(loop.body.invars), loop.xs(eqn.invars), strict=True)
        if not isinstance(v, Literal)
    ]
    assert len(pairs) == len(loop.xs(eqn.invars)), "numbers have no dim to loop over"
    readers = [v for other in trace.closed.jaxpr.eqns for v in variables(other)]
    # Read here alone, as above.
    leaves = {v: (index[v],) for _, v in pairs if index.get(v, -1) in weights and readers.count(v) == 1}
    layered = any(index.get(v, -1) in weights for _, v in pairs)
    xs = tuple((inner, (outer,)) for inner, outer in pairs)
    others = [(v,) for _, v in pairs if v not in leaves]
    shared = dict.fromkeys(v for v in loop.consts(eqn.invars) if not isinstance(v, Literal))
    flops = cost(loop.closed).matmul_flops * loop.length
    # Stages follow the order of the layers' rows; a loop that goes through them backwards would need its own.
    usable = not loop.reverse
    return LayerStack(
        at, at + 1, loop.length, eqn, tuple(leaves.values()) if usable else (),
        (*((v,) for v in shared), *others), xs, tuple(loop.carries(eqn.invars)), tuple(loop.last(eqn.outvars)),
        tuple((v,) for v in loop.ys(eqn.outvars)), (), flops, layered and usable,
    )  # fmt: skip
