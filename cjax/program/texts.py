"""Passes over new tokens in programs that walk: weights come layer by layer, and so does what layers remember."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from cjax.gradients import LaidOut
from cjax.planner.homes import Home, Homes, Kind
from cjax.program.composed import Composed, batch_shardings
from cjax.program.evaluation import Evaluator, Function
from cjax.program.lockstep import Lockstep
from cjax.program.scores import layout_of
from cjax.program.state import State
from cjax.program.walked import WalkedState
from cjax.trace.source import TraceSource
from cjax.tree import PyTree
from cjax.walk.memory import MemoryWalk, remembering
from cjax.walk.stores import LayerRows, make_rows
from cjax.walk.walker import Walker

Step = Callable[[Any, PyTree, PyTree], tuple[jax.Array, PyTree]]  # model, given, memory -> outcome, new memory


class Texts:
    """Passes of one program.

    Args:
      composed: what the program is made of; it walks.
      step: a pass: `(model, given, memory) -> (outcome, memory)`. A function of a module: it says which pass it is.
    """

    def __init__(self, composed: Composed, step: Step) -> None:
        # As the model alone would continue a text: in the precision of its weights, whatever it was trained in.
        self._composed = dataclasses.replace(composed, plan=dataclasses.replace(composed.plan, precision="float32"))
        self._step, self._evaluate = step, Evaluator(self._composed, Lockstep(self._composed))
        self._made: dict[Hashable, MemoryWalk] = {}

    def model(self) -> Any:
        """The user's own model, its arrays shapes alone."""
        capture = self._composed.capture
        return capture.rebuild(capture.params_shape, capture.frozen_shape, capture.model_state_shape)

    def score(self, state: State, given: PyTree, function: Function) -> PyTree:
        """What a function of the model makes of what is given, as `evaluate` would have it."""
        return self._evaluate(state, [given], function)

    def memory(self, state: State, given: PyTree, memory: PyTree, known: Sequence[Sequence[jax.Array]]) -> LayerRows:
        """Memory of all layers before the first pass.

        Args:
          state: of the program.
          given: of the first pass, shapes.
          memory: for each layer its arrays, shapes.
          known: for each layer the last of them; others are zeros.
        """
        walk, walker = self._walk(given, memory), self._composed.walker
        assert walker is not None and isinstance(state, WalkedState)
        structs = walk.structs()
        homes = self._homes(walker, state._held.homes, len(memory), _num_bytes(structs))
        rows, shardings = make_rows(structs, homes, "inputs", walk.whose), tuple(s.sharding for s in structs)
        for layer, some in enumerate(known):
            first = len(structs) - len(some)
            rows.put(layer, (*walk.empty()[:first], *jax.device_put(tuple(some), shardings[first:])))
        return rows

    def _homes(self, walker: Walker, homes: Homes, num_layers: int, size: int) -> list[Home]:
        """On the devices, or on the host where layers' inputs are to be, or a budget has no room. What it has is what
        training has there and texts have not: gradients, and what layers were handed."""
        plan = self._composed.plan
        if plan.budget is None or "activations" in plan.offload:
            return ["host" if "activations" in plan.offload else "device"] * num_layers
        kinds: tuple[Kind, ...] = ("grads", "inputs")
        room = sum(
            _num_bytes(walker.structs(kind, k)) * homes.of[kind][k].count("device")
            for kind in kinds
            for k in range(len(walker.lengths))
        )
        return ["device" if (layer + 1) * size <= room else "host" for layer in range(num_layers)]

    def __call__(self, state: State, given: PyTree, memory: PyTree, rows: LayerRows) -> jax.Array:
        """The outcome of a pass; `rows` are new behind it.

        Args:
          state: of the program.
          given: arrays, placed.
          memory: for each layer its arrays, shapes.
          rows: what `memory` gave.
        """
        assert isinstance(state, WalkedState)
        shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        walk, rest = self._walk(shape, memory), (state._params, state._frozen, state._model_state)
        return walk(state._held, rows, *rest, given, state._key)

    def placed(self, given: PyTree) -> PyTree:
        """Arrays of a pass where they belong."""
        return jax.device_put(given, batch_shardings(self._composed.mesh, given))

    def _walk(self, given: PyTree, memory: PyTree) -> MemoryWalk:
        leaves, treedef = jax.tree.flatten((given, memory))
        key = (treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if key not in self._made:
            self._made[key] = self._make(given, memory)
        return self._made[key]

    def _make(self, given: PyTree, memory: PyTree) -> MemoryWalk:
        composed, step = self._composed, self._step
        assert composed.walker is not None
        batch = {"memory": memory, "other": given}
        call: Any = lambda model, batch, key, train: (None, step(model, batch["other"], batch["memory"]))  # noqa: E731

        like = composed.trace
        trace = TraceSource(composed.capture, batch).read(
            train=False, call=call, forms=like.forms, pairs=like.pairs, at_once=like.at_once
        )
        places = jax.tree.unflatten(jax.tree.structure(batch), range(len(jax.tree.leaves(batch))))["memory"]
        found = remembering(trace, [jax.tree.leaves(layer) for layer in places])
        loss = LaidOut(like, composed.storage, composed.plan, composed.mesh)
        return MemoryWalk(found, composed.walker, loss, layout_of(composed, trace), given)


def _num_bytes(structs: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Of one device."""
    shapes = ((s.sharding.shard_shape(s.shape), s.dtype) for s in structs if s.sharding is not None)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
