"""What a program that walks over layers does in the place of compiled steps."""

import dataclasses
import functools
import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.gradients import mean
from cjax.mesh import compiler_options
from cjax.optim import LossScale, LossScaleState, count_skipped, init_noise
from cjax.planner.choice.homes import choose_homes
from cjax.planner.costs.walk import rates_of
from cjax.planner.homes import KINDS, Home, Homes, Kind, Peaks
from cjax.program.composed import Composed
from cjax.program.disk_state import (
    OPEN,
    TREES,
    HeldState,
    check_same_update,
    identity_of,
    let_go,
    note_step,
    placed,
    written,
)
from cjax.program.keep import store_leaves
from cjax.program.starting import given_values, refuse_values
from cjax.program.state import Arrays, State
from cjax.program.steps import aux_means
from cjax.program.walk_report import audited, cost_of
from cjax.program.walked import (
    ROWS,
    Replaced,
    Value,
    WalkedState,
    each_row,
    empty_rows,
    fill,
    part_of,
    tree_of,
    values_of,
)
from cjax.sharding.storage.storage import Storage
from cjax.tree import PyTree
from cjax.walk.birth import RowBirth, Tree
from cjax.walk.direct import BLOCK
from cjax.walk.files import Folder, num_records
from cjax.walk.measured import Measured, data_bytes, measure, row_sizes
from cjax.walk.stores import make_rows
from cjax.walk.walk import Held, Row, in_turn
from cjax.walk.walker import OutsideState, Walker

_TEXT = 200  # bytes for the name and so on of an array in a record, at most
_NOTE = 4096  # bytes for what is noted beside a step
_ROW = 16  # bytes for a row's place and checksum

# Of walkers, which programs may have in common.
_MEASURED: weakref.WeakKeyDictionary[Walker, Measured] = weakref.WeakKeyDictionary()

_logger = logging.getLogger("cjax")


NO_STEP = (
    "plan {!r} walks over the layers: its step is several programs, and none is the step. report() tells of all of "
    "them together; program.replan(a plan without budget= and offload=).lower() gives the step as one."
)
NOTHING_KEPT = "plan {!r} keeps nothing on disk between steps: go on from a checkpoint, program.restore(path)."
Given = Callable[[int, int], Any]  # tree, leaf -> a value that replaces the model's own, or None


def walking_of(composed: Composed) -> "Walking":
    """What runs a program's walks: one for each program, since it has the compiled programs and the folder."""
    kept = vars(composed)  # as a cached property would, of a class that knows nothing of walks
    if "_walking" not in kept:
        kept["_walking"] = Walking(composed)
    return kept["_walking"]


class Walking:
    """Runs the walks of one program."""

    def __init__(self, composed: Composed) -> None:
        assert composed.walker is not None
        self._composed, self._walker = composed, composed.walker
        self._opened: Folder | None = None
        self.note: dict[str, Any] = {}  # is kept with each step on disk
        options = compiler_options(composed.mesh)
        self._inputs = jax.jit(self._make_inputs, out_shardings=composed.whole, compiler_options=options)
        self._behind = jax.jit(self._make_behind, compiler_options=options)
        scaling = composed.scaling or LossScale()
        # A program, since no process could put what is on devices of others.
        self._first_small = jax.jit(
            lambda key: (jnp.int32(0), key, scaling.init(), init_noise()), out_shardings=composed.whole,
            compiler_options=options,
        )  # fmt: skip
        self._aux = jax.jit(
            lambda out: aux_means(composed, out), out_shardings=composed.whole, compiler_options=options
        )

    @functools.cached_property
    def measured(self) -> Measured:
        """The programs of a step, compiled for this batch, and what devices need for them."""
        if self._walker in _MEASURED:
            return _MEASURED[self._walker]
        composed, shape = self._composed, self._composed.state_shape
        scale = None
        if composed.scaling is not None:
            scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=composed.whole)
        params, frozen = (tuple(self._walker.outside_structs(kind)) for kind in ("params", "frozen"))
        batch = composed.with_batch(composed.batch_shape)
        _MEASURED[self._walker] = measure(self._walker, (params, frozen, shape._model_state, batch, shape._key, scale))
        return _MEASURED[self._walker]

    @functools.cached_property
    def homes(self) -> Homes:
        """Where rows live: the least that moves, or where rates are known the fastest, of what the plan allows.

        Raises:
          ValueError: nothing fits what the plan says; see `choose_homes`.
        """
        plan = self._composed.plan
        # Without a budget nothing has to be known of programs: only what is told to go goes.
        peaks = self.measured.peaks if plan.budget is not None else Peaks(0, 0, 0, 0, 0)
        sizes = row_sizes(self._walker)
        optimizer, numbers = self._walker.optimizer, range(len(self._walker.lengths))
        alone = [optimizer is not None and optimizer.is_alone(k) for k in numbers]
        return choose_homes(
            sizes, peaks, plan.budget, plan.host, plan.disk, plan.offload, record=self.record_bytes,
            seconds=self._seconds, alone=alone, defers=optimizer is not None,
        )  # fmt: skip

    @property
    def _seconds(self) -> Callable[[Homes], float] | None:
        """How long a step takes with some homes; None where there is no choice, or nobody knows."""
        composed = self._composed
        if composed.plan.budget is None:
            return None
        hardware = composed.planning.known(composed.mesh.size)
        if rates_of(hardware).link is None or hardware.matmul_flops(composed.plan.precision) is None:
            return None
        cost = cost_of(composed, self.measured, audited(composed, self.measured), hardware)
        return lambda homes: cost(homes).total or 0.0

    @property
    def record(self) -> int:
        """Bytes on disk besides rows, where all of a state is there."""
        return self.record_bytes if self._is_durable else 0

    @property
    def record_bytes(self) -> int:
        """What the disk has besides rows, at most: what belongs to no layer, as often as a commit needs it, and what
        files begin with."""
        arrays = [*jax.tree.leaves(self._outside_shape()), *self._joint.values()]  # whose updates may be due
        size = sum(data_bytes(x) + _TEXT * len(x.sharding.addressable_devices) for x in arrays)
        size += (
            _TEXT + _NOTE + len(json.dumps(identity_of(self._composed))) + sum(self._walker.lengths) * len(KINDS) * _ROW
        )
        return num_records() * size + BLOCK * len(KINDS) * len(self._walker.lengths)

    def _hold(self) -> Held:
        """Places for a state's rows. The disk has room for one: a state that was there is given up. What was committed
        of it stays until the next commit, so that a process that is killed in between loses nothing."""
        if self._folder is not None and self._folder.holder is not None:
            self._release()
        folder = self._folder
        if folder is None:
            return self._walker.hold(self.homes, None)
        try:
            held = self._walker.hold(self.homes, folder)
        except BaseException:
            self._release()  # or its files would be made twice
            raise
        # From here on, also where a state of these rows never comes about: threads may write them still.
        folder.holder = HeldState(held)
        return held

    @functools.cached_property
    def _is_durable(self) -> bool:
        """Whether all that layers have is on disk, so that a run that is killed can go on from there."""
        return self.homes.is_durable(row_sizes(self._walker))

    def _commit(self, state: WalkedState) -> None:
        """From now on, a run that is killed goes on from this state."""
        held = state._rows
        folder = held.folder
        if self._is_durable:
            assert folder is not None
            # What the updates that are due read besides: whoever goes on from here makes them.
            assert set(held.due) in (set(), set(held.homes.deferred)), "all of them, or none"
            joint = next(iter(held.due.values()), {})
            small = written([*jax.tree.leaves(state), *(joint[name] for name in self._joint if joint)])
            if joint:
                assert self._walker.optimizer is not None
                small["due"] = np.frombuffer(self._walker.optimizer.digest, np.uint8)
            folder.commit(int(state.step), small, self.note)
        elif self.homes.fused and folder is not None:
            folder.keep()  # a step that is not finite goes back to it

    def resume(self) -> WalkedState | None:
        """The state that the disk holds, of a run that has ended; None if there is none."""
        if not self._is_durable:
            raise ValueError(
                f"plan {str(self._composed.plan)!r} does not keep all that layers have on disk, so that nothing of a "
                "run that has ended is left there: go on from a checkpoint, program.restore(path)."
            )
        assert self._folder is not None
        if self._folder.step is None:
            self._tell_others(self._folder)
            return None
        held = self._hold()
        found = self._folder.resume()
        assert found is not None
        shape = self._outside_shape()
        leaves, treedef = jax.tree.flatten(shape)
        arrays = [placed(found[1], i, leaf) for i, leaf in enumerate(leaves)]
        if "due" in found[1]:
            assert self._walker.optimizer is not None
            check_same_update(self._folder, found[1]["due"].tobytes(), self._walker.optimizer.digest)
            joint = {name: placed(found[1], len(leaves) + i, x) for i, (name, x) in enumerate(self._joint.items())}
            held.due.update(dict.fromkeys(sorted(self.homes.deferred), joint))
        step, params, frozen, opt, model_state, key, scaling, noise = jax.tree.unflatten(treedef, arrays)
        return self._state(held, (params, frozen, opt, model_state), (step, key, scaling, noise), is_new=False)

    @property
    def _joint(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """What updates read of all layers."""
        return {} if self._walker.optimizer is None else self._walker.optimizer.joint

    def _tell_others(self, folder: Folder) -> None:
        """A run of this model under another plan is not gone on with, and should not be forgotten either."""
        own = identity_of(self._composed)
        for record in folder.others if jax.process_index() == 0 else ():
            there = json.loads(record.identity)
            if all(there.get(name) == own[name] for name in TREES):
                _logger.warning(
                    "cjax: %s holds a run of this model after step %s, under another plan, %s on %s devices. This one "
                    "does not go on from it. To do so: other = program.replan(%r); state = "
                    "program.restore(other.resume())",
                    folder.path.parent, record.step, there.get("plan"), there.get("devices"), there.get("plan"),
                )  # fmt: skip

    def _outside_shape(self) -> Any:
        shape = self._composed.state_shape
        trees = (tuple(self._walker.outside_structs(kind)) for kind in ROWS)
        return (shape.step, *trees, shape._model_state, shape._key, shape._scaling, shape._noise)

    @property
    def _folder(self) -> Folder | None:
        """The folder of rows on disk."""
        if "disk" not in self.homes.used:
            return None
        if self._opened is not None and not self._opened.is_closed:
            return self._opened
        composed = self._composed
        if composed.given.disk_folder is None:
            raise ValueError(
                f"plan {str(composed.plan)!r} keeps layers on disk, and nobody said where: give parallelize "
                'disk_folder="/scratch/run" (--disk-folder of the commands), on a disk of this machine.'
            )
        path = self._path(composed.given.disk_folder)
        if (before := OPEN.get(path)) is not None:
            let_go(before)  # the same program, made anew in the same process: as in a notebook
        state: list[Kind] = [*ROWS, "grads"] if self.homes.deferred else [*ROWS]
        self._opened = Folder(path, identity_of(self._composed), composed.plan.disk, state)
        OPEN[path] = self._opened
        return self._opened

    def _path(self, folder: Path) -> Path:
        """Of each program its own, so that a run can go on under another plan while this one's rows are read."""
        digest = hashlib.sha256(json.dumps(identity_of(self._composed), sort_keys=True).encode()).hexdigest()[:12]
        return folder.absolute() / f"cjax-{digest}"

    def has_place_of(self, state: State) -> bool:
        """Whether rows of a new state would be where this one's are on disk."""
        folder = self._composed.given.disk_folder
        if folder is None or "disk" not in self.homes.used:
            return False
        opened = OPEN.get(self._path(folder))
        return opened is not None and isinstance(state, WalkedState) and state._rows.folder is opened

    def _release(self) -> None:
        """Gives up the state that is on disk, and the folder."""
        if self._opened is not None:
            let_go(self._opened)
        self._opened = None

    # -- states -------------------------------------------------------------------------------------------------------
    def start(self, key: jax.Array, params: Any) -> WalkedState:
        """A fresh state; `params` (see `Program.init`) replace the parameters they name."""
        composed = self._composed
        if self._folder is not None and self._folder.step:
            raise ValueError(
                f"{self._folder.path} holds this run as it was after step {self._folder.step}: go on with "
                f"{self._folder.note.get('how', 'state = program.resume()')}, or remove that folder to begin anew."
            )
        given = {} if params is None else given_values(composed, params)
        problems: list[str] = []
        values = {name: found for name, found in given.items()}
        born = self._adopted if composed.capture.initial is not None else functools.partial(self._born, key)
        held = self._hold()
        *outside, model_state = born(held, lambda tree, leaf: values.get((tree, leaf)), problems)
        refuse_values(problems, composed)
        small = self._first_small(key)
        return self._state(held, (*outside, self._first_opt(held, outside[0]), model_state), small)

    def _adopted(self, held: Held, given: Given, problems: list[str]) -> tuple[Arrays, Arrays, Arrays]:
        """Rows of the values that the model holds, and what is outside of them."""
        composed, initial = self._composed, self._composed.capture.initial
        assert initial is not None
        shelves = composed.shelves
        outside = []
        kept: dict[Kind, Storage] = {"params": shelves.params, "frozen": shelves.frozen}
        for tree, (kind, shelf) in enumerate(kept.items()):
            own = values_of(shelf, initial[tree])

            placed, whole = jax.tree.leaves(shelf.leaf_shardings(composed.mesh)), {}

            def value(
                leaf: int, where: Any, layer: int | None, tree: int = tree, own: Value = own,
                placed: Sequence[Any] = placed, whole: dict[int, Any] = whole,
            ) -> Any:  # fmt: skip
                found = given(tree, leaf)
                if found is None:
                    return own(leaf, where, layer)
                # Of a leaf that holds all layers, each reads the whole: a file has no other parts by name.
                if leaf not in whole:
                    whole.clear()
                    whole[leaf] = found.placed(placed[leaf], problems)
                    refuse_values(problems, composed)
                return whole[leaf] if layer is None else part_of(whole[leaf], layer)

            outside.append(fill(self._walker, held, kind, shelf, composed.mesh, value))
        return outside[0], outside[1], store_leaves(shelves.model_state, initial[2], composed.mesh)

    def _born(self, key: jax.Array, held: Held, given: Given, problems: list[str]) -> tuple[Arrays, Arrays, Arrays]:
        """Rows of the author's init, row by row, and what is outside of them."""
        composed, walker = self._composed, self._walker
        numbers = range(len(walker.lengths))
        stacks: dict[Tree, Any] = {kind: [walker.slots(kind, k) for k in numbers] for kind in ("params", "frozen")}
        birth = RowBirth(composed.capture, composed.storage, stacks, composed.mesh)
        shelves: dict[Tree, Storage] = {"params": composed.shelves.params, "frozen": composed.shelves.frozen}
        replaced: dict[Tree, Replaced] = {}
        for tree, (kind, shelf) in enumerate(shelves.items()):
            replaced[kind] = Replaced(shelf, composed.mesh, functools.partial(given, tree), problems)
            for k, at in each_row(walker) if any(stacks[kind]) else ():
                if slots := stacks[kind][k]:
                    row = birth.init_row(kind, k, at, key)
                    getattr(held, kind)[k].put(at, replaced[kind].row(slots, at, row))
        params, frozen, model_state = birth.init_outside(key)
        params = replaced["params"].outside(walker.outside("params"), params)
        frozen = replaced["frozen"].outside(walker.outside("frozen"), frozen)
        return params, frozen, model_state

    def _first_opt(self, held: Held, params: Arrays) -> Arrays:
        optimizer = self._walker.optimizer
        if optimizer is None:
            return ()
        for k, length in enumerate(self._walker.lengths):
            for at, (row,) in in_turn([held.params[k]], range(length) if self._walker.slots("opt", k) else ()):
                held.opt[k].put(at, optimizer.init_row(k, at, row))
        return optimizer.init_outside(params)

    def beside(self, trees: Mapping[str, PyTree], model_state: Arrays, small: Any) -> WalkedState:
        """A state for gradients alone, without the optimizer's. Its rows are in host memory; no others are touched."""
        composed = self._composed
        held, outside = self._walker.hold(Homes.all_at("host", self._walker.lengths), None), []
        for kind in ROWS[:2]:
            shelf = getattr(composed.shelves, kind)
            outside.append(fill(self._walker, held, kind, shelf, composed.mesh, values_of(shelf, trees[kind])))
        empty_rows(self._walker, held)
        step, key, scaling, noise = small
        params, frozen = outside
        note_step(held, step)
        return WalkedState(
            step, params, frozen, (), model_state, key, scaling, noise, composed.shelves, self._walker, held
        )

    def restored(self, trees: Mapping[str, PyTree], model_state: Arrays, small: Any) -> WalkedState:
        """A state from the user's trees "params", "frozen" and "opt", the stored model state, and the small rest."""
        composed, held = self._composed, self._hold()
        outside = []
        for kind in ROWS:
            shelf = getattr(composed.shelves, kind)
            outside.append(fill(self._walker, held, kind, shelf, composed.mesh, values_of(shelf, trees[kind])))
        return self._state(held, (*outside, model_state), small)

    def with_params(self, state: WalkedState, params: PyTree) -> WalkedState:
        """`state` with a tree like the parameters in their place; layers' are in host memory between their turns."""
        walker, shelf = self._walker, self._composed.shelves.params
        homes: list[list[Home]] = [["host"] * length for length in walker.lengths]
        rows = [make_rows(walker.structs("params", k), of, "params", k) for k, of in enumerate(homes)]
        own = state._held
        of = Homes({**own.homes.of, "params": tuple(map(tuple, homes))})
        held = dataclasses.replace(own, params=rows, homes=of, due={})
        outside = fill(walker, held, "params", shelf, self._composed.mesh, values_of(shelf, params))
        for k, length in enumerate(walker.lengths):
            for at in range(length) if not walker.slots("params", k) else ():
                rows[k].put(at, ())
            rows[k].settle()
        return dataclasses.replace(state, _params=outside, _rows=held)

    def _state(self, held: Held, trees: Any, small: Any, is_new: bool = True) -> WalkedState:
        empty_rows(self._walker, held)
        for rows in held.every:
            rows.settle()
        step, key, scaling, noise = small
        shelves, walker = self._composed.shelves, self._walker
        params, frozen, opt, model_state = trees
        state = WalkedState(step, params, frozen, opt, model_state, key, scaling, noise, shelves, walker, held)
        note_step(held, step)
        if is_new:
            self._commit(state)
        return state

    # -- steps --------------------------------------------------------------------------------------------------------
    def step(self, state: WalkedState, batch: PyTree) -> tuple[WalkedState, dict[str, Any]]:
        """One step of training; gives up `state`."""
        composed = self._composed
        key, scale = self._inputs(state._key, state.step, state._scaling)
        counted = state.step + 1
        done = self._walker.step(state._rows, state.outside, batch, key, scale, state.step.delete)
        assert done.out is not None
        kept = (done.out.model_state, state._model_state)
        model_state, scaling, skipped = self._behind(*kept, state._scaling, done.finite)
        metrics: dict[str, Any] = {"loss": done.loss, "grad_norm": done.norm, "skipped": skipped}
        if composed.scaling is not None:
            metrics["loss_scale"] = state._scaling.scale
        if composed.trace.aux_is_mean:
            metrics["aux"] = self._aux(done.out)
        return self._next(state, done.outside, counted, model_state, scaling), metrics

    def update(self, state: WalkedState, grads: PyTree, loss: jax.Array) -> WalkedState:
        """The state after the optimizer has taken gradients, a tree like the parameters; gives up `state`."""
        shelf, counted = self._composed.shelves.params, state.step + 1
        held, give_up = state._held, state.step.delete
        outer = fill(self._walker, held, "grads", shelf, self._composed.mesh, values_of(shelf, grads))
        done = self._walker.update(held, state.outside, outer, None, loss, {}, give_up)
        _, scaling, _ = self._behind((), (), state._scaling, done.finite)
        return self._next(state, done.outside, counted, state._model_state, scaling)

    def value_and_grad(self, state: WalkedState, batch: PyTree) -> tuple[jax.Array, PyTree, PyTree, Arrays]:
        """The loss, aux, gradients in the user's own tree, and the new model state; `state` stays."""
        key, scale = self._inputs(state._key, state.step, state._scaling)
        held = state._held

        def put(k: int, at: int, grads: Row, params: Row, opt: Row) -> None:
            held.grads[k].put(at, grads)

        out, outer = self._walker.gradients(held, state.outside, batch, key, scale, put)
        shelf = self._composed.shelves.params
        tree = tree_of(self._walker, held, "grads", shelf, outer, self._composed.mesh)
        for k, length in enumerate(self._walker.lengths):
            for at in range(length):
                held.grads[k].forget(at)
        return mean(out.total, out.weight), self._aux(out), tree, out.model_state

    def _next(
        self, state: WalkedState, outside: OutsideState, step: jax.Array, model_state: Arrays, scaling: LossScaleState
    ) -> WalkedState:
        new = dataclasses.replace(
            state, step=step, _params=outside.params, _opt=outside.opt, _model_state=model_state, _scaling=scaling
        )
        note_step(state._rows, step)
        self._commit(new)
        return new

    def _make_inputs(self, key: jax.Array, step: jax.Array, scaling: LossScaleState) -> tuple[jax.Array, Any]:
        scale = None if self._composed.scaling is None else scaling.scale / self._composed.loss_size
        return jax.random.fold_in(key, step), scale

    def _make_behind(self, new: Arrays, old: Arrays, scaling: LossScaleState, finite: jax.Array) -> Any:
        """The model state and the loss's scale after a step, and whether it was skipped."""
        kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        follow = count_skipped if self._composed.scaling is None else self._composed.scaling.adjust
        return kept, follow(scaling, finite), 1 - finite.astype(jnp.int32)
