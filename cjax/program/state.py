"""The state of a training run, and the parts that a program is composed of."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.gradients import Gradients, Line
from cjax.mesh import BATCH_AXES, compiler_options, own_context
from cjax.optim import LossScale, LossScaleState, NoiseState, init_noise
from cjax.plan import Plan
from cjax.sharding.place.model import ModelStorage
from cjax.sharding.storage.optimizer import StoredOptimizer
from cjax.sharding.storage.storage import Slot, Storage
from cjax.trace.author.capture import Capture
from cjax.trace.reading import Trace
from cjax.tree import leaf_names

PyTree = Any
Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class Shelves:
    """How each tree of a state is kept; with it, a state can be read without its program."""

    params: Storage
    frozen: Storage
    opt: Storage
    carried: Storage
    mesh: Mesh

    def __iter__(self) -> Any:
        return iter((self.params, self.frozen, self.opt, self.carried))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "_params", "_frozen", "_opt", "_carried", "_key", "_scaling", "_noise"],
    meta_fields=["_shelves"],
)
@dataclass(frozen=True)
class State:
    """Everything that changes from step to step. `step` is public; the rest is kept as cjax likes it.

    Read it through the program: `program.params(state)`, `program.model(state)`, `program.save(path, state)`.
    """

    step: jax.Array
    _params: Arrays
    _frozen: Arrays
    _opt: Arrays
    _carried: Arrays
    _key: jax.Array
    _scaling: LossScaleState  # kept under every precision, so that any plan can take the run over
    _noise: NoiseState
    _shelves: Shelves

    @own_context
    def find_opt_states(self, kind: type) -> list[Any]:
        """The parts of the optimizer's state that are of a kind, such as `optax.ScaleByAdamState`, in the user's own
        tree and as arrays of their own. Nothing else is loaded."""
        check_alive(self)
        if not isinstance(kind, type):
            raise TypeError(f"find_opt_states takes a class, such as optax.ScaleByAdamState, not {kind!r}")
        treedef = self._shelves.opt.treedef

        def is_one(node: Any) -> bool:
            return isinstance(node, kind)

        places = jax.tree.unflatten(treedef, range(treedef.num_leaves))
        found = [node for node in jax.tree.leaves(places, is_leaf=is_one) if is_one(node)]
        arrays = iter(_leaf_loader(self._shelves, tuple(jax.tree.leaves(found)))(self._opt))
        return jax.tree.map(lambda _: next(arrays), found)

    def __repr__(self) -> str:
        if self.step.is_deleted():
            return "State(given up to a step)"
        size = sum(x.nbytes for x in jax.tree.leaves((self._params, self._frozen, self._opt, self._carried)))
        return f"State(step={self.step}, {size / 2**20:.1f} MiB)"


@dataclass(frozen=True)
class Parts:
    """What `parallelize` composed; each is a function or a table of an earlier room."""

    capture: Capture
    plan: Plan
    mesh: Mesh
    trace: Trace
    storage: ModelStorage
    optimizer: StoredOptimizer | None
    gradients: Gradients
    init: Callable[[jax.Array], tuple[Arrays, Arrays, Arrays]]
    batch_shape: PyTree
    notes: tuple[str, ...]
    compose: Callable[..., "Parts"]  # (plan, devices, schedule, num_rows) -> under another plan
    readers: Callable[[Path], Mapping[str, Any]]  # of the weights in a folder of transformers
    line: Line | None = None  # its way through the stages of a pipeline
    scaling: LossScale | None = None  # of float16
    loss_size: int = 1  # the sum over the losses of all parts to their mean; gradients of parts are that much larger
    verifies: bool = False  # whether the plan is checked before the first step

    @functools.cached_property
    def shelves(self) -> Shelves:
        storage = self.storage
        opt = self.optimizer.storage if self.optimizer else Storage(jax.tree.structure(()), ())
        return Shelves(storage.params, storage.frozen, opt, storage.carried, self.mesh)

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """The placement of what every device keeps."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def state_shardings(self) -> State:
        params, frozen, opt, carried = (shelf.shardings(self.mesh) for shelf in self.shelves)
        whole: Any = self.whole
        scaling, noise = (jax.tree.map(lambda _: whole, part) for part in jax.eval_shape(_fresh))
        return State(whole, params, frozen, opt, carried, whole, scaling, noise, self.shelves)

    @functools.cached_property
    def state_shape(self) -> State:
        params, frozen, opt, carried = (shelf.shape() for shelf in self.shelves)
        key = jax.eval_shape(lambda: jax.random.key(0))
        step = jax.ShapeDtypeStruct((), jnp.int32)
        scaling, noise = jax.eval_shape(_fresh)
        shape = State(step, params, frozen, opt, carried, key, scaling, noise, self.shelves)  # type: ignore[arg-type]
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


@functools.lru_cache(maxsize=64)
def _leaf_loader(shelves: Shelves, indices: tuple[int, ...]) -> Any:
    """Some leaves of the optimizer's state from its stored arrays; what is not asked for is not made."""
    storage, mesh = shelves.opt, shelves.mesh
    placed = jax.tree.leaves(storage.leaf_shardings(mesh))

    def load(stored: Arrays) -> list[jax.Array]:
        leaves = jax.tree.leaves(storage.load(stored))
        return [jnp.copy(leaves[i]) for i in indices]  # or a step would take the array with its state

    return jax.jit(load, out_shardings=[placed[i] for i in indices], compiler_options=compiler_options(mesh))


def _fresh(scaling: LossScale | None = None) -> tuple[LossScaleState, NoiseState]:
    return (scaling or LossScale()).init(), init_noise()


def new_state(parts: Parts, params: Arrays, frozen: Arrays, carried: Arrays, key: jax.Array) -> State:
    """The state before the first step."""
    opt = parts.optimizer.init(params) if parts.optimizer else ()
    return State(jnp.int32(0), params, frozen, opt, carried, key, *_fresh(parts.scaling), parts.shelves)


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


def check_alive(state: Any) -> None:
    """Raises if `state` is no state, or one whose arrays a step has taken. What a device would say to the latter is a
    crash of the process, so it must never get there."""
    if not isinstance(state, State):
        raise TypeError(
            f"`state` is a {type(state).__name__}, not a state; give what program.init(0) or program.restore(...) "
            "returned, or the first result of step: `state, metrics = program.step(state, batch)`."
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ValueError(
            "this state was given up: step and update use its memory for the state that they return. Keep that one: "
            "`state, metrics = program.step(state, batch)`; what must outlive a step, take out before: "
            "program.params(state), or program.save(path, state)."
        )


def members(storage: Storage, tree: PyTree) -> Sequence[list[Any]]:
    """The leaves of `tree` that each slot holds."""
    leaves = storage.treedef.flatten_up_to(tree)
    return [[leaves[i] for i in slot.leaves] for slot in storage.slots]


def check_fits(storage: Storage, tree: PyTree, what: str) -> PyTree:
    """`tree` in the containers that `storage` knows.

    Raises:
      ValueError: it is another tree; every missing, unknown and differing leaf is listed.
    """

    def told(tree: PyTree) -> dict[str, str]:
        leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        texts = [f"{jax.dtypes.canonicalize_dtype(x.dtype, True)}{list(x.shape)}" for x in leaves]
        return dict(zip(leaf_names(tree), texts, strict=True))

    given, needed = told(tree), told(storage.leaf_shapes())
    lines = [f"{name}: {text} is missing" for name, text in needed.items() if name not in given]
    lines += [f"{name}: not known here" for name in given if name not in needed]
    lines += [f"{n}: {given[n]} given, {t} needed" for n, t in needed.items() if given.get(n, t) != t]
    if lines:
        raise ValueError(f"{what} of another model, optimizer or `wrt`:\n  " + "\n  ".join(lines))
    leaves = dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
    return jax.tree.unflatten(storage.treedef, [leaves[name] for name in needed])


def store_leaves(storage: Storage, tree: PyTree, mesh: Mesh) -> Arrays:
    """Stored arrays of a concrete tree, slot by slot, so that one slot is the most that exists twice."""
    placements = members(storage, storage.leaf_shardings(mesh))
    slots = zip(storage.slots, members(storage, tree), placements, strict=True)
    return tuple(store_slot(slot, leaves, placed, mesh) for slot, leaves, placed in slots)


def store_slot(slot: Slot, leaves: Sequence[Any], placed: Sequence[NamedSharding], mesh: Mesh) -> jax.Array:
    """The stored array of a slot, which shares no memory with the leaves; `placed` says where these are first."""
    arrays = [jax.device_put(leaf, sharding) for leaf, sharding in zip(leaves, placed, strict=True)]
    return _gatherer(_alike(slot), NamedSharding(mesh, slot.stored_spec), mesh)(*arrays)


def load_slot(slot: Slot, array: jax.Array, placed: Sequence[NamedSharding], mesh: Mesh) -> list[jax.Array]:
    """The leaves of a slot, in the user's shapes."""
    return _scatterer(_alike(slot), tuple(placed), mesh)(array)


def _alike(slot: Slot) -> Slot:
    """`slot` without the names of its leaves: slots that are kept in the same way are equal."""
    return dataclasses.replace(slot, leaves=tuple(range(len(slot.leaves))))


@functools.lru_cache(maxsize=1024)
def _gatherer(slot: Slot, sharding: NamedSharding, mesh: Mesh) -> Any:
    """From a slot's leaves to its stored array: one program for all that are kept in the same way."""

    def gather(*leaves: jax.Array) -> jax.Array:
        return slot.store(jnp.stack(leaves) if slot.is_stack else jnp.copy(leaves[0]))

    return jax.jit(gather, out_shardings=sharding, compiler_options=compiler_options(mesh))


@functools.lru_cache(maxsize=1024)
def _scatterer(slot: Slot, placed: tuple[NamedSharding, ...], mesh: Mesh) -> Any:
    """From a slot's stored array to its leaves."""

    def scatter(stored: jax.Array) -> list[jax.Array]:
        array = slot.load(stored)
        return [array[i] for i in range(len(slot.leaves))] if slot.is_stack else [array]

    return jax.jit(scatter, out_shardings=list(placed), compiler_options=compiler_options(mesh))
