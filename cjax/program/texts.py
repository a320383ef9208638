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

MOST_MADE = 12  # kinds of passes whose programs are kept: a text has up to three
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


@dataclass
class _Made:
    """The programs of a pass.

    Args:
      walk: which runs them.
      is_compiled: whether all were compiled ahead.
      peak: then, bytes of a device beside weights and rows.
    """

    walk: MemoryWalk
    is_compiled: bool = False
    peak: int = 0


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
        self._step, self._made = step, dict[Hashable, _Made]()  # what was used last is last
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
        found = [self._made_for(given, memory) for given in passes]
        if self._composed.plan.budget is not None:
            for made, given in zip(found, passes, strict=True):
                if not made.is_compiled:
                    made.peak = made.walk.compile(self._rows, inputs_of(self._composed, given))
                    made.is_compiled = True
        walk = found[0].walk
        return Needs(max(made.peak for made in found), walk.whose, PassRows(len(memory), row_bytes(walk.structs())))

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
        return self._made_for(given, memory).walk

    def _made_for(self, given: PyTree, memory: PyTree) -> "_Made":
        """The programs of a pass. Texts of each length have their own, of which those used last are kept: a process
        that answers prompts of any length would else have more of them for as long as it lives."""
        leaves, treedef = jax.tree.flatten((given, memory))
        key = (treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        made = self._made.pop(key, None) or _Made(self._make(given, memory))
        self._made[key] = made
        while len(self._made) > MOST_MADE:
            del self._made[next(iter(self._made))]
        return made

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
