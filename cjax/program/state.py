"""The state of a training run: all that changes from step to step."""

import copy
import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cjax.mesh import compiler_options, own_context
from cjax.optim import LossScaleState, NoiseState
from cjax.sharding.storage.storage import Storage
from cjax.tree import kind_of

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class Shelves:
    """How each tree of a state is kept; with it, a state can be read without its program."""

    params: Storage
    frozen: Storage
    opt: Storage
    model_state: Storage
    mesh: Mesh

    def __iter__(self) -> Any:
        return iter((self.params, self.frozen, self.opt, self.model_state))


def not_pickled(self: object) -> NoReturn:
    """The `__reduce__` of what belongs to the devices of one process.

    Raises:
      TypeError: always, with what to do in its place.
    """
    raise TypeError(
        f"a {type(self).__name__} belongs to the devices of this process and can't be pickled. To keep a state: "
        "program.save(path, state), or for another library program.params(state), whose arrays jax.device_get makes "
        "NumPy's. In the other process: program = cjax.parallelize(...), state = program.restore(path)"
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "_params", "_frozen", "_opt", "_model_state", "_key", "_scaling", "_noise"],
    meta_fields=["_shelves"],
)
@dataclass(frozen=True)
class State:
    """Everything that changes from step to step. `step` is public; the rest is kept as cjax likes it.

    Read it through the program: `program.params(state)`, `program.model(state)`, `program.save(path, state)`. A step
    gives it up: its memory is then the next one's.

    Attributes:
      step: int32[], the number of steps taken.

    `cjax.Program` has an example.
    """

    step: jax.Array
    _params: Arrays
    _frozen: Arrays
    _opt: Arrays
    _model_state: Arrays
    _key: jax.Array
    _scaling: LossScaleState  # kept under every precision, so that any plan can take the run over
    _noise: NoiseState
    _shelves: Shelves

    @own_context
    def find_opt_states(self, kind: type) -> list[Any]:
        """The parts of the optimizer's state that are of a kind, in the user's own tree and as arrays of their own.

        Nothing else is loaded.

        Args:
          kind: a class, such as `optax.ScaleByAdamState`.

        Raises:
          TypeError: `kind` is no class.
          ValueError: this state was given up to a step.
        """
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

    __reduce__ = not_pickled

    def __copy__(self) -> "State":
        return jax.tree.map(lambda x: x, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "State":
        return jax.tree.map(functools.partial(copy.deepcopy, memo=memo), self)

    def _check_whole(self) -> None:
        """Raises if a part of it, that is not in its arrays, is not its own."""

    def __repr__(self) -> str:
        if self.step.is_deleted():
            return "State(given up to a step)"
        size = sum(x.nbytes for x in jax.tree.leaves((self._params, self._frozen, self._opt, self._model_state)))
        return f"State(step={self.step}, {size / 2**20:.1f} MiB)"


@functools.lru_cache(maxsize=64)
def _leaf_loader(shelves: Shelves, indices: tuple[int, ...]) -> Any:
    """Some leaves of the optimizer's state from its stored arrays; what is not asked for is not made."""
    storage, mesh = shelves.opt, shelves.mesh
    placed = jax.tree.leaves(storage.leaf_shardings(mesh))

    def load(stored: Arrays) -> list[jax.Array]:
        leaves = jax.tree.leaves(storage.load(stored))
        return [jnp.copy(leaves[i]) for i in indices]  # or a step would take the array with its state

    return jax.jit(load, out_shardings=[placed[i] for i in indices], compiler_options=compiler_options(mesh))


def check_alive(state: Any) -> None:
    """Raises if `state` is no state, or one whose arrays a step has taken. What a device would say to the latter is a
    crash of the process, so it must never get there."""
    if not isinstance(state, State):
        raise TypeError(
            f"`state` is {kind_of(state)}, not a state; give what program.init(0) or program.restore(...) "
            "returned, or the first result of step: `state, metrics = program.step(state, batch)`."
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ValueError(
            "this state was given up: step and update use its memory for the state that they return. Keep that one: "
            "`state, metrics = program.step(state, batch)`; what must outlive a step, take out before: "
            "program.params(state), or program.save(path, state). If a step failed, go on from a checkpoint, "
            "program.restore(path), or where the plan keeps all layers on disk, program.resume()."
        )
    state._check_whole()
