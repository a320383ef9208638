"""What a program that walks over layers does in the place of compiled steps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cjax.gradients import mean
from cjax.mesh import compiler_options
from cjax.optim import LossScale, LossScaleState, count_skipped, init_noise
from cjax.planner.homes import Home
from cjax.program.composed import Composed
from cjax.program.keep import load_slot, members, store_leaves
from cjax.program.starting import given_values, refuse_values
from cjax.program.state import Arrays
from cjax.program.steps import aux_means, make_trees
from cjax.program.walked import Value, WalkedState, empty_rows, fill, tree_of, values_of
from cjax.tree import PyTree
from cjax.walk.stores import make_rows
from cjax.walk.walk import Held, Row, in_turn
from cjax.walk.walker import OutsideState

KINDS = ("params", "frozen", "opt")


class Walking:
    """Runs the walks of one program."""

    def __init__(self, composed: Composed) -> None:
        assert composed.walker is not None
        self._composed, self._walker = composed, composed.walker
        options = compiler_options(composed.mesh)
        self._inputs = jax.jit(self._make_inputs, out_shardings=composed.whole, compiler_options=options)
        self._behind = jax.jit(self._make_behind, compiler_options=options)
        self._aux = jax.jit(
            lambda out: aux_means(composed, out), out_shardings=composed.whole, compiler_options=options
        )

    # -- states -------------------------------------------------------------------------------------------------------
    def start(self, key: jax.Array, params: Any) -> WalkedState:
        """A fresh state; `params` (see `Program.init`) replace the parameters they name."""
        composed, initial = self._composed, self._composed.capture.initial
        given = {} if params is None else given_values(composed, params)
        shelves = (composed.shelves.params, composed.shelves.frozen, composed.shelves.model_state)
        if initial is None:
            own = [self._leaves(*both) for both in zip(shelves, make_trees(composed)(key), strict=True)]
        else:
            own = [shelf.treedef.flatten_up_to(tree) for shelf, tree in zip(shelves, initial, strict=True)]
        problems: list[str] = []

        def value(tree: int) -> Value:
            def of(leaf: int, where: Any) -> Any:
                found = given.get((tree, leaf))
                return own[tree][leaf] if found is None else found.placed(where, problems)

            return of

        held, outside = self._walker.hold(), []
        for tree, kind in enumerate(KINDS[:2]):
            outside.append(fill(self._walker, held, kind, shelves[tree], composed.mesh, value(tree)))
            refuse_values(problems, composed)
        model_state = store_leaves(shelves[2], jax.tree.unflatten(shelves[2].treedef, own[2]), composed.mesh)
        scaling = (composed.scaling or LossScale()).init()
        small = jax.device_put((jnp.int32(0), key, scaling, init_noise()), composed.whole)
        return self._state(held, (*outside, self._first_opt(held, outside[0]), model_state), small)

    def _leaves(self, shelf: Any, stored: Arrays) -> list[Any]:
        leaves: list[Any] = [None] * sum(len(slot.leaves) for slot in shelf.slots)
        placed = members(shelf, shelf.leaf_shardings(self._composed.mesh))
        for slot, array, where in zip(shelf.slots, stored, placed, strict=True):
            for leaf, value in zip(slot.leaves, load_slot(slot, array, where, self._composed.mesh), strict=True):
                leaves[leaf] = value
        return leaves

    def _first_opt(self, held: Held, params: Arrays) -> Arrays:
        optimizer = self._walker.optimizer
        if optimizer is None:
            return ()
        for k, length in enumerate(self._walker.lengths):
            for at, (row,) in in_turn([held.params[k]], range(length) if self._walker.slots("opt", k) else ()):
                held.opt[k].put(at, optimizer.init_row(k, at, row))
        return optimizer.init_outside(params)

    def restored(self, trees: Mapping[str, PyTree], model_state: Arrays, small: Any) -> WalkedState:
        """A state from the user's trees "params", "frozen" and "opt", the stored model state, and the small rest."""
        composed, held = self._composed, self._walker.hold()
        outside = []
        for kind in KINDS:
            shelf = getattr(composed.shelves, kind)
            outside.append(fill(self._walker, held, kind, shelf, composed.mesh, values_of(shelf, trees[kind])))
        return self._state(held, (*outside, model_state), small)

    def with_params(self, state: WalkedState, params: PyTree) -> WalkedState:
        """`state` with a tree like the parameters in their place; layers' are in host memory between their turns."""
        walker, shelf = self._walker, self._composed.shelves.params
        homes: list[list[Home]] = [["host"] * length for length in walker.lengths]
        rows = [make_rows(walker.structs("params", k), of, "params", k) for k, of in enumerate(homes)]
        held = dataclasses.replace(state._held, params=rows)
        outside = fill(walker, held, "params", shelf, self._composed.mesh, values_of(shelf, params))
        for k, length in enumerate(walker.lengths):
            for at in range(length) if not walker.slots("params", k) else ():
                rows[k].put(at, ())
            rows[k].settle()
        return dataclasses.replace(state, _params=outside, _held=held)

    def _state(self, held: Held, trees: Any, small: Any) -> WalkedState:
        empty_rows(self._walker, held)
        for rows in held.every:
            rows.settle()
        step, key, scaling, noise = small
        shelves, walker = self._composed.shelves, self._walker
        return WalkedState(step, *trees, key, scaling, noise, shelves, walker, held)

    # -- steps --------------------------------------------------------------------------------------------------------
    def step(self, state: WalkedState, batch: PyTree) -> tuple[WalkedState, dict[str, Any]]:
        """One step of training; gives up `state`."""
        composed = self._composed
        key, scale = self._inputs(state._key, state.step, state._scaling)
        counted = state.step + 1
        done = self._walker.step(state._held, state.outside, batch, key, scale, state.step.delete)
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
        outer = fill(self._walker, state._held, "grads", shelf, self._composed.mesh, values_of(shelf, grads))
        give_up = state.step.delete
        done = self._walker.update(state._held, state.outside, outer, None, loss, {}, give_up)
        _, scaling, _ = self._behind((), (), state._scaling, done.finite)
        return self._next(state, done.outside, counted, state._model_state, scaling)

    def value_and_grad(self, state: WalkedState, batch: PyTree) -> tuple[jax.Array, PyTree, PyTree, Arrays]:
        """The loss, aux, gradients in the user's own tree, and the new model state; `state` stays."""
        key, scale = self._inputs(state._key, state.step, state._scaling)
        held = state._held

        def put(k: int, at: int, grads: Row, params: Row) -> None:
            held.grads[k].put(at, grads)

        out, outer = self._walker.gradients(held, state.outside, batch, key, scale, put)
        shelf = self._composed.shelves.params
        tree = tree_of(self._walker, held.grads, "grads", shelf, outer, self._composed.mesh)
        for k, length in enumerate(self._walker.lengths):
            for at in range(length):
                held.grads[k].forget(at)
        return mean(out.total, out.weight), self._aux(out), tree, out.model_state

    def _next(
        self, state: WalkedState, outside: OutsideState, step: jax.Array, model_state: Arrays, scaling: LossScaleState
    ) -> WalkedState:
        return dataclasses.replace(
            state, step=step, _params=outside.params, _opt=outside.opt, _model_state=model_state, _scaling=scaling
        )

    def _make_inputs(self, key: jax.Array, step: jax.Array, scaling: LossScaleState) -> tuple[jax.Array, Any]:
        scale = None if self._composed.scaling is None else scaling.scale / self._composed.loss_size
        return jax.random.fold_in(key, step), scale

    def _make_behind(self, new: Arrays, old: Arrays, scaling: LossScaleState, finite: jax.Array) -> Any:
        """The model state and the loss's scale after a step, and whether it was skipped."""
        kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        follow = count_skipped if self._composed.scaling is None else self._composed.scaling.adjust
        return kept, follow(scaling, finite), 1 - finite.astype(jnp.int32)
