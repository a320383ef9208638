"""`Program`: what a user holds. One model, one loss, one plan; every method works on logical arrays."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.gradients import Evaluated, Gradients, mean
from cjax.mesh import BATCH_AXES, compile_lowered, is_compile_only
from cjax.plan import Plan
from cjax.sharding.model import ModelStorage
from cjax.sharding.optimizer import StoredOptimizer
from cjax.trace.capture import Capture
from cjax.trace.reading import Trace

PyTree = Any
Arrays = tuple[jax.Array, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "_params", "_frozen", "_opt", "_carried", "_key"],
    meta_fields=[],
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


class Program:
    """A model, its loss and its optimizer under one plan; made by `cjax.parallelize`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.plan, self.mesh, self.trace = parts.plan, parts.mesh, parts.trace

    def __repr__(self) -> str:
        device = self.mesh.devices.flat[0]
        return f"Program({str(self.plan)!r}, {self.mesh.size} x {device.device_kind})"

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which part of each batch this process loads."""
        return jax.process_index(), jax.process_count()

    # -- shapes and placements ----------------------------------------------------------------------------------
    @functools.cached_property
    def _state_shardings(self) -> State:
        whole = NamedSharding(self.mesh, PartitionSpec())
        parts = self._parts
        return State(
            whole,
            parts.storage.params.shardings(self.mesh),
            parts.storage.frozen.shardings(self.mesh),
            parts.optimizer.storage.shardings(self.mesh) if parts.optimizer else (),
            parts.storage.carried.shardings(self.mesh),
            whole,
        )

    @functools.cached_property
    def _state_shape(self) -> State:
        parts = self._parts
        shape = State(
            jax.ShapeDtypeStruct((), jnp.int32),
            parts.storage.params.shape(),
            parts.storage.frozen.shape(),
            parts.optimizer.storage.shape() if parts.optimizer else (),
            parts.storage.carried.shape(),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shape, self._state_shardings
        )

    @functools.cached_property
    def _batch_shardings(self) -> PyTree:
        axes = tuple(a for a in BATCH_AXES if a in self.mesh.axis_names)
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, PartitionSpec(axes) if leaf.shape else PartitionSpec()),
            self._parts.batch_shape,
        )

    # -- state --------------------------------------------------------------------------------------------------
    def init(self, seed_or_key: int | jax.Array = 0) -> State:
        """A fresh state, each array born where it lives.

        Args:
          seed_or_key: an integer, or a JAX key.
        """
        key = jax.random.key(seed_or_key) if isinstance(seed_or_key, int | np.integer) else seed_or_key
        initial = self._parts.capture.initial
        if initial is not None:
            return self._adopt(initial, key)
        return self._init(key)

    @functools.cached_property
    def _init(self) -> Any:
        def init(key: jax.Array) -> State:
            params, frozen, carried = self._parts.init(key)
            return self._new_state(params, frozen, carried, key)

        return jax.jit(init, out_shardings=self._state_shardings)

    def _new_state(self, params: Arrays, frozen: Arrays, carried: Arrays, key: jax.Array) -> State:
        optimizer = self._parts.optimizer
        opt = optimizer.init(params) if optimizer else ()
        return State(jnp.int32(0), params, frozen, opt, carried, key)

    def _adopt(self, trees: tuple[PyTree, PyTree, PyTree], key: jax.Array) -> State:
        """A state of weights that the user's model already holds, slot by slot, so that one slot is the most that
        exists twice."""
        storages = (self._parts.storage.params, self._parts.storage.frozen, self._parts.storage.carried)
        stored = []
        for storage, tree in zip(storages, trees, strict=True):
            leaves = storage.treedef.flatten_up_to(tree)
            arrays = []
            for slot, sharding in zip(storage.slots, storage.shardings(self.mesh), strict=True):
                members = [leaves[i] for i in slot.leaves]

                def gather(*xs: jax.Array, slot: Any = slot) -> jax.Array:
                    return slot.pad(jnp.stack(xs) if slot.is_stack else jnp.copy(xs[0]))

                placed = [jax.device_put(m, NamedSharding(self.mesh, PartitionSpec())) for m in members]
                arrays.append(jax.jit(gather, out_shardings=sharding)(*placed))
            stored.append(tuple(arrays))
        make = jax.jit(self._new_state, out_shardings=self._state_shardings)
        return make(*stored, jax.device_put(key, NamedSharding(self.mesh, PartitionSpec())))

    def params(self, state: State) -> PyTree:
        """The trained parameters, in the user's own tree."""
        return self._parts.storage.params.load(state._params)

    def model(self, state: State) -> Any:
        """The user's own model, trained."""
        storage = self._parts.storage
        trees = storage.params.load(state._params), storage.frozen.load(state._frozen)
        return self._parts.capture.rebuild(*trees, storage.carried.load(state._carried))

    # -- training -----------------------------------------------------------------------------------------------
    def step(self, state: State, batch: PyTree) -> tuple[State, dict[str, Any]]:
        """One step of training. `state` is given up; a step that is not finite leaves parameters and all else as it was.

        Args:
          state: from `init`, `restore` or the step before.
          batch: arrays of the shapes and dtypes that `parallelize` saw.

        Returns:
          The next state and metrics, scalar arrays: `loss`, `grad_norm`, `skipped` (1 if the step was not finite and
          so changed nothing but the step's number), and the loss's own `aux`.
        """
        return self._compiled_step(state, self._placed(batch))

    @functools.cached_property
    def _jitted_step(self) -> Any:
        if self._parts.optimizer is None:
            raise ValueError("this program has no optimizer; give parallelize one, such as optax.adamw(1e-3)")
        optimizer = self._parts.optimizer

        def step(state: State, batch: PyTree) -> tuple[State, dict[str, Any]]:
            key = jax.random.fold_in(state._key, state.step)
            out, grads = self._parts.gradients(state._params, state._frozen, state._carried, batch, key)
            loss = mean(out.total, out.weight)
            norm = optax.global_norm(grads)
            params, opt = optimizer.update(grads, state._opt, state._params)
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            # A NaN never costs the last good state: the select is fused into the update, which reads both anyway.
            new = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old) if new is not old else new,
                (params, opt, out.carried),
                (state._params, state._opt, state._carried),
            )
            metrics = {"loss": loss, "grad_norm": norm, "skipped": 1 - finite.astype(jnp.int32)}
            if self.trace.aux_is_mean:
                metrics["aux"] = self._aux(out)
            return State(state.step + 1, new[0], state._frozen, new[1], new[2], state._key), metrics

        return jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(self._state_shardings, self._batch_shardings),
            out_shardings=(self._state_shardings, NamedSharding(self.mesh, PartitionSpec())),
        )

    @functools.cached_property
    def _compiled_step(self) -> Any:
        return compile_lowered(self.lower(), list(self.mesh.devices.flat))

    def lower(self) -> jax.stages.Lowered:
        """The step, lowered for the plan's mesh: for anyone's tools."""
        return self._jitted_step.lower(self._state_shape, self._batch_structs)

    @property
    def _batch_structs(self) -> PyTree:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._parts.batch_shape,
            self._batch_shardings,
        )

    def _aux(self, out: Evaluated) -> PyTree:
        return jax.tree.unflatten(self.trace.aux_tree, [mean(total, weight) for total, weight in out.aux])

    def _placed(self, batch: PyTree) -> PyTree:
        return batch

    def value_and_grad(self, state: State, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """The loss and its gradients, in the user's own tree; `state` stays valid."""
        loss, grads = self._value_and_grad(state, self._placed(batch))
        return loss, self._parts.storage.params.load(grads)

    @functools.cached_property
    def _value_and_grad(self) -> Any:
        def value_and_grad(state: State, batch: PyTree) -> tuple[jax.Array, Arrays]:
            key = jax.random.fold_in(state._key, state.step)
            out, grads = self._parts.gradients(state._params, state._frozen, state._carried, batch, key)
            return mean(out.total, out.weight), grads

        storage = self._parts.storage
        specs = [dataclasses.replace(s, spec=storage.state_specs[s.leaves[0]]) for s in storage.params.slots]
        zero = self.plan.zero_stage >= 2
        placed = dataclasses.replace(storage.params, slots=tuple(specs)) if zero else storage.params
        return jax.jit(
            value_and_grad,
            in_shardings=(self._state_shardings, self._batch_shardings),
            out_shardings=(NamedSharding(self.mesh, PartitionSpec()), placed.shardings(self.mesh)),
        )
