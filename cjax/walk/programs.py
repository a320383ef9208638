"""The programs of a walk, each jitted once. What goes from one to the next is placed, or each would be compiled for
every placement that the compiler might choose for it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.gradients import Denominator, Evaluated, Scale, averaged, divisor_of
from cjax.mesh import BATCH_AXES
from cjax.sharding.place.model import ModelStorage
from cjax.sharding.storage.storage import Slot, axes_of_entry
from cjax.trace.emit.backward import is_real
from cjax.tree import PyTree
from cjax.walk.jitted import Jitted
from cjax.walk.layer_slots import layer_slot
from cjax.walk.model import Arrays, Outside, WalkModel, row_spec

Row = tuple[Arrays, Arrays]  # of a layer: params, frozen


class Programs:
    """What a walk calls. Lists of arrays go in and out as `WalkModel` says.

    A gradient is a list of the real arrays' alone. `index` is a micro-batch, `at` a layer.

    Args:
      model: the functions.
      storage: where the model's arrays are kept.
      mesh: the mesh.
      denominator: what the sum of all totals is divided by, from the sum of all weights.
      batch_shape: of a whole batch.
    """

    def __init__(
        self,
        model: WalkModel,
        storage: ModelStorage,
        mesh: Mesh,
        denominator: Denominator,
        batch_shape: PyTree,
    ) -> None:
        self.model, self.mesh, self._batch_shape = model, mesh, batch_shape
        self._storage, self._denominator = storage, denominator
        self._specs = [model.payload_specs(k) for k in range(model.num_stacks)]
        numbers = range(model.num_stacks)
        self.begin = self._jit(self._begin)
        self.enter = self._jit(self._enter)
        self.once = [self._jit(functools.partial(self._once, k)) for k in numbers]
        self.forward = [self._jit(functools.partial(self._forward, k), donate=("states",)) for k in numbers]
        self.leave = [self._jit(functools.partial(self._leave, k)) for k in numbers[:-1]]
        self.values = self._jit(self._values)
        self.zeros = self._jit(self._zeros)
        self.zero_row = [self._jit(functools.partial(self._zero_row, k)) for k in numbers]
        self.zero_once = [self._jit(functools.partial(self._zero_once, k)) for k in numbers]
        self.finish = self._jit(self._finish, donate=("sums", "states"))
        self.back_leave = [self._jit(functools.partial(self._back_leave, k), donate=("sums",)) for k in numbers[:-1]]
        self.backward = [
            self._jit(functools.partial(self._backward, k), donate=("moving", "passing", "own", "outer"))
            for k in numbers
        ]
        self.average = [self._jit(functools.partial(self._average, k), donate=("sums",)) for k in numbers]
        self.back_once = [self._jit(functools.partial(self._back_once, k), donate=("sums",)) for k in numbers]
        self.divisor = self._jit(self._divisor)
        self.back_enter = self._jit(self._back_enter, donate=("sums",))
        self.close = self._jit(self._close, donate=("grads",))

    def _jit(self, function: Callable[..., Any], donate: Sequence[str] = ()) -> Jitted:
        return Jitted(function, self.mesh, donate)

    # -- placements --
    def sharding(self, x: Any, spec: PartitionSpec) -> NamedSharding:
        """What `spec` says, whole along dims that do not divide evenly: results of programs have to."""
        sizes = [math.prod(self.mesh.shape[axis] for axis in axes_of_entry(entry)) for entry in spec]
        even = [None if n % size else entry for n, size, entry in zip(x.shape, sizes, spec, strict=True)]
        return NamedSharding(self.mesh, PartitionSpec(*even))

    def place(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """`x` where `spec` says."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(x, spec))

    def gradient_structs(self, k: int) -> list[jax.ShapeDtypeStruct]:
        """The gradients of a layer of stack `k`, as placed."""
        slots = [self._storage.params.slots[at] for at in self.model.places(k, "params")]
        found = []
        for slot in slots:
            x = jax.ShapeDtypeStruct(layer_slot(slot).stored_shape, slot.dtype)
            where = self.sharding(x, row_spec(slot, self.gradient_spec(slot)))
            found.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where))
        return found

    def payload_structs(self) -> list[list[jax.ShapeDtypeStruct]]:
        """For each stack what its layers change of one micro-batch, as placed."""
        storage, model = self._storage, self.model
        params, frozen = ([tree.shape()[i] for i in model.outside(kind)] for kind, tree in
                          (("params", storage.params), ("frozen", storage.frozen)))  # fmt: skip
        key = jax.eval_shape(lambda: jax.random.key(0))
        out, _, states = self.begin.eval_shape(
            tuple(params), tuple(frozen), storage.model_state.shape(), self._batch_shape, key
        )
        out = dataclasses.replace(out, params=tuple(params), frozen=tuple(frozen))
        payload, states = self.enter.eval_shape(out, np.int32(0), states)
        found = []
        for k in range(model.num_stacks):
            specs = model.passing(k, self._specs[k])[0]
            found.append(
                [
                    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(x, spec))
                    for x, spec in zip(model.passing(k, payload)[0], specs, strict=True)
                ]
            )
            if k + 1 < model.num_stacks:
                payload = self.leave[k].eval_shape(out, np.int32(0), states, payload)
        return found

    def _whole(self, results: Any) -> Any:
        return jax.tree.map(lambda x: self.place(x, PartitionSpec(*[None] * x.ndim)), results)

    def _payload(self, k: int, payload: Arrays) -> Arrays:
        return [self.place(x, spec) for x, spec in zip(payload, self._specs[k], strict=True)]

    def _moving(self, k: int, moving: Arrays, real: Sequence[bool] | None = None) -> Arrays:
        """What layers change, or the gradient of it."""
        specs = self.model.passing(k, self._specs[k])[0]
        specs = specs if real is None else [spec for spec, is_one in zip(specs, real, strict=True) if is_one]
        return [self.place(x, spec) for x, spec in zip(moving, specs, strict=True)]

    def _states(self, states: Arrays) -> Arrays:
        slots = self._storage.model_state.slots
        first = len(self.model.outside("frozen"))
        return [
            self.place(x, slots[place - first].stored_spec)
            for x, (place, *_) in zip(states, self.model.model.states, strict=True)
        ]

    def gradient_spec(self, slot: Slot) -> PartitionSpec:
        """Where the gradient of a leaf of a slot is kept."""
        return self._storage.state_specs[slot.leaves[0]]

    def _own_gradients(self, k: int, grads: Arrays) -> Arrays:
        slots = [self._storage.params.slots[at] for at in self.model.places(k, "params")]
        return [self.place(g, row_spec(slot, self.gradient_spec(slot))) for g, slot in zip(grads, slots, strict=True)]

    def _outer_gradients(self, grads: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        slots = [self._storage.params.slots[at] for at in self.model.outside("params")]
        return tuple(
            self.place(g, slot.stacked(self.gradient_spec(slot))) for g, slot in zip(grads, slots, strict=True)
        )

    # -- forward --
    def _begin(
        self, params: Any, frozen: Any, model_state: Any, batch: PyTree, key: jax.Array
    ) -> tuple[Outside, Any, Arrays]:
        out, new = self.model.begin(params, frozen, model_state, batch, key)
        slots = self._storage.model_state.slots
        history = tuple(
            self.place(x, PartitionSpec(None, *slot.stored_spec)) for x, slot in zip(out.history, slots, strict=True)
        )
        new = tuple(self.place(x, slot.stored_spec) for x, slot in zip(new, slots, strict=True))
        axes = tuple(axis for axis in BATCH_AXES if axis in self.mesh.axis_names)
        rows = tuple(
            self.place(x, PartitionSpec(None, axes, *[None] * (x.ndim - 2))) if x.ndim > 1 else x for x in out.batch
        )
        # Weights are handed on as they are: a copy of them would be a copy of the vocabulary.
        return Outside((), (), history, rows, out.key), new, self._states(self.model.states(model_state))

    def _once(self, k: int, out: Outside, states: Arrays) -> Arrays:
        once = self.model.once(k, out, states)
        return [self.place(x, spec) for x, spec in zip(once, self.model.once_specs(k), strict=True)]

    def _enter(self, out: Outside, index: jax.Array, states: Arrays) -> tuple[Arrays, Arrays]:
        payload, states = self.model.enter(out, index, states)
        return self._payload(0, payload), self._states(states)

    def _forward(
        self, k: int, row: Row, once: Arrays, out: Outside, index: jax.Array, at: jax.Array, states: Arrays,
        payload: Arrays,
    ) -> tuple[Arrays, Arrays]:  # fmt: skip
        moving, states = self.model.layer(k, row, once, out, index, at, states, payload, renews=True)
        return self._moving(k, moving), self._states(states)

    def _leave(self, k: int, out: Outside, index: jax.Array, states: Arrays, payload: Arrays) -> Arrays:
        return self._payload(k + 1, self.model.leave(k, out, index, states, payload))

    def _values(self, out: Outside, index: jax.Array, states: Arrays, payload: Arrays) -> Arrays:
        """The results of the loss, on all devices."""
        return self._whole(self.model.values(out, index, states, payload)[0])

    # -- backward --
    def _zeros(self, out: Outside, states: Arrays, payload: Arrays) -> tuple[Any, tuple[jax.Array, ...]]:
        """Room for sums: of results, and of gradients of what belongs to no layer."""
        shape = jax.eval_shape(self.model.results, out, jnp.int32(0), states, payload)[1]
        results = self._whole(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape))
        return results, self._outer_gradients([jnp.zeros_like(x) for x in out.params])

    def _zero_row(self, k: int, params: Arrays) -> Arrays:
        """Room for sums of the gradients of a layer's weights."""
        return self._own_gradients(k, [jnp.zeros_like(x) for x in params])

    def _zero_once(self, k: int, once: Arrays) -> Arrays:
        """And for those of what all layers of a stack read."""
        # Of rounded values in float32, or adding up would round at every layer.
        real = zip(once, self.model.learned(k, once), strict=True)
        zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x, learned in real if learned]
        return self._outer(k, zeros, self.model.learned(k, once))

    def _outer(self, k: int, sums: Arrays, learned: Sequence[bool]) -> Arrays:
        specs = [spec for spec, is_one in zip(self.model.once_specs(k), learned, strict=True) if is_one]
        return [self.place(x, spec) for x, spec in zip(sums, specs, strict=True)]

    def _finish(
        self, out: Outside, index: jax.Array, states: Arrays, payload: Arrays, sums: Any, scale: Scale
    ) -> tuple[Any, Arrays, Arrays, Arrays]:
        """Sums with a micro-batch's results, new states, and the gradients of what moves and of what passes."""
        results, new, grads, params = self.model.back_results(out, index, states, payload, scale)
        sums = jax.tree.map(jnp.add, sums, (results, params))
        moving, passing = self._parted(self.model.num_stacks - 1, payload, grads)
        return (self._whole(sums[0]), self._outer_gradients(sums[1])), self._states(new), moving, passing

    def _back_leave(
        self, k: int, out: Outside, index: jax.Array, states: Arrays, payload: Arrays, gradients: Arrays, sums: Any
    ) -> tuple[Any, Arrays, Arrays]:
        grads, params = self.model.back_leave(k, out, index, states, payload, gradients)
        return self._outer_gradients(jax.tree.map(jnp.add, sums, params)), *self._parted(k, payload, grads)

    def _parted(self, k: int, payload: Arrays, grads: Arrays) -> tuple[Arrays, Arrays]:
        """The gradients of all that a stack made, in its two parts."""
        real = [is_real(x) for x in payload]
        first, behind = self.model.passing(k, real)
        num = sum(first)
        specs = [s for s, is_one in zip(self.model.passing(k, self._specs[k])[1], behind, strict=True) if is_one]
        passing = [self.place(x, spec) for x, spec in zip(grads[num:], specs, strict=True)]
        return self._moving(k, grads[:num], first), passing

    def _backward(
        self, k: int, row: Row, once: Arrays, out: Outside, index: jax.Array, at: jax.Array, states: Arrays,
        payload: Arrays, moving: Arrays, passing: Arrays, own: Arrays, outer: Arrays,
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:  # fmt: skip
        """Gradients of what a layer was handed, and sums with those of its weights and of what all layers read."""
        grads, shared, handed = self.model.back_layer(k, row, once, out, index, at, states, payload, moving)
        new, more = self._parted(k, payload, handed)
        own = self._own_gradients(k, [a + b for a, b in zip(own, grads, strict=True)])
        outer = [a + b.astype(a.dtype) for a, b in zip(outer, shared, strict=True)]
        specs = self.model.passing(k, self._specs[k])[1]
        behind = self.model.passing(k, [is_real(x) for x in payload])[1]
        specs = [spec for spec, is_one in zip(specs, behind, strict=True) if is_one]
        passing = [self.place(a + b, spec) for a, b, spec in zip(passing, more, specs, strict=True)]
        return new, passing, own, self._outer(k, outer, self.model.learned(k, once))

    def _average(self, k: int, sums: Arrays, divisor: jax.Array) -> Arrays:
        """The gradients of a layer's weights, from sums over micro-batches."""
        return self._own_gradients(k, [g / divisor.astype(g.dtype) for g in sums])

    def _back_once(
        self, k: int, out: Outside, states: Arrays, gradients: Arrays, sums: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        return self._outer_gradients(jax.tree.map(jnp.add, sums, self.model.back_once(k, out, states, gradients)))

    def _back_enter(
        self, out: Outside, index: jax.Array, states: Arrays, gradients: Arrays, sums: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        return self._outer_gradients(jax.tree.map(jnp.add, sums, self.model.back_enter(out, index, states, gradients)))

    def _divisor(self, results: Any, scale: Scale) -> jax.Array:
        """What sums of gradients are divided by, from sums of results."""
        return self._whole(divisor_of(results[1], self.model.num, self._denominator, scale)[1])

    def _close(
        self, results: Any, grads: tuple[jax.Array, ...], model_state: Any, states: Arrays, scale: Scale
    ) -> tuple[Evaluated, tuple[jax.Array, ...]]:
        """What the whole batch gives, and the gradients of what belongs to no layer."""
        total, weight, aux = results
        slots = self._storage.model_state.slots
        new = self.model.model.with_states(model_state, states)
        new = tuple(self.place(x, slot.stored_spec) for x, slot in zip(new, slots, strict=True))
        sums = Evaluated(total, weight, aux, new)
        graded = averaged(sums, grads, self.model.num, self._denominator, scale, (None, 1))
        return graded.out, self._outer_gradients(graded.grads)
