"""A traced loss laid out on a mesh and cut into stages: which stored array is whose, in the order that stages take."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from cjax.mesh import PIPE
from cjax.plan import Plan
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.model import ModelStorage, make_placer
from cjax.sharding.place.place import DrawOnShard, Placer
from cjax.sharding.storage.storage import Storage
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import LayerStack, cut, widened
from cjax.trace.stages.stages import Stages

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StagedModel:
    """A model whose stored arrays are those of `storage` and whose loss is computed by `stages`."""

    stages: Stages
    storage: ModelStorage
    placer: Placer
    layout: Layout

    @functools.cached_property
    def trained(self) -> list[list[bool]]:
        """For each stack, which of its weights are trained."""
        return [[kind == "params" for kind, _ in found] for found in self.slots]

    @functools.cached_property
    def in_stacks(self) -> tuple[bool, ...]:
        """For each stored parameter, whether a stack has one each of it."""
        mine = {at for found in self.slots for kind, at in found if kind == "params"}
        return tuple(at in mine for at in range(len(self.storage.params.slots)))

    def summed_over(self, batch_axes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """For each stored parameter the axes whose devices have gradients of their own, of which these split the batch:
        a layer's is on its own stage, of what is in no layer each stage has a share."""
        return [batch_axes if is_stack else (*batch_axes, PIPE) for is_stack in self.in_stacks]

    @functools.cached_property
    def states(self) -> list[tuple[int, str, int, Any]]:
        """Leaves of the model state that are made of examples: their place among `given`, who makes them ("layers" of a
        stack, "before" or "after" the stacks), the stack, and which of its: one of the layers', or all that are kept
        together (of layers too cheap to be a stack)."""
        states, last = self.stages.cut.states, len(self.stages.cut.stacks) - 1
        first, groups = self._num_frozen, self.storage.model_state.layer_groups
        whose: dict[tuple[int, ...], tuple[str, int, Any]] = {
            group: ("layers", k, j) for k, of in enumerate(states.layers) for j, (_, group) in enumerate(of)
        }
        for name, k, made in (("before", 0, states.before), ("after", last, states.after)):
            whose |= {group: (name, k, tuple(map(made.index, group))) for group in groups if set(group) <= set(made)}
        assert states.every == {i for group in whose for i in group}, "state is kept with what is made elsewhere"
        assert set(whose) <= set(groups), "state of layers is kept in other groups than their weights"
        return [(first + at, *whose[group]) for at, group in enumerate(groups) if group in whose]

    @property
    def _num_frozen(self) -> int:
        """How many stored frozen arrays are in no stack; they come first among what is given."""
        mine = {at for found in self.slots for kind, at in found if kind == "frozen"}
        return len(self.storage.frozen.slots) - len(mine)

    def stage_specs(self, kind: str) -> tuple[PartitionSpec, ...]:
        """Over the pipe axis alone, the placement of the stored arrays of "params" or "frozen"."""
        storage: Storage = getattr(self.storage, kind)
        mine = {at for found in self.slots for k, at in found if k == kind}
        return tuple(
            PartitionSpec(slot.rows.axis) if at in mine and slot.rows else PartitionSpec()
            for at, slot in enumerate(storage.slots)
        )

    def shared(self, params: Arrays) -> list[jax.Array]:
        """Parameters that no stack has one each of, without padding."""
        slots = zip(self.storage.params.slots, params, self.in_stacks, strict=True)
        return [slot.in_layer_order(slot.unpad(x)) for slot, x, is_stack in slots if not is_stack]

    def stacks(self, params: Arrays, frozen: Arrays) -> list[list[jax.Array]]:
        """For each stack its weights: a stage's own rows, without other padding."""
        arrays = {"params": params, "frozen": frozen}
        return [
            [getattr(self.storage, kind).slots[at].trim_rows(arrays[kind][at]) for kind, at in found]
            for found in self.slots
        ]

    def given(self, frozen: Arrays, model_state: Arrays, batch: Sequence[Any], key: Any, index: Any) -> list[Any]:
        """What stages read that is not trained, from stored arrays and a micro-batch's leaves."""
        trace = self.stages.cut.trace
        rows = [
            self.placer.constrain(x, self.layout.spec(trace.classes_of(i), x.shape)) if x.ndim else x
            for i, x in zip(trace.leaves_of("batch"), batch, strict=True)
        ]
        mine = {at for found in self.slots for kind, at in found if kind == "frozen"}
        slots = enumerate(zip(self.storage.frozen.slots, frozen, strict=True))
        whole = [slot.in_layer_order(slot.unpad(x)) for at, (slot, x) in slots if at not in mine]
        return [*whole, *self.storage.model_state.in_layer_order(model_state), *rows, key, index]

    def next_model_state(
        self, params: Arrays, frozen: Arrays, model_state: Arrays, batch: Sequence[Any], key: Any, index: Any
    ) -> Arrays:
        """The stored model state after a micro-batch."""
        given = self.given(frozen, model_state, batch, key, index)
        found = self.stages.next_model_state(self.shared(params), given, self.storage.model_state.layer_groups)
        return self.storage.model_state.pad(found)

    def with_states(self, model_state: Arrays, states: Sequence[jax.Array]) -> Arrays:
        """The stored model state, some leaves of it replaced by `states`."""
        first, slots = self._num_frozen, self.storage.model_state.slots
        found = {place - first: x for (place, *_), x in zip(self.states, states, strict=True)}
        kept = enumerate(zip(slots, model_state, strict=True))
        return tuple(slot.pad(found[at]) if at in found else x for at, (slot, x) in kept)

    def stored_gradients(self, shared: Sequence[jax.Array], stacks: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Gradients in the order, the shapes and the dtypes of stored parameters."""
        others, found = iter(shared), {}
        for of_stack, arrays in zip(self.slots, stacks, strict=True):
            mine = [at for kind, at in of_stack if kind == "params"]
            found.update(zip(mine, arrays, strict=True))
        slots = self.storage.params.slots
        grads = [slot.fill_rows(found[at]) if at in found else slot.pad(next(others)) for at, slot in enumerate(slots)]
        return [grad.astype(slot.dtype) for slot, grad in zip(slots, grads, strict=True)]

    @functools.cached_property
    def slots(self) -> list[list[tuple[str, int]]]:
        """For each stack, the stored arrays of its weights: the tree that each is in, and its place there."""
        num_params = self.storage.num_params
        places: dict[tuple[int, ...], tuple[str, int]] = {}
        for kind, offset in (("params", 0), ("frozen", num_params)):
            for at, slot in enumerate(getattr(self.storage, kind).slots):
                places[tuple(leaf + offset for leaf in slot.layer_leaves)] = kind, at
        stacks, leaves = self.stages.cut.stacks, self.stages.cut.trace.leaves
        # What layers remember from pass to pass is theirs as weights are, and stored by nobody.
        stored = [[group for group in s.weights if leaves[group[0]].kind != "model_state"] for s in stacks]
        return [[places[group] for group in groups] for groups in stored]


def stage_model(
    trace: Trace,
    stacks: Sequence[LayerStack],
    storage: ModelStorage,
    plan: Plan,
    mesh: Mesh,
    layout: Layout | None = None,
    draw: DrawOnShard | None = None,
    reduces: bool = False,
) -> StagedModel:
    """The loss of a trace in stages, cut at its stacks of layers; other arguments as for `make_placer`."""
    layout = layout or storage.layout
    placer = make_placer(trace, storage, plan, mesh, layout, draw, reduces)
    stacks = [widened(stack, trace, placer) for stack in stacks]
    mine = {group for stack in stacks for group in stack.weights}
    num_params = storage.num_params
    offsets: Mapping[str, int] = {
        "params": 0, "frozen": num_params, "model_state": num_params + len(trace.leaves_of("frozen"))
    }  # fmt: skip
    groups = {
        kind: [tuple(leaf + offset for leaf in group) for group in getattr(storage, kind).layer_groups]
        for kind, offset in offsets.items()
    }
    trained = [group for group in groups["params"] if group not in mine]
    given = [group for group in groups["frozen"] if group not in mine] + groups["model_state"]
    given += [(i,) for kind in ("batch", "key", "index") for i in trace.leaves_of(kind)]
    return StagedModel(Stages(cut(trace, stacks), placer, trained, given), storage, placer, layout)
