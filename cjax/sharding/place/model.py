"""A traced loss laid out on a mesh: where its arrays are kept, and the loss as a function of what is kept."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.mesh import DATA, DEPTH, EXPERT, PIPE, SEQUENCE, ZERO
from cjax.plan import Plan
from cjax.sharding.attention.kernel import kernel_for
from cjax.sharding.layout.layout import Layout, make_layout
from cjax.sharding.layout.zero import shard_over
from cjax.sharding.place.for_gpus import most_apart, sums_with_gradients
from cjax.sharding.place.in_turn import InTurn
from cjax.sharding.place.order import Order, order_of
from cjax.sharding.place.ordered import OrderedPlacer
from cjax.sharding.place.place import DrawOnShard, Placer, WeightPlacement
from cjax.sharding.place.stacked import read_again, stacked_leaves, stacks_of_leaves
from cjax.sharding.place.weight_sums import Sum, WeightSums
from cjax.sharding.storage.storage import StageRows, Storage, as_spec, axes_of_entry, make_storage, stackable
from cjax.trace.author.capture import Capture
from cjax.trace.emit.emit import emit
from cjax.trace.emit.precision import LOWS
from cjax.trace.reading import Trace
from cjax.tree import PyTree

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class ModelStorage:
    """How the three trees of a model are kept, and where the optimizer's part of each parameter lives.

    `given` is how a pass over the batch is given the parameters: as they are kept, or where ZeRO-1 and -2 keep a
    device's part of them alone, gathered ahead of it (`ahead.py`). Of these, `in_turn` are the leaves that each layer
    gathers in its turn and saves for its backward pass: ahead of all layers nothing would hide the transfer. With
    micro-batches each of them would gather again.
    """

    params: Storage
    given: Storage
    frozen: Storage
    model_state: Storage
    used_specs: tuple[PartitionSpec, ...]  # of every weight (params, then frozen): as the layout has it
    zero_specs: tuple[PartitionSpec, ...]  # likewise, and over the data axis where ZeRO asks for it
    state_specs: tuple[PartitionSpec, ...]  # likewise, and over the stages of a pipeline what no layer has
    layout: Layout
    in_turn: frozenset[int] = frozenset()

    @property
    def whole(self) -> Storage:
        """The parameters, placed as they are used."""
        return _placed(self.params, self.used_specs)

    @property
    def num_params(self) -> int:
        return sum(len(slot.leaves) for slot in self.params.slots)


def store_model(
    capture: Capture,
    trace: Trace,
    plan: Plan,
    mesh: Mesh,
    rows: Mapping[tuple[int, ...], StageRows | None] = MappingProxyType({}),
    adds_up: bool = True,
) -> ModelStorage:
    """Decide where each array of the model lives.

    Args:
      capture: the user's model and loss.
      trace: of the loss.
      plan: the plan.
      mesh: the mesh.
      rows: for weights that are kept a layer at a time, how layers are spread over the stages of a pipeline, None where
        there is none: by the leaves of all layers in order, or the one leaf that holds them all.
      adds_up: whether gradients of several parts of the batch are added up.

    Raises:
      ValueError: what the plan asks for does not divide; see `make_layout`.
    """
    axis_sizes = dict(mesh.shape)
    layout = make_layout(trace, axis_sizes, plan.rules, sequence=plan.sequence)
    weights = [*trace.leaves_of("params"), *trace.leaves_of("frozen")]
    used = tuple(_in_rows(i, layout.weight_spec(i, trace.classes_of(i), trace.leaves[i].shape), rows) for i in weights)
    others = tuple(a for a in (EXPERT, SEQUENCE, DEPTH) if a in axis_sizes)
    axes = (ZERO,) if axis_sizes.get(ZERO, 1) > 1 else (DATA, *others)
    axes = tuple(a for a in axes if axis_sizes.get(a, 1) > 1 and plan.zero_stage)
    layer_dims = {trace.dims.class_of(d) for d in trace.dims.layers}
    in_layers = {leaf for group, found in rows.items() if found for leaf in group}

    def split(leaf: int, spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
        shape, classes = trace.leaves[leaf].shape, trace.classes_of(leaf)
        used = {a for entry in spec for a in axes_of_entry(entry)}
        axes = tuple(a for a in axes if a not in used)  # without that along which experts are shared out
        lead = next((k for k, c in enumerate(classes) if c not in layer_dims), len(classes))
        # The layers of the author's own stack stay together: a loop over a split dim would gather at each turn.
        inner = shard_over(PartitionSpec(*spec[lead:]), shape[lead:], axes, axis_sizes)
        return PartitionSpec(*spec[:lead], *inner)

    def both(leaf: int, spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """Over ZeRO's axes; and over the stages too, which all have what no layer has: one of them updates it."""
        if axis_sizes.get(PIPE, 1) > 1 and leaf not in in_layers:
            # Of one dim, so that a sum which is scattered over the first can be over the second.
            state = split(leaf, spec, (*axes, PIPE))
            if state != spec:
                return _without(state, PIPE), state
        zero = split(leaf, spec, axes)
        return zero, zero

    zero, state = map(tuple, zip(*map(both, weights, used), strict=True)) if weights else ((), ())
    # Where weights are rounded to be computed with, nobody but the optimizer reads them in float32, and it reads parts.
    is_gathered = state != used and plan.zero_stage < 3 and plan.precision in LOWS and not plan.walks
    whole = zero if plan.zero_stage == 3 else used  # frozen ones have no optimizer that needs a part alone
    kept = state if is_gathered else whole
    stacks = [*rows, *(group for run in trace.runs for group in _stacked_inputs(trace, run.stacked))]
    rows_of = {group[0]: found for group, found in rows.items()}
    num_params, num_frozen = len(trace.leaves_of("params")), len(trace.leaves_of("frozen"))

    def storage(tree: PyTree, start: int, spec_of: Callable[[int], PartitionSpec]) -> Storage:
        leaves = jax.tree.leaves(tree)
        groups = [tuple(i - start for i in g) for g in stacks if all(start <= i < start + len(leaves) for i in g)]
        groups = stackable(groups, leaves)
        return make_storage(
            tree, groups, spec_of, axis_sizes, lambda i: trace.form_of(start + i), lambda i: rows_of.get(start + i)
        )

    def model_state_spec(i: int) -> PartitionSpec:
        leaf = trace.leaves[num_params + num_frozen + i]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return PartitionSpec(*[None] * len(leaf.shape))
        return layout.spec(trace.classes_of(num_params + num_frozen + i), leaf.shape)

    params = storage(capture.params_shape, 0, kept.__getitem__)
    given, in_turn = params, frozenset[int]()
    if is_gathered:
        is_once = not adds_up and plan.pipeline.size == 1
        once = stacked_leaves(trace) - read_again(trace) if is_once else set[int]()
        own = [
            slot.leaves for slot in params.slots if once.issuperset(slot.leaves) and slot.spec != used[slot.leaves[0]]
        ]
        in_turn = frozenset(leaf for leaves in own for leaf in leaves)
        given = _placed(params, [kept[i] if i in in_turn else spec for i, spec in enumerate(used)])
    return ModelStorage(
        params,
        given,
        storage(capture.frozen_shape, num_params, lambda i: whole[num_params + i]),
        storage(capture.model_state_shape, num_params + num_frozen, model_state_spec),
        used,
        zero,
        state,
        layout,
        in_turn,
    )


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    return as_spec(tuple(a for a in axes_of_entry(entry) if a != axis) for entry in spec)


def _placed(storage: Storage, specs: Sequence[PartitionSpec]) -> Storage:
    """The same arrays, placed as `specs` of their leaves say."""
    return replace(storage, slots=tuple(replace(slot, spec=specs[slot.leaves[0]]) for slot in storage.slots))


def _in_rows(leaf: int, spec: PartitionSpec, rows: Mapping[tuple[int, ...], StageRows | None]) -> PartitionSpec:
    """The placement of a leaf that holds all layers: its first dim goes over the stages, if there are any."""
    if (leaf,) not in rows:
        return spec
    found = rows[leaf,]
    return PartitionSpec(found.axis if found else None, *spec[1:])


def _in_layer_order(tree: Storage, arrays: Sequence[jax.Array | InTurn]) -> list[jax.Array | InTurn]:
    """Stored arrays as layers read them: what they gather or reduce in their turn is kept so."""
    slots = zip(tree.slots, arrays, strict=True)
    return [x if isinstance(x, InTurn) else slot.in_layer_order(slot.unpad(x)) for slot, x in slots]


def _stacked_inputs(trace: Trace, stacked: Sequence[tuple[Any, ...]]) -> list[tuple[int, ...]]:
    index = {var: i for i, var in enumerate(trace.closed.jaxpr.invars)}
    return [tuple(index[v] for v in group) for group in stacked if all(v in index for v in group)]


def make_placer(
    trace: Trace,
    storage: ModelStorage,
    plan: Plan,
    mesh: Mesh,
    layout: Layout,
    draw: DrawOnShard | None = None,
    reduces: bool = False,
    order: Order | None = None,
    is_graded: bool = True,
) -> Placer:
    """The hooks that place a trace of this model; arguments as for `place_loss`. `reduces`: whether ZeRO's shares of
    gradients are made in each backward pass whatever the stage. `order`: of a ring's positions, where it is kept."""
    # Stage 1 splits gradients too wherever all devices reduce them together: a reduce-scatter moves half of what an
    # all-reduce does, and the update needs no more.
    local = layout is not storage.layout  # each device adds up its own rows' gradients, and all reduce once
    reduces_here = plan.zero_stage == 3 or (plan.zero_stage >= 1 and (reduces or not local))
    gradient = storage.zero_specs if reduces_here else storage.used_specs
    stored = storage.zero_specs if plan.zero_stage == 3 else storage.used_specs
    stored = [storage.zero_specs[i] if i in storage.in_turn else spec for i, spec in enumerate(stored)]
    specs = zip(storage.used_specs, gradient, stored, strict=True)
    is_whole = plan.pipeline.size == 1  # a layer's backward pass is not made apart, of what a pipeline saves
    again = storage.in_turn | (_small(trace) if plan.zero_stage == 3 and is_whole else set[int]())
    weights = {i: WeightPlacement(*each, saved=i in again) for i, each in enumerate(specs)}
    gathers = plan.zero_stage == 3 and math.prod(mesh.shape.values()) > 1
    kernel = kernel_for(mesh)
    # Where a stage makes gradients of its weights later than those that it hands on, these wait for nothing.
    waits = plan.pipeline.schedule != "zero_bubble"
    unrolls = most_apart(plan, mesh) if is_graded else 0
    sums_ahead = is_graded and sums_with_gradients(plan, mesh)
    adds_up = mesh.size > 1 and is_graded and is_whole and plan.overlap == 1
    sums = WeightSums(mesh, _added_up(trace, weights) if adds_up else {})
    given = (
        trace, layout, mesh, weights, plan.precision, plan.remat, gathers, draw, plan.sequence, kernel, waits, unrolls,
        sums_ahead, is_graded and plan.overlap > 1, sums,
    )  # fmt: skip
    return Placer(*given) if order is None else OrderedPlacer(order, *given)


def _small(trace: Trace) -> set[int]:
    """Weights of layers that are a 256th of the largest one, or less. Gathered once more in the backward pass, each
    would take a message's time, and keep larger ones waiting."""
    sizes = {stack: math.prod(trace.leaves[stack[0]].shape) for stack in stacks_of_leaves(trace)}
    return {leaf for stack, size in sizes.items() if 256 * size <= max(sizes.values()) for leaf in stack}


def _added_up(trace: Trace, weights: Mapping[int, WeightPlacement]) -> dict[int, Sum]:
    """The sums over devices of gradients of weights that each of them has whole, and one product reads once."""
    products = [(leaf, m.looped) for m in trace.dims.matmuls for leaf in (m.lhs_origin, m.rhs_origin)]
    reads = collections.Counter(leaf for leaf, looped in products for _ in range(1 + looped))
    alone = [i for i in trace.leaves_of("params") if reads[i] == 1]
    return {i: Sum(trace.leaves[i].shape, weights[i].gradient) for i in alone if not any(weights[i].used)}


def place_loss(
    trace: Trace,
    storage: ModelStorage,
    plan: Plan,
    mesh: Mesh,
    layout: Layout | None = None,
    draw: DrawOnShard | None = None,
    is_graded: bool = True,
) -> Callable[..., list[jax.Array]]:
    """The loss as a function of stored arrays: `(params, frozen, model_state, batch leaves, key, index) -> results`.

    Parameters are placed as `storage.given`; results are the trace's, the new model state as stored, and the stacks of
    weights that came in parts (`in_turn.py`), whole.

    Args:
      trace: of a loss of this model; its batch may differ from the one that decided the storage.
      storage: where the model's arrays are kept.
      plan: precision, remat and ZeRO stage.
      mesh: the mesh.
      layout: of this trace, if it is not the one that decided the storage.
      draw: how random numbers are drawn, if the trace is of some devices' rows (`cjax.sharding.place.local`).
      is_graded: whether there is a backward pass.
    """
    layout = layout or storage.layout
    is_ring = plan.sequence.mode == "ring" and mesh.shape.get(PIPE, 1) == 1
    placer = make_placer(
        trace, storage, plan, mesh, layout, draw, order=order_of(trace, layout) if is_ring else None,
        is_graded=is_graded,
    )  # fmt: skip
    ordered = placer if isinstance(placer, OrderedPlacer) else None
    sizes = [len(trace.leaves_of(kind)) for kind in ("params", "frozen", "model_state", "batch")]
    groups: list[tuple[int, ...]] = []
    offset = 0
    for part, size in zip((storage.params, storage.frozen, storage.model_state), sizes, strict=False):
        groups += [tuple(i + offset for i in group) for group in part.layer_groups]
        offset += size
    groups += [(i,) for i in range(offset, len(trace.leaves))]
    num_results = len(trace.closed.jaxpr.outvars) - sizes[2]
    out_groups = [(i,) for i in range(num_results)]
    out_groups += [tuple(i + num_results for i in group) for group in storage.model_state.groups]
    run = placer.whole(emit(trace.closed, trace.runs, trace.dims.top, groups, out_groups, placer))
    batch_leaves = trace.leaves_of("batch")

    def loss(
        params: Arrays,
        frozen: Arrays,
        model_state: Arrays,
        batch: Sequence[jax.Array],
        key: jax.Array,
        index: jax.Array,
    ) -> list[jax.Array]:
        batch = [
            placer.constrain(x, placer.spec_of_batch(var, trace.dims.top)) if x.ndim else x
            for var, x in zip((trace.closed.jaxpr.invars[i] for i in batch_leaves), batch, strict=True)
        ]
        if ordered is not None:
            batch = [ordered.given(i, x) for i, x in zip(batch_leaves, batch, strict=True)]
        trees = ((storage.params, params), (storage.frozen, frozen), (storage.model_state, model_state))
        stored = [array for tree, arrays in trees for array in _in_layer_order(tree, arrays)]
        placer.gathered.clear()
        with placer.copies.made(), placer.filled.made():
            outs = run([*stored, *batch, key, index])
        whole = [placer.gathered[leaf] for slot in storage.params.slots if (leaf := slot.leaves[0]) in placer.gathered]
        placer.gathered.clear()
        return [*outs[:num_results], *storage.model_state.pad(outs[num_results:]), *whole]

    return loss
