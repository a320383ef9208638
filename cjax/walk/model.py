"""What a walk computes, as functions of arrays: what comes before the layers, one layer, what comes after, and back."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from cjax.gradients import Scale, cut_rows, divisors
from cjax.sharding.place.staged import StagedModel
from cjax.sharding.storage.storage import Slot
from cjax.trace.emit.backward import is_real
from cjax.trace.jaxpr.view import scan_of
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.stages.stacks import Entry
from cjax.trace.stages.stages import Stages
from cjax.tree import PyTree
from cjax.walk.layer_slots import layer_slot
from cjax.walk.quantized import as_computed

Arrays = list[jax.Array]
Total = Callable[[Arrays], tuple[jax.Array, Any]]  # results of the loss -> its total, results that are added up


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "frozen", "history", "batch", "key"], meta_fields=[]
)
@dataclass(frozen=True)
class Outside:
    """What belongs to no layer, and is there for the whole of a step.

    Args:
      params, frozen: weights that no stack has one each of, as stored.
      history: the model state that each micro-batch sees, micro-batches on dim 0, as stored.
      batch: leaves of the batch, micro-batches on dim 0 of what has rows.
      key: of random numbers, this step's.
    """

    params: tuple[jax.Array, ...]
    frozen: tuple[jax.Array, ...]
    history: tuple[jax.Array, ...]
    batch: tuple[jax.Array, ...]
    key: jax.Array


class WalkModel:
    """A model that is walked through.

    What a stack is handed has two parts: what its layers change, *moving*, and what passes through to whoever reads it,
    *passing*, which is kept once and not by each layer.

    Args:
      model: the loss in stages.
      num_microbatches: how many parts a batch has.
      total: sorts the results of the loss.
      unread: slots of "params" and "frozen" of which layers have rows that are not read here.
    """

    def __init__(
        self,
        model: StagedModel,
        num_microbatches: int,
        total: Total,
        unread: Mapping[str, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        self.model, self.num, self.total, self._unread = model, num_microbatches, total, unread
        self.num_stacks = len(self.stages.cut.stacks)

    @property
    def stages(self) -> Stages:
        return self.model.stages

    # -- which stored array is whose --
    def places(self, k: int, kind: str) -> tuple[int, ...]:
        """The slots of "params" or "frozen" of which stack `k` has a row for each layer."""
        return tuple(at for tree, at in self.model.slots[k] if tree == kind)

    def outside(self, kind: str) -> tuple[int, ...]:
        """The slots of "params" or "frozen" that belong to no stack."""
        mine = {at for k in range(self.num_stacks) for at in self.places(k, kind)} | self._unread.get(kind, frozenset())
        return tuple(at for at in range(len(self._slots(kind))) if at not in mine)

    def _slots(self, kind: str) -> tuple[Slot, ...]:
        return getattr(self.model.storage, kind).slots

    def _whole(self, kind: str, outside: Sequence[jax.Array]) -> Any:
        """The tuple of all slots' arrays, without those of layers, which nobody reads there."""
        found = dict(zip(self.outside(kind), outside, strict=True))
        for at in self._unread.get(kind, ()):
            slot = self._slots(kind)[at]
            found[at] = jnp.zeros(slot.stored_shape, slot.dtype)  # never made, since nobody reads it
        return tuple(found.get(at) for at in range(len(self._slots(kind))))

    def passing(self, k: int, payload: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What stack `k` is handed, in its two parts."""
        num = len(payload) - len(self.stages.cut.transferred[k])
        return list(payload[:num]), list(payload[num:])

    # -- around the layers --
    def begin(self, params: Any, frozen: Any, model_state: Any, batch: PyTree, key: jax.Array) -> tuple[Outside, Any]:
        """What a step reads besides layers, from stored arrays; and the model state behind the last micro-batch, but
        for what is made of examples."""
        leaves = jax.tree.leaves(batch)
        shared = self.stages.cut.trace.shared
        more = [] if shared is None else divisors(shared, leaves, key, self.num, self.num)
        rows = [cut_rows(leaf, self.num) if leaf.ndim else leaf for leaf in leaves]
        first = [x[0] if leaf.ndim else x for x, leaf in zip(rows, leaves, strict=True)] + more
        whole = self._whole("params", params), self._whole("frozen", frozen)

        def advance(model_state: Any, index: Any) -> tuple[Any, Any]:
            return self.model.next_model_state(*whole, model_state, first, key, index), model_state

        new, history = lax.scan(advance, model_state, jnp.arange(self.num, dtype=jnp.int32))
        return Outside(tuple(params), tuple(frozen), history, (*rows, *more), key), new

    def states(self, model_state: Any) -> Arrays:
        """Of a stored model state, what is made of examples, as layers read and make it."""
        kept = self.model.storage.model_state.in_layer_order(model_state)
        first = len(self.outside("frozen"))
        return [jnp.asarray(kept[place - first]) for place, *_ in self.model.states]

    def enter(self, out: Outside, index: Any, states: Arrays) -> tuple[Arrays, Arrays]:
        """What the first layer is handed."""
        given, shared = self._given(out, index, states), self._shared(out)
        payload = self.stages.enter(shared, given)
        if self.stages.cut.states.before:
            states = self._renewed("before", 0, states, self.stages.states_before(shared, given))
        return payload, states

    def leave(self, k: int, out: Outside, index: Any, states: Arrays, payload: Arrays) -> Arrays:
        """From what the last layer of stack `k` hands on to what the first of the next is handed."""
        return self.stages.leave(k, self._shared(out), self._given(out, index, states), payload)

    def results(self, out: Outside, index: Any, states: Arrays, payload: Arrays) -> tuple[jax.Array, Any, Arrays]:
        """The total of the loss, all results that are added up, and new states."""
        last = self.num_stacks - 1
        values, new = self.values(out, index, states, payload)
        total, results = self.total(values)
        return total, results, self._renewed("after", last, states, new)

    def values(self, out: Outside, index: Any, states: Arrays, payload: Arrays) -> tuple[Arrays, Arrays]:
        """The results of the loss as they are, and states that are made behind the last layer."""
        outs = self.stages.leave(self.num_stacks - 1, self._shared(out), self._given(out, index, states), payload)
        num = len(self.stages.cut.results())
        return outs[:num], outs[num:]

    def _renewed(self, whose: str, k: int, states: Arrays, new: Arrays) -> Arrays:
        """`states` with those that are made outside of layers replaced."""
        found = list(states)
        for at, (_, maker, stack, of) in enumerate(self.model.states):
            if (maker, stack) == (whose, k):
                made = jnp.stack([new[j] for j in of]) if len(of) > 1 else new[of[0]]
                found[at] = made.astype(states[at].dtype)
        return found

    def _shared(self, out: Outside) -> Arrays:
        return self.model.shared(self._whole("params", out.params))

    def _given(self, out: Outside, index: Any, states: Arrays) -> list[Any]:
        def at(x: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(x, index, keepdims=False)

        batch = [leaf for leaf in self.stages.cut.trace.leaves_of("batch")]
        ranks = [len(self.stages.cut.trace.leaves[i].shape) for i in batch]
        rows = [at(x) if rank else x for x, rank in zip(out.batch, ranks, strict=True)]
        now = tuple(map(at, out.history))
        given = self.model.given(self._whole("frozen", out.frozen), now, rows, out.key, jnp.asarray(index, jnp.int32))
        for (place, *_), x in zip(self.model.states, states, strict=True):
            given[place] = x
        return given

    # -- layers --
    def once(self, k: int, out: Outside, states: Arrays) -> Arrays:
        """What layers of stack `k` read that depends on no micro-batch."""
        return self.stages.once(k, self._shared(out), self._given(out, jnp.int32(0), states))

    def learned(self, k: int, once: Sequence[Any]) -> list[bool]:
        """Which of `once` have gradients."""
        return [is_learned and is_real(x) for x, is_learned in zip(once, self.stages.cut.learned[k], strict=True)]

    def layer(
        self,
        k: int,
        row: tuple[Arrays, Arrays],
        once: Arrays,
        out: Outside,
        index: Any,
        at: Any,
        states: Arrays,
        payload: Arrays,
        renews: bool = False,
    ) -> tuple[Arrays, Arrays]:
        """What layer `at` of stack `k` makes of what moves, for micro-batch `index`; and states, new ones if it
        `renews` them."""
        ready, recomputed = self.stages.ready(k, self.weights(k, *row)), self.recomputed(k, out, index, states)
        outs = self.stages.layer(k, ready, once, recomputed, at, payload)
        found = list(states)
        if renews and self.stages.cut.states.layers[k]:
            new = self.stages.layer(k, ready, once, recomputed, at, payload, states=True)  # merged with the one above
            for i, (_, maker, stack, j) in enumerate(self.model.states):
                if (maker, stack) == ("layers", k):
                    found[i] = lax.dynamic_update_index_in_dim(states[i], new[j].astype(states[i].dtype), at, 0)
        return self.passing(k, outs)[0], found

    def recomputed(self, k: int, out: Outside, index: Any, states: Arrays) -> Arrays:
        """What layers of stack `k` read that depends on the micro-batch alone."""
        return self.stages.recomputed(k, self._shared(out), self._given(out, index, states))

    def weights(self, k: int, params: Arrays, frozen: Arrays) -> Arrays:
        """A layer's weights in the order of its stack, without padding."""
        left = {"params": iter(params), "frozen": iter(frozen)}
        found = []
        for kind, at in self.model.slots[k]:
            slot = layer_slot(self._slots(kind)[at])
            found.append(as_computed(next(left[kind]), slot.dtype)[tuple(slice(0, n) for n in slot.shape)])
        return found

    # -- back --
    def back_layer(
        self,
        k: int,
        row: tuple[Arrays, Arrays],
        once: Arrays,
        out: Outside,
        index: Any,
        at: Any,
        states: Arrays,
        payload: Arrays,
        gradients: Arrays,
    ) -> tuple[Arrays, Arrays, Arrays]:
        """From the gradient of what a layer made of what moves: those of its weights as kept, of the learned of `once`,
        and of all that it was handed, the real arrays alone."""
        real, learned = [is_real(x) for x in payload], self.learned(k, once)

        def of(params: Arrays, some: Arrays, moved: Arrays) -> Arrays:
            handed, every = _filled(payload, real, moved), _filled(once, learned, some)
            outs, _ = self.layer(k, (params, row[1]), every, out, index, at, states, handed)
            return [x for x in outs if is_real(x)]

        _, pull = jax.vjp(of, row[0], _chosen(once, learned), _chosen(payload, real))
        return pull(gradients)

    def back_leave(
        self, k: int, out: Outside, index: Any, states: Arrays, payload: Arrays, gradients: Arrays
    ) -> tuple[Arrays, tuple[jax.Array, ...]]:
        """From the gradient of what stack `k + 1` was handed to those of what stack `k` made, and of params outside."""
        real = [is_real(x) for x in payload]

        def of(params: tuple[jax.Array, ...], moved: Arrays) -> Arrays:
            outs = self.leave(k, _with_params(out, params), index, states, _filled(payload, real, moved))
            return [x for x in outs if is_real(x)]

        _, pull = jax.vjp(of, out.params, _chosen(payload, real))
        params, moved = pull(gradients)
        return moved, params

    def back_results(
        self, out: Outside, index: Any, states: Arrays, payload: Arrays, scale: Scale
    ) -> tuple[Any, Arrays, Arrays, tuple[jax.Array, ...]]:
        """Results, new states, and the gradients of what the last stack made, and of params outside."""
        real = [is_real(x) for x in payload]

        def of(params: tuple[jax.Array, ...], moved: Arrays) -> Any:
            inside = _with_params(out, params)
            total, results, new = self.results(inside, index, states, _filled(payload, real, moved))
            return total, (results, new)

        total, pull, (results, new) = jax.vjp(of, out.params, _chosen(payload, real), has_aux=True)
        params, moved = pull(jnp.ones_like(total) if scale is None else scale.astype(total.dtype))
        return results, new, moved, params

    def back_enter(self, out: Outside, index: Any, states: Arrays, gradients: Arrays) -> tuple[jax.Array, ...]:
        """From the gradient of what the first layer was handed to that of params outside."""

        def of(params: tuple[jax.Array, ...]) -> Arrays:
            payload, _ = self.enter(_with_params(out, params), index, states)
            return [x for x in payload if is_real(x)]

        return jax.vjp(of, out.params)[1](gradients)[0]

    def back_once(self, k: int, out: Outside, states: Arrays, gradients: Arrays) -> tuple[jax.Array, ...]:
        """From the gradients of the learned of `once` to that of params outside."""

        def of(params: tuple[jax.Array, ...]) -> Arrays:
            once = self.once(k, _with_params(out, params), states)
            return _chosen(once, self.learned(k, once))

        values, pull = jax.vjp(of, out.params)
        return pull([g.astype(x.dtype) for g, x in zip(gradients, values, strict=True)])[0]

    # -- placements --
    def payload_specs(self, k: int) -> list[PartitionSpec]:
        """Where what stack `k` is handed lies."""
        cut, layout = self.stages.cut, self.model.layout
        stack, top = cut.stacks[k], cut.trace.dims.top
        if isinstance(stack.of, RepeatedLayers):
            scope, names = top, [first for first, *_ in stack.of.carries]
        else:
            loop = scan_of(stack.of)
            scope, names = top.inner[id(stack.of)], loop.carries(loop.body.invars)
        dims = cut.trace.dims
        specs = [layout.spec(dims.of(name, scope), name.aval.shape) for name in names]
        for entry in stack.outputs:
            if entry:
                spec = layout.spec(dims.of(entry[0], top), entry[0].aval.shape)
                specs.append(PartitionSpec(None, *spec) if stack.is_run else spec)
        specs += [layout.spec(dims.of(v, top), v.aval.shape) for v in stack.last_only if v is not None]
        return specs + [self._entry_spec(entry) for entry in cut.transferred[k]]

    def once_specs(self, k: int) -> list[PartitionSpec]:
        """Where what all layers of stack `k` read lies."""
        return [self._entry_spec(entry) for entry in self.stages.cut.once[k]]

    def _entry_spec(self, entry: Entry) -> PartitionSpec:
        dims, first = self.stages.cut.trace.dims, next(iter(entry))
        spec = self.model.layout.spec(dims.of(first, dims.top), first.aval.shape)
        return PartitionSpec(None, *spec) if len(entry) > 1 else spec


def row_spec(slot: Slot, spec: PartitionSpec) -> PartitionSpec:
    """The placement of one layer of what a slot stores, from that of a leaf."""
    return spec if slot.is_stack else PartitionSpec(*spec[1:])


def _with_params(out: Outside, params: tuple[jax.Array, ...]) -> Outside:
    return Outside(params, out.frozen, out.history, out.batch, out.key)


def _chosen(items: Sequence[jax.Array], which: Sequence[bool]) -> Arrays:
    return [x for x, chosen in zip(items, which, strict=True) if chosen]


def _filled(items: Sequence[jax.Array], which: Sequence[bool], some: Sequence[jax.Array]) -> Arrays:
    """`items` with those of `which` replaced."""
    found = iter(some)
    return [next(found) if chosen else x for x, chosen in zip(items, which, strict=True)]
