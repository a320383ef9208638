"""Passes over new tokens in programs that walk: weights come layer by layer, and so does what layers remember."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from cjax.gradients import LaidOut
from cjax.planner.choice.passes import PassRows, keep_memory
from cjax.planner.homes import Home, Homes
from cjax.program.composed import Composed, batch_shardings
from cjax.program.passing import host_left, inputs_of, room_of, weight_rows
from cjax.program.scores import layout_of
from cjax.program.walked import WalkedState
from cjax.trace.source import TraceSource
from cjax.tree import PyTree
from cjax.walk.forward import RowsOf
from cjax.walk.measured import row_bytes
from cjax.walk.memory import MemoryWalk, remembering
from cjax.walk.stores import LayerRows, make_rows
from cjax.walk.walk import Held, Row

Step = Callable[[Any, PyTree, PyTree], tuple[jax.Array, PyTree]]  # model, given, memory -> outcome, new memory


@dataclass(frozen=True)
class Weights:
    """What passes read of a state: the rows of layers, what belongs to no layer, and a key."""

    held: Held
    params: Row
    frozen: Row
    model_state: Row
    key: jax.Array

    @classmethod
    def of(cls, state: WalkedState) -> "Weights":
        return cls(state._held, state._params, state._frozen, state._model_state, state._key)


@dataclass(frozen=True)
class Needs:
    """What passes need.

    Args:
      peak: bytes of a device beside weights and rows of memory; 0 where no budget asks.
      stack: whose layers remember.
      memory: a layer's memory.
    """

    peak: int
    stack: int
    memory: PassRows


class Texts:
    """Passes of one program.

    Args:
      composed: what the program is made of; it walks.
      step: a pass: `(model, given, memory) -> (outcome, memory)`. A function of a module: it says which pass it is.
      rows: of each stack, a layer's params and frozen as passes get them, as structs; as steps do if not given.
    """

    def __init__(self, composed: Composed, step: Step, rows: RowsOf | None = None) -> None:
        # As the model alone would continue a text: in the precision of its weights, whatever it was trained in.
        self._composed = dataclasses.replace(composed, plan=dataclasses.replace(composed.plan, precision="float32"))
        self._step, self._made = step, dict[Hashable, MemoryWalk]()
        self._peaks: dict[MemoryWalk, int] = {}
        assert composed.walker is not None
        self._rows = rows or weight_rows(composed.walker)

    def model(self) -> Any:
        """The user's own model, its arrays shapes alone."""
        capture = self._composed.capture
        return capture.rebuild(capture.params_shape, capture.frozen_shape, capture.model_state_shape)

    def needs(self, passes: Sequence[PyTree], memory: PyTree) -> Needs:
        """What these passes need; under a budget they are compiled.

        Args:
          passes: what each is given, shapes.
          memory: for each layer its arrays, shapes.
        """
        walks = [self._walk(given, memory) for given in passes]
        if self._composed.plan.budget is not None:
            for walk, given in zip(walks, passes, strict=True):
                if walk not in self._peaks:
                    self._peaks[walk] = walk.compile(self._rows, inputs_of(self._composed, given))
        peak = max(self._peaks.get(walk, 0) for walk in walks)
        return Needs(peak, walks[0].whose, PassRows(len(memory), row_bytes(walks[0].structs())))

    def homes(self, weights: Homes, needs: Needs) -> tuple[Home, ...]:
        """Where memory is, beside a state whose rows are at `weights`: on the devices, or on the host where layers'
        inputs are to be, or where a budget has no room.

        Raises:
          ValueError: devices or the host have not the room that is needed.
        """
        plan, forced = self._composed.plan, "activations" in self._composed.plan.offload
        if plan.budget is None:
            return ("host" if forced else "device",) * needs.memory.length
        room, host = room_of(self._composed, weights), host_left(self._composed, weights)
        return keep_memory(needs.memory, needs.peak, room, plan.budget, forced, host)

    def memory(self, given: PyTree, memory: PyTree, homes: Sequence[Home]) -> LayerRows:
        """Memory of all layers before the first pass, which reads zeros.

        Args:
          given: of the first pass, shapes.
          memory: for each layer its arrays, shapes.
          homes: of each layer's.
        """
        walk = self._walk(given, memory)
        rows = make_rows(walk.structs(), homes, "inputs", walk.whose)
        for layer in range(len(homes)):
            rows.put(layer, walk.empty())
        return rows

    def __call__(self, weights: Weights, given: PyTree, memory: PyTree, rows: LayerRows) -> jax.Array:
        """The outcome of a pass; `rows` are new behind it.

        Args:
          weights: what is read.
          given: arrays, placed.
          memory: for each layer its arrays, shapes.
          rows: what `memory` gave.
        """
        shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        walk, rest = self._walk(shape, memory), (weights.params, weights.frozen, weights.model_state)
        return walk(weights.held, rows, *rest, given, weights.key)

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
