"""What a stage of a pipeline saves of each layer and micro-batch, and what stages send: as `cjax.pipeline` does it."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import Atom, Literal, make_jaxpr
from cjax.planner.reading.derivative import Named, Planned, itemsize_of, named
from cjax.planner.reading.naming import Naming
from cjax.planner.work import NamedTensor
from cjax.trace.emit.backward import Derivative, is_real
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import LayerStack, cut, widened
from cjax.trace.stages.stages import Stages

Arrays = list[Any]
Tensors = tuple[NamedTensor, ...]
Staged = tuple[Tensors, Tensors, Tensors, Tensors]  # saved, crossing, payload, what of that passes as it is


def staged_of(trace: Trace, naming: Naming, stacks: Sequence[LayerStack], hooks: Planned) -> list[Staged]:
    """For each stack, what a stage saves of a layer, what its B hands to W, what stages send, and what of that all of
    its layers read and hand on as it is.

    Args:
      trace: of the loss.
      naming: of its dims.
      stacks: of its layers.
      hooks: how its equations are evaluated.
    """
    return [stack.read() for stack in _stacks(trace, naming, stacks, hooks)]


def message_of(trace: Trace, naming: Naming, stacks: Sequence[LayerStack], hooks: Planned) -> Tensors:
    """What a message from one stage to the next has room for, all of it sent in every tick; arguments as above.

    One form of message serves all stacks, and values of one shape and dtype share a place in it, as
    `cjax.pipeline.buffers` packs them.
    """
    found: list[NamedTensor] = []
    for stack in _stacks(trace, naming, stacks, hooks):
        handed = stack.handed()
        for value in set(handed):
            found += [value] * (handed.count(value) - found.count(value))
    return tuple(sorted(found, key=str))


def _stacks(trace: Trace, naming: Naming, stacks: Sequence[LayerStack], hooks: Planned) -> Iterator["_Stack"]:
    """Each stack with what its first stage is handed."""
    stacks = [widened(stack, trace, hooks) for stack in stacks]
    mine = {i for stack in stacks for group in stack.weights for i in group}
    trained = [(i,) for i in trace.leaves_of("params") if i not in mine]
    given = [(i,) for i, leaf in enumerate(trace.leaves) if leaf.kind != "params" and i not in mine]
    stages = Stages(cut(trace, stacks), hooks, trained, given)
    shared, others = ([_struct(trace, i) for (i,) in groups] for groups in (trained, given))
    payload = jax.eval_shape(stages.enter, shared, others)
    for k in range(len(stacks)):
        yield _Stack(trace, naming, stages, k, shared, others, payload)
        if k + 1 < len(stacks):
            payload = jax.eval_shape(lambda t, g, p, k=k: stages.leave(k, t, g, p), shared, others, payload)


def _struct(trace: Trace, leaf: int, first: int = 0) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(trace.leaves[leaf].shape[first:], trace.leaves[leaf].dtype)


class _Stack:
    """One stack of layers on its stages."""

    def __init__(
        self, trace: Trace, naming: Naming, stages: Stages, k: int, shared: Arrays, given: Arrays, payload: Arrays
    ) -> None:
        self._trace, self._naming, self._stages, self._k, self._payload = trace, naming, stages, k, payload
        self._stack, cut = stages.cut.stacks[k], stages.cut
        first = 0 if self._stack.is_run else 1
        self._leaves = [group[0] for group in self._stack.weights]
        stored = [_struct(trace, i, first) for i in self._leaves]
        self._first = first
        self._ready = jax.eval_shape(lambda ws: stages.ready(k, ws), stored)
        self._once = jax.eval_shape(lambda t, g: stages.once(k, t, g), shared, given)
        self._recomputed = jax.eval_shape(lambda t, g: stages.recomputed(k, t, g), shared, given)
        self._trained = [trace.leaves[i].kind == "params" for i in self._leaves]
        pairs = zip(self._once, cut.learned[k], strict=True)
        self._learned = [is_learned and is_real(x) for x, is_learned in pairs]

    def _layer(self, own: Arrays, fixed: Arrays, payload: Arrays) -> Arrays:
        own_, fixed_ = iter(own), iter(fixed)
        ready = [next(own_) if trained else None for trained in self._trained]
        once = [next(own_) if learned else None for learned in self._learned]
        ready = [next(fixed_) if w is None else w for w in ready]
        once = [next(fixed_) if x is None else x for x in once]
        *recomputed, index = fixed_
        return self._stages.layer(self._k, ready, once, recomputed, index, payload)

    def read(self) -> Staged:
        """What the layer saves, hands over and is handed."""
        names = self._names()
        own = [x for x, trained in zip(self._ready, self._trained, strict=True) if trained]
        own += [x for x, learned in zip(self._once, self._learned, strict=True) if learned]
        fixed = [x for x, trained in zip(self._ready, self._trained, strict=True) if not trained]
        fixed += [x for x, learned in zip(self._once, self._learned, strict=True) if not learned]
        fixed += [*self._recomputed, jax.ShapeDtypeStruct((), jnp.int32)]
        layer = Derivative(self._stages.hooks.block(self._layer), own, fixed, self._payload)

        def both(own: Arrays, fixed: Arrays, payload: Arrays, gradients: Arrays) -> tuple[Arrays, Arrays]:
            _, saved = layer.forward(own, fixed, payload)
            _, crossing = layer.backward(own, fixed, saved, gradients)
            return saved, crossing

        closed = simplify(make_jaxpr(both)(own, fixed, self._payload, self._payload))
        found = named(closed, [*names, *names[len(names) - len(self._payload) :]], self._naming)
        results = [*closed.jaxpr.outvars]
        saved, crossing = results[: len(layer.saved)], results[len(layer.saved) :]
        start = len(own) + len(fixed)
        payload = closed.jaxpr.invars[start : start + len(self._payload)]
        passing = payload[len(payload) - len(self._stages.cut.transferred[self._k]) :]
        return _values(found, saved), _values(found, crossing), _values(found, payload), _values(found, passing)

    def handed(self) -> list[NamedTensor]:
        """What it is handed, by the names of its dims."""
        names = self._names()[-len(self._payload) :] if self._payload else []
        of = [classes or (-1,) * len(x.shape) for classes, x in zip(names, self._payload, strict=True)]
        return [
            NamedTensor(
                self._naming.dims(classes, x.shape), itemsize_of(x), bool(jnp.issubdtype(x.dtype, jnp.floating))
            )
            for classes, x in zip(of, self._payload, strict=True)
        ]

    def _names(self) -> list[tuple[int, ...]]:
        """For each input of the layer, the classes of its dims in the trace."""
        trace, k = self._trace, self._k
        cut = self._stages.cut
        weights = [trace.classes_of(i)[self._first :] for i in self._leaves]

        def of(entry: tuple[Any, ...]) -> tuple[int, ...]:
            classes = trace.dims.of(entry[0])
            return (-1, *classes) if len(entry) > 1 else classes

        once = [of(entry) for entry in cut.once[k]]
        own = [c for c, trained in zip(weights, self._trained, strict=True) if trained]
        own += [c for c, learned in zip(once, self._learned, strict=True) if learned]
        fixed = [c for c, trained in zip(weights, self._trained, strict=True) if not trained]
        fixed += [c for c, learned in zip(once, self._learned, strict=True) if not learned]
        fixed += [of(entry) for entry in cut.recomputed[k]] + [()]
        handed = [() if isinstance(a, Literal) else trace.dims.of(a) for a in self._stack.initial]
        moved = [of(entry) for entry in cut.transferred[k]]
        between = [()] * (len(self._payload) - len(handed) - len(moved))
        return [*own, *fixed, *handed, *between, *moved]


def _values(found: Named, variables: Sequence[Atom]) -> tuple[NamedTensor, ...]:
    return tuple(found.value(var) for var in variables)
