"""What a program is made of: what the user gave, and what was composed of it under one plan."""

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.gradients import Choice, Gradients, Line
from cjax.mesh import BATCH_AXES
from cjax.optim import LossScale, LossScaleState, NoiseState, init_noise
from cjax.plan import Plan
from cjax.planner.choice.decide import Decision
from cjax.planner.choice.planning import Planning
from cjax.program.state import Arrays, Shelves, State
from cjax.sharding.place.born import Born
from cjax.sharding.place.model import ModelStorage
from cjax.sharding.storage.optimizer import StoredOptimizer
from cjax.sharding.storage.storage import Storage
from cjax.trace.author.capture import Capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.tree import PyTree
from cjax.walk.optimizer import RowOptimizer
from cjax.walk.walker import Walker

Readers = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Given:
    """What the user gave, whatever the plan: programs under other plans are composed of the same.

    Args:
      source: the model, the loss and the shape of the batch.
      optimizer: what trains it; None for evaluation alone.
      loss_scale: how float16 scales the loss, if not as `LossScale()` does.
      measures: whether gradients of parts of the batch are measured.
      verifies: whether a plan is checked before the first step.
      readers: of the weights in a folder of another library, by the folder; None: there are none.
      disk_folder: where a plan with `disk=` keeps what it moves there; None: no plan may.
      walkers: what walks over the layers of a program that somebody has, by trace, mesh and the plan's other words.
      learned: what measured steps have taught, for predictions under all plans: see `Planning.learn`.
    """

    source: TraceSource
    optimizer: optax.GradientTransformation | None
    loss_scale: LossScale | None = None
    measures: bool = False
    verifies: bool = False
    readers: Readers | None = None
    disk_folder: Path | None = None
    walkers: MutableMapping[Hashable, Walker] = field(default_factory=weakref.WeakValueDictionary)
    learned: dict[str, tuple[float, str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Composed:
    """What `compose` made under one plan; each is a function or a table of an earlier room.

    Args:
      given: what the user gave.
      source: the same loss, for the batch that this program is for: that of the user, or fewer rows of it.
      plan: the plan, every number filled in.
      mesh: the mesh it runs on.
      trace: the loss on one micro-batch.
      storage: where the model's arrays are kept.
      optimizer: the optimizer on what is stored.
      choice: which kind of gradients the plan gets, and why.
      gradients: the same as a function.
      loss_size: the sum over the losses of all parts to their mean; gradients of parts are that much larger.
      init: `key -> stored (params, frozen, model_state)`.
      notes: what a user should know.
      line: its way through the stages of a pipeline.
      walker: what walks over its layers, where a plan moves them out of the devices.
      has_own_schedule: whether that is by a table of the user's.
      gathers_in_turn: whether layers gather their weights, and keep them for their backward pass.
      planning: what can be asked about other plans.
      decision: how the plan was chosen.
    """

    given: Given
    source: TraceSource
    plan: Plan
    mesh: Mesh
    trace: Trace
    storage: ModelStorage
    optimizer: StoredOptimizer | RowOptimizer | None
    choice: Choice
    gradients: Gradients
    loss_size: int
    init: Born
    notes: tuple[str, ...]
    planning: Planning
    decision: Decision
    line: Line | None = None
    walker: Walker | None = None
    has_own_schedule: bool = False
    gathers_in_turn: bool = False

    @property
    def capture(self) -> Capture:
        return self.source.capture

    @property
    def batch_shape(self) -> PyTree:
        return self.source.batch_shape

    @property
    def scaling(self) -> LossScale | None:
        """How the loss is scaled: under float16 alone."""
        return (self.given.loss_scale or LossScale()) if self.plan.precision == "float16" else None

    @functools.cached_property
    def shelves(self) -> Shelves:
        storage = self.storage
        opt = self.optimizer.storage if self.optimizer else Storage(jax.tree.structure(()), ())
        return Shelves(storage.params, storage.frozen, opt, storage.model_state, self.mesh)

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """The placement of what every device keeps."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def state_shardings(self) -> State:
        params, frozen, opt, model_state = (shelf.shardings(self.mesh) for shelf in self.shelves)
        whole: Any = self.whole
        scaling, noise = (jax.tree.map(lambda _: whole, part) for part in jax.eval_shape(_fresh))
        return State(whole, params, frozen, opt, model_state, whole, scaling, noise, self.shelves)

    @functools.cached_property
    def state_shape(self) -> State:
        params, frozen, opt, model_state = (shelf.shape() for shelf in self.shelves)
        key = jax.eval_shape(lambda: jax.random.key(0))
        step = jax.ShapeDtypeStruct((), jnp.int32)
        scaling, noise = jax.eval_shape(_fresh)
        shape = State(step, params, frozen, opt, model_state, key, scaling, noise, self.shelves)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shape, self.state_shardings
        )

    @functools.cached_property
    def batch_shardings(self) -> PyTree:
        return batch_shardings(self.mesh, self.batch_shape)

    def with_batch(self, shape: PyTree) -> PyTree:
        """`shape` (of a batch) as structs placed on the mesh."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shape,
            batch_shardings(self.mesh, shape),
        )


def _fresh(scaling: LossScale | None = None) -> tuple[LossScaleState, NoiseState]:
    return (scaling or LossScale()).init(), init_noise()


def new_state(composed: Composed, params: Arrays, frozen: Arrays, model_state: Arrays, key: jax.Array) -> State:
    """The state before the first step."""
    assert not isinstance(composed.optimizer, RowOptimizer), "rows have states of their own"
    opt = composed.optimizer.init(params) if composed.optimizer else ()
    return State(jnp.int32(0), params, frozen, opt, model_state, key, *_fresh(composed.scaling), composed.shelves)


def batch_shardings(mesh: Mesh, shape: PyTree) -> PyTree:
    """Rows over the batch axes where they divide; a ragged last batch is kept whole."""
    axes = tuple(a for a in BATCH_AXES if a in mesh.axis_names)
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]

    def sharding(leaf: Any) -> NamedSharding:
        even = leaf.shape and leaf.shape[0] % size == 0
        return NamedSharding(mesh, PartitionSpec(axes) if even else PartitionSpec())

    return jax.tree.map(sharding, shape)
