"""`parallelize`: a model, a loss and an optimizer become a `Program`. The composition of every room, in order."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from cjax.gradients import Evaluated, Gradients, Loss, micro_batched, plain
from cjax.mesh import BATCH_AXES, Device, build_mesh, resolve_devices
from cjax.plan import Plan, require_supported
from cjax.planner.estimate import SLACK, Activations, state_bytes
from cjax.planner.hardware import hardware_of
from cjax.planner.search import first_fitting
from cjax.program import Parts, Program
from cjax.sharding.model import ModelStorage, place_loss, store_model
from cjax.sharding.optimizer import store_optimizer
from cjax.trace.capture import Capture, capture
from cjax.trace.reading import Trace, trace_loss
from cjax.trace.simplify import simplify
from cjax.trace.vectorize import vectorize

PyTree = Any
Arrays = tuple[jax.Array, ...]


def parallelize(
    model: Any,
    loss: Any,
    optimizer: optax.GradientTransformation | None,
    batch: PyTree,
    plan: Plan | str = "auto",
    *,
    wrt: Any = None,
    devices: Sequence[Device] | str | None = None,
) -> Program:
    """Lay a Flax model out over many devices.

    Args:
      model: a `flax.linen.Module`, a `flax.nnx.Module` that holds its weights, or a builder `lambda rngs: Net(rngs)`.
      loss: `loss(model, batch[, key][, train])`, a scalar mean, a `cjax.Mean`, or a pair of either and aux.
      optimizer: any optax transformation; None for evaluation alone.
      batch: arrays or ShapeDtypeStructs of global shape, batch dim first.
      plan: text or `Plan`; see `cjax.Plan`.
      wrt: what is trained: a regex on the path, `(path, leaf) -> bool`, or an NNX filter.
      devices: JAX devices, or text such as "h100:64" to compile for hardware that is not here.

    >>> program = cjax.parallelize(model, loss, optax.adamw(1e-3), batch, "data=4 tensor=2 zero=1")
    >>> state = program.init(0)
    >>> state, metrics = program.step(state, batch)
    """
    captured = capture(model, loss, batch, wrt)
    batch_shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    found = resolve_devices(devices)
    return compose(captured, optimizer, batch_shape, plan, found)


def compose(
    captured: Capture,
    optimizer: optax.GradientTransformation | None,
    batch_shape: PyTree,
    plan: Plan | str,
    devices: Sequence[Device],
) -> Program:
    """From a captured model to a `Program`."""
    plan, notes = _decide(captured, optimizer, batch_shape, plan, devices)
    trace = trace_loss(captured, batch_shape, plan.microbatches, train=True)
    mesh = build_mesh(plan.axis_sizes(), devices)
    storage = store_model(captured, trace, plan, mesh)
    run = place_loss(trace, storage, plan, mesh)
    loss = _as_loss(trace, run, batch_shape)
    gradients: Gradients
    if plan.microbatches == 1:
        gradients = plain(loss)
    else:
        axes = tuple(a for a in BATCH_AXES if a in mesh.axis_names)

        def constrain(parts: list[jax.Array]) -> list[jax.Array]:
            return [lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, axes))) for x in parts]

        gradients = micro_batched(loss, plan.microbatches, constrain)
    stored_optimizer = None
    if optimizer is not None:
        specs = storage.state_specs if plan.zero_stage else storage.used_specs
        stored_optimizer = store_optimizer(optimizer, captured.params_shape, storage.params, specs.__getitem__, mesh)
    init = _as_init(captured, storage)

    def again(plan: Plan | str, devices: Sequence[Device]) -> Parts:
        return compose(captured, optimizer, batch_shape, plan, devices)._parts

    return Program(
        Parts(
            captured, plan, mesh, trace, storage, stored_optimizer, gradients, init, batch_shape,
            notes=(*notes, *storage.layout.notes), compose=again,
        )
    )  # fmt: skip


def _decide(
    captured: Capture,
    optimizer: optax.GradientTransformation | None,
    batch_shape: PyTree,
    plan: Plan | str,
    devices: Sequence[Device],
) -> tuple[Plan, tuple[str, ...]]:
    """The plan in full, and what there is to say about how it was chosen."""
    num_rows = [leaf.shape[0] for leaf in jax.tree.leaves(batch_shape) if leaf.shape]
    if plan != "auto":
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        require_supported(plan)
        for rows in num_rows:
            if rows % plan.microbatches:
                near = max(1, rows // plan.microbatches) * plan.microbatches
                raise ValueError(
                    f"microbatches={plan.microbatches} does not divide a batch of {rows} rows; "
                    f"use {near} or {near + plan.microbatches} rows."
                )
        return plan.resolve(len(devices)), ()
    trace = trace_loss(captured, batch_shape, 1, train=True)
    activations = Activations(trace)
    params = sum(_bytes(leaf) for leaf in jax.tree.leaves(captured.params_shape))
    state = 0
    if optimizer is not None:
        state = sum(_bytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, captured.params_shape)))
    limit, num = hardware_of(devices).memory, len(devices)

    def estimate(plan: Plan) -> int:
        return int(SLACK * (state_bytes(params, state, plan, num) + activations.bytes(plan, num)))

    chosen, size, fits = first_fitting(min(num_rows, default=1), num, limit, estimate)
    verdict = "the least that fits" if fits else "the leanest there is, and it may not fit"
    note = f"auto chose {chosen}: {verdict}, about {size / 2**30:.2g} of {limit / 2**30:.3g} GiB"
    return chosen.resolve(num), (note,)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _as_loss(trace: Trace, run: Any, batch_shape: PyTree) -> Loss:
    """The results of a trace, sorted."""

    def loss(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: Any, index: Any) -> Evaluated:
        outs = iter(run(params, frozen, carried, jax.tree.leaves(batch), key, index))
        total = next(outs)
        weight = next(outs) if trace.has_weight else None
        aux = [(next(outs), next(outs) if is_mean else None) for is_mean in trace.aux_is_mean]
        return Evaluated(total, weight, aux, tuple(outs))

    return loss


def _as_init(captured: Capture, storage: ModelStorage) -> Any:
    """`key -> stored (params, frozen, carried)`: the author's init, each stack of layers made at once."""
    trees = (storage.params, storage.frozen, storage.carried)

    def init(key: jax.Array) -> tuple[Arrays, Arrays, Arrays]:
        closed = simplify(jax.make_jaxpr(captured.init)(key))
        groups: list[tuple[int, ...]] = []
        offset = 0
        for tree in trees:
            groups += [tuple(i + offset for i in group) for group in tree.groups]
            offset += sum(map(len, tree.groups))
        outs = iter(vectorize(closed, [(0,)], groups)([key]))
        params, frozen, carried = (tree.pad([next(outs) for _ in tree.slots]) for tree in trees)
        return params, frozen, carried

    return init
