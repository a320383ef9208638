"""A model that is trained by walks over its layers: where its rows live, and a step."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from cjax.gradients import Evaluated, Scale, mean
from cjax.planner.homes import KINDS, Homes, Kind
from cjax.sharding.place.model import ModelStorage
from cjax.tree import PyTree
from cjax.walk.files import Folder
from cjax.walk.layer_slots import layer_slot
from cjax.walk.optimizer import RowOptimizer
from cjax.walk.programs import Programs
from cjax.walk.stores import make_rows
from cjax.walk.walk import Due, Held, LayerWalk, Row, in_turn


@dataclass(frozen=True)
class OutsideState:
    """What belongs to no layer, as stored."""

    params: Row
    frozen: Row
    opt: Row
    model_state: Row


@dataclass(frozen=True)
class Stepped:
    """What a step gave: the outside after it, what the batch gave, the loss, the norm of the gradients, and whether all
    of it is finite."""

    outside: OutsideState
    out: Evaluated | None
    loss: jax.Array
    norm: jax.Array
    finite: jax.Array


class Walker:
    """What walks over a model.

    Args:
      programs: what a walk calls.
      lengths: the number of layers of each stack.
      storage: where the model's arrays are kept.
      optimizer: the optimizer, row by row; None for evaluation alone.
      mesh: the mesh.
    """

    def __init__(
        self, programs: Programs, lengths: Sequence[int], storage: ModelStorage, optimizer: RowOptimizer | None,
        mesh: Mesh,
    ) -> None:  # fmt: skip
        self.programs, self.lengths, self.optimizer = programs, tuple(lengths), optimizer
        self.storage, self._mesh = storage, mesh
        self._walk = LayerWalk(programs, lengths)

    # -- rows ---------------------------------------------------------------------------------------------------------
    def slots(self, kind: Kind, k: int) -> tuple[int, ...]:
        """The slots of a stored tree of which stack `k` has a row for each layer, in a row's order."""
        if kind == "opt":
            return self.optimizer.slots[k] if self.optimizer else ()
        return self.programs.model.places(k, kind)

    def outside(self, kind: Kind) -> tuple[int, ...]:
        """The slots of a stored tree that belong to no stack."""
        if kind == "opt":
            return self.optimizer.outside if self.optimizer else ()
        return self.programs.model.outside(kind)

    def structs(self, kind: Kind, k: int) -> list[jax.ShapeDtypeStruct]:
        """A row of stack `k`: arrays as placed."""
        if kind == "grads":
            return self.programs.gradient_structs(k)
        if kind == "inputs":
            return self._inputs[k]
        if kind == "opt":
            slots = self.optimizer.storage.slots if self.optimizer else ()
        else:
            slots = getattr(self.storage, kind).slots
        found = [layer_slot(slots[i]) for i in self.slots(kind, k)]
        return [
            jax.ShapeDtypeStruct(s.stored_shape, s.dtype, sharding=NamedSharding(self._mesh, s.stored_spec))
            for s in found
        ]

    def outside_structs(self, kind: Kind) -> list[jax.ShapeDtypeStruct]:
        """The stored arrays of what belongs to no stack, as placed."""
        storage = self.optimizer.storage if kind == "opt" and self.optimizer else getattr(self.storage, kind, None)
        slots = storage.slots if storage is not None else ()
        return [
            jax.ShapeDtypeStruct(s.stored_shape, s.dtype, sharding=NamedSharding(self._mesh, s.stored_spec))
            for s in (slots[i] for i in self.outside(kind))
        ]

    @functools.cached_property
    def _inputs(self) -> list[list[jax.ShapeDtypeStruct]]:
        return [part * self.programs.model.num for part in self.programs.payload_structs()]

    def hold(self, homes: Homes, folder: Folder | None) -> Held:
        """Places for all rows, which are empty; `folder` of those on disk."""
        numbers = range(len(self.lengths))
        rows = {
            kind: [make_rows(self.structs(kind, k), homes.of[kind][k], kind, k, folder) for k in numbers]
            for kind in KINDS
        }
        params, frozen, opt, grads, inputs = (rows[kind] for kind in KINDS)
        return Held(homes, params, frozen, opt, grads, inputs, folder)

    # -- a step -------------------------------------------------------------------------------------------------------
    def gradients(
        self, held: Held, outside: OutsideState, batch: PyTree, key: jax.Array, scale: Scale, put: Any,
        fused: Collection[tuple[int, int]] = (), update: Due | None = None,
    ) -> tuple[Evaluated, Row]:  # fmt: skip
        """What a batch gives, and the gradients of params outside; arguments as of `LayerWalk.gradients`."""
        return self._walk.gradients(
            held, outside.params, outside.frozen, outside.model_state, batch, key, scale, put, fused, update
        )

    def step(
        self, held: Held, outside: OutsideState, batch: PyTree, key: jax.Array, scale: Scale, give_up: Any
    ) -> Stepped:
        """One step. `give_up` is called before a row is changed for good: what fails behind that leaves no whole state.

        Updates that the step before has left due are made when the forward pass comes to their layers, and change no
        state. A step that is not finite changes no row.
        """
        optimizer, exports, fused = self.optimizer, {}, held.homes.fused
        assert optimizer is not None
        before = optimizer.before(outside.opt, outside.params) if fused else {}

        def put(k: int, at: int, grads: Row, params: Row, opt: Row) -> None:
            if optimizer.is_early(k, at):  # a norm, while the gradients are here
                exports[k, at] = optimizer.export(1, k, at, grads, (), params, {})
            if (k, at) not in fused:
                held.grads[k].put(at, grads)
                return
            params, opt = optimizer.update_row(k, at, grads, opt, params, before)
            jax.block_until_ready((params, opt))
            held.params[k].put(at, params)
            held.opt[k].put(at, opt)

        try:
            update = functools.partial(self._update_row, held, give_up)
            out, grads = self.gradients(held, outside, batch, key, scale, put, fused, update)
            loss = mean(out.total, out.weight)
            return self.update(held, outside, grads, out, loss, exports, give_up, fused)
        except BaseException:
            if fused and held.folder is not None:
                is_back = False
                try:
                    is_back = self._take_back(held)
                finally:  # also where somebody interrupts it: some layers have their new rows then
                    if not is_back:
                        give_up()
            raise

    def update(
        self, held: Held, outside: OutsideState, grads: Row, out: Evaluated | None, loss: jax.Array, exports: Any,
        give_up: Any, fused: Collection[tuple[int, int]] = (),
    ) -> Any:  # fmt: skip
        """The update, of gradients that are in their rows already. Of `fused` layers nothing is left to do, and that of
        those that are deferred is due from now on."""
        optimizer = self.optimizer
        assert optimizer is not None and not held.due
        rest = (grads, outside.opt, outside.params, loss)
        joint = optimizer.join(0, {}, *rest, {})
        for number in range(1, optimizer.num_rounds + 1):
            exports = {**exports} if number == 1 else {}
            for k in range(len(self.lengths)):
                self._export(number, k, held, joint, exports)
            joint = optimizer.join(number, exports, *rest, joint)
        finite = joint["finite"]
        give_up()
        trained = [k for k in range(len(self.lengths)) if self.slots("params", k)]
        left = [(k, at) for k in trained for at in range(self.lengths[k]) if (k, at) not in fused]
        if bool(finite):
            held.due.update(dict.fromkeys(left, joint))
            self.catch_up(held, give_up, held.homes.deferred)
        else:
            for k, at in left:  # or they would be there in the next forward pass, which counts on their room
                held.grads[k].forget(at)
            if fused:
                self._take_back(held)
        params, opt = optimizer.update_outside(*rest, joint)
        return Stepped(dataclasses.replace(outside, params=params, opt=opt), out, loss, joint["norm"], finite)

    @staticmethod
    def _take_back(held: Held) -> bool:
        """Layers that were updated in the backward pass are what they were before; whether rows can be used on. Others
        in the same files stay: what was due of them has been made."""
        assert held.folder is not None, "what is fused is on disk"
        rows: dict[tuple[Kind, int], list[int]] = {}
        kinds: tuple[Kind, ...] = ("params", "opt")
        for kind in kinds:
            for k, homes in enumerate(held.homes.of[kind]):
                on_disk = [at for at, home in enumerate(homes) if home == "disk"]  # which a file has in this order
                rows[kind, k] = [row for row, at in enumerate(on_disk) if (k, at) in held.homes.fused]
        return held.folder.take_back(rows)

    def _export(self, number: int, k: int, held: Held, joint: Any, exports: Any) -> None:
        """A round's pass over the layers of a stack, those aside that have exported already."""
        optimizer = self.optimizer
        assert optimizer is not None
        left = [at for at in range(self.lengths[k]) if (k, at) not in exports]
        if not left or not self.slots("params", k):
            return
        reads = set[str]().union(*(optimizer.reads(number, k, at) for at in left))  # layers may read different things
        kinds = [kind for kind in ("grads", "opt", "params") if kind in reads]
        for at, rows in in_turn([getattr(held, kind)[k] for kind in kinds], left):
            given = dict(zip(kinds, rows, strict=True))
            exports[k, at] = optimizer.export(
                number, k, at, given.get("grads", ()), given.get("opt", ()), given.get("params", ()), joint
            )
            jax.block_until_ready(exports[k, at])
            rows.clear()
            del given

    def catch_up(self, held: Held, give_up: Any, but: Collection[tuple[int, int]] = ()) -> None:
        """Makes the updates that are due, those of some layers aside; `give_up` where one breaks off half made."""
        for k in range(len(self.lengths)):
            layers = [at for stack, at in held.due if stack == k and (stack, at) not in but]
            for at, rows in in_turn([held.grads[k], held.opt[k], held.params[k]], layers):
                self._update_row(held, give_up, k, at, rows)

    def _update_row(self, held: Held, give_up: Any, k: int, at: int, rows: list[Row]) -> Row:
        """The update of a layer that was due, from its gradients, optimizer state and parameters; the new parameters,
        which are on their way home. `rows` is emptied, or they would be there while the next are fetched."""
        optimizer = self.optimizer
        assert optimizer is not None
        try:  # from the first: an interrupt behind `pop` would lose the update
            joint = held.due.pop((k, at))
            grads, opt, params = rows
            rows.clear()
            params, opt = optimizer.update_row(k, at, grads, opt, params, joint)
            held.grads[k].forget(at)
            jax.block_until_ready((params, opt))
            held.params[k].put(at, params)
            held.opt[k].put(at, opt)
        except BaseException:
            give_up()  # nobody knows which of its rows are new
            raise
        return params
