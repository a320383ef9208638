"""`parallelize`: a model, a loss and an optimizer become a `Program`. The composition of every room, in order."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.gradients import (
    Denominator,
    Evaluated,
    Gradients,
    Line,
    Loss,
    Reduction,
    arrange_stages,
    locally_accumulated,
    micro_batched,
    pipelined,
    plain,
    reduction,
    sharing,
)
from cjax.mesh import BATCH_AXES, PIPE, Device, build_mesh, own_context, resolve_devices
from cjax.models import readers
from cjax.models.cross_entropy import all_at_once
from cjax.optim import LossScale
from cjax.pipeline.execute import Executor
from cjax.pipeline.table import Schedule
from cjax.plan import Plan
from cjax.planner.estimate import SLACK, Activations, state_bytes
from cjax.planner.hardware import hardware_of
from cjax.planner.search import first_fitting
from cjax.program import Parts, Program
from cjax.program.batches import batch_structs, with_rows
from cjax.sharding.place.local import LocalRows, local_rows
from cjax.sharding.place.model import ModelStorage, place_loss, store_model
from cjax.sharding.place.staged import StagedModel, stage_model
from cjax.sharding.storage.optimizer import store_optimizer
from cjax.sharding.storage.storage import Slot
from cjax.trace.author.capture import Capture, capture
from cjax.trace.dims.refine import refine
from cjax.trace.dims.refine_rules import whole
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.vectorize import vectorize
from cjax.trace.microbatches.combine import counters, denominator, lift, loss_size, loss_total
from cjax.trace.reading import Trace, trace_flat, trace_loss

PyTree = Any
Arrays = tuple[jax.Array, ...]


@own_context
def parallelize(
    model: Any,
    loss: Any,
    optimizer: optax.GradientTransformation | None,
    batch: PyTree,
    plan: Plan | str = "auto",
    *,
    wrt: Any = None,
    devices: Sequence[Device] | str | None = None,
    schedule: Schedule | None = None,
    loss_scale: LossScale | None = None,
    measure_noise: bool = False,
    verify: bool = False,
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
      schedule: a table of your own for a plan with `pipeline`, from `cjax.pipeline`; as many stages and micro-batches.
      loss_scale: how `precision=float16` scales the loss, if not as `cjax.optim.LossScale()` does.
      measure_noise: whether steps also give `metrics["noise_scale"]`, the batch size in examples beyond which larger
        ones are wasted, from the gradients of micro-batches or of data-parallel devices. Where there are the latter
        alone, all gradients are reduced behind the backward pass rather than during it.
      verify: whether the plan is checked before the first step, on a few rows of its batch against the loss as you
        wrote it on one device; a plan that computes something else raises `cjax.MismatchError`. A model that does not
        fit one device is not checked, and `program.verified` and the report say so.

    >>> import flax.linen as nn, numpy as np
    >>> batch = {"x": np.ones((8, 3), "float32"), "y": np.zeros((8, 1), "float32")}
    >>> loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
    >>> program = parallelize(nn.Dense(1), loss, optax.adamw(1e-3), batch, "data=1", devices=jax.devices()[:1])
    >>> state = program.init(0)
    >>> state, metrics = program.step(state, batch)
    >>> sorted(metrics)
    ['grad_norm', 'loss', 'skipped']
    """
    _check_optimizer(optimizer)
    _check_kinds(schedule, loss_scale, measure_noise)
    batch_shape = batch_structs(batch)
    captured = capture(model, loss, batch, wrt)
    found = resolve_devices(devices)
    program = compose(captured, optimizer, batch_shape, plan, found, schedule, loss_scale, measure_noise, verify)
    if loss_scale is not None and program.plan.precision != "float16":
        raise ValueError(
            f"loss_scale is for float16, and the plan {str(program.plan)!r} computes in {program.plan.precision}, "
            "whose range is float32's: leave loss_scale out, or write precision=float16."
        )
    return program


def compose(
    captured: Capture,
    optimizer: optax.GradientTransformation | None,
    batch_shape: PyTree,
    plan: Plan | str,
    devices: Sequence[Device],
    schedule: Schedule | None = None,
    loss_scale: LossScale | None = None,
    measure_noise: bool = False,
    verify: bool = False,
) -> Program:
    """From a captured model to a `Program`."""
    @functools.cache
    def sources(num_rows: int | None) -> tuple[PyTree, tuple[_Source, _Source]]:
        shape = batch_shape if num_rows is None else with_rows(batch_shape, num_rows)
        return shape, (_Source(captured, shape), _Source(_at_once(captured), shape))

    def again(
        plan: Plan | str, devices: Sequence[Device], schedule: Schedule | None = None, num_rows: int | None = None
    ) -> Parts:
        shape, both = sources(num_rows)
        parts = _compose(both, optimizer, shape, plan, devices, schedule, measure_noise, again)
        scaling = (loss_scale or LossScale()) if parts.plan.precision == "float16" else None
        return dataclasses.replace(parts, scaling=scaling, verifies=verify)

    return Program(again(plan, devices, schedule))


class _Source:
    """A captured model and its traces. They depend on a plan by the number of micro-batches, and by whether layers that
    are one weight each are taken in pairs, so that "auto" and every replan share them."""

    def __init__(self, captured: Capture, batch_shape: PyTree) -> None:
        self.captured = captured
        self._read = functools.cache(functools.partial(trace_loss, captured, batch_shape, train=True))

    def read(self, microbatches: int, pairs: bool = False, once: frozenset[int] = frozenset()) -> Trace:
        trace = self._read(microbatches, once=once)
        return self._read(microbatches, once=once, pairs=True) if pairs and trace.is_chain else trace


def _at_once(captured: Capture) -> Capture:
    """The model without loops over parts of its logits."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        with all_at_once():
            return captured.apply(*args, **kwargs)

    return dataclasses.replace(captured, apply=apply)


def _compose(
    sources: tuple[_Source, _Source],
    optimizer: optax.GradientTransformation | None,
    batch_shape: PyTree,
    plan: Plan | str,
    devices: Sequence[Device],
    schedule: Schedule | None,
    measure_noise: bool,
    again: Callable[..., Parts],
) -> Parts:
    """The parts of a program under one plan.

    Args:
      sources: the user's model and loss, and the same for grids of devices.
      optimizer: what trains it, if anything does.
      batch_shape: the whole batch, as ShapeDtypeStructs.
      plan: the plan.
      devices: what the plan is for.
      schedule: the user's own, of a pipeline.
      measure_noise: whether gradients of parts of the batch are measured.
      again: `(plan, devices, schedule, num_rows)` -> the parts under another plan, or for other batches.
    """
    plan, notes = _decide(sources[0].captured, optimizer, batch_shape, sources[0].read, plan, devices)
    source = sources[plan.tensor.mode != "1d"]
    captured = source.captured
    try:
        # Stages of a pipeline are made of whole layers; a grid splits both sides of a weight as it is.
        in_pairs = plan.tensor.mode == "1d" and plan.tensor.size > 1 and plan.pipeline.size == 1
        trace = source.read(plan.microbatches, in_pairs)
    except Exception as error:  # from the author's own code, which may know the size of the whole batch by heart
        if plan.microbatches > 1:
            _blame_rows(source, plan.microbatches, error)
        raise
    if plan.microbatches > 1 or measure_noise or plan.reduce is not None:
        trace = _lifted(source, batch_shape, trace, plan)
    mesh = build_mesh(plan.axis_sizes(), devices)
    if schedule is not None and plan.pipeline.size == 1:
        raise ValueError(
            f"`schedule` is for pipelines, and the plan {str(plan)!r} has none: add "
            f"pipeline={schedule.num_stages} microbatches={schedule.num_microbatches}"
        )
    line = arrange_stages(trace, plan, schedule) if plan.pipeline.size > 1 else None
    storage = store_model(captured, trace, plan, mesh, line.rows if line else {})
    gradients, more, loss_size = _gradients(captured, batch_shape, trace, storage, plan, mesh, line, measure_noise)
    stored_optimizer = None
    if optimizer is not None:
        specs = storage.state_specs if plan.zero_stage else storage.used_specs
        stored_optimizer = store_optimizer(optimizer, captured.params_shape, storage.params, specs.__getitem__, mesh)
    init = _as_init(captured, storage)
    return Parts(
        captured, plan, mesh, trace, storage, stored_optimizer, gradients, init, batch_shape,
        notes=(*notes, *storage.layout.notes, *more, *(line.notes if line else ())), compose=again,
        readers=readers, line=line, loss_size=loss_size,
    )  # fmt: skip


def _blame_rows(source: _Source, num: int, error: Exception) -> None:
    """Raises ValueError if `error`, of a loss on a micro-batch, does not come with the whole batch."""
    try:
        source.read(1)
    except Exception:  # it comes with any number of rows: the author's own, and for him to see as it is
        error.add_note(f"The loss ran on one of {num} micro-batches of this batch; see microbatches.")
        return
    raise ValueError(
        f"The loss runs on the whole batch and not on one of {num} micro-batches of it: {str(error).splitlines()[0]} "
        "It, or a leaf of the batch, knows how many rows the batch has. Take the number from the batch that it is "
        "given (x.shape[0]), give each example a row of its own in every leaf, or use microbatches=1."
    ) from error


def _lifted(source: _Source, batch_shape: PyTree, trace: Trace, plan: Plan) -> Trace:
    """The loss of a micro-batch as something that adds up to that of the batch."""
    num, captured = plan.microbatches, source.captured
    num_rows = next((leaf.shape[0] for leaf in jax.tree.leaves(batch_shape) if leaf.shape), 1)

    def again(rows: int) -> Any:
        return trace_flat(captured, with_rows(batch_shape, rows * num), num, trace)

    lifted = lift(trace, again, num_rows, shares=True, apart=plan.loss == "microbatch")
    if num == 1 or plan.loss == "microbatch":
        return lifted
    once = counters(lifted, captured.random)
    if not once:
        return lifted
    trace = source.read(num, trace.pairs, once)
    return lift(trace, again, num_rows, shares=True)


def _check_kinds(schedule: Any, loss_scale: Any, measure_noise: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` is {schedule!r}; give one of cjax.pipeline, or write the kind in the plan.")
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(f"`loss_scale` is {loss_scale!r}; write cjax.optim.LossScale(initial=2.0**15).")
    if not isinstance(measure_noise, bool):
        raise TypeError(f"`measure_noise` is {measure_noise!r}; write True or False.")


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is None or (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        return
    given = f"the function {optimizer.__name__}" if inspect.isfunction(optimizer) else f"a {type(optimizer).__name__}"
    raise TypeError(
        f"`optimizer` is {given}, not an optax transformation. Write optax.adamw(1e-3), or None for evaluation alone."
    )


def _decide(
    captured: Capture,
    optimizer: optax.GradientTransformation | None,
    batch_shape: PyTree,
    read: Callable[[int], Trace],
    plan: Plan | str,
    devices: Sequence[Device],
) -> tuple[Plan, tuple[str, ...]]:
    """The plan in full, and what there is to say about how it was chosen."""
    num_rows = [leaf.shape[0] for leaf in jax.tree.leaves(batch_shape) if leaf.shape]
    if not isinstance(plan, Plan | str):
        raise TypeError(
            f"`plan` is {plan!r}, a {type(plan).__name__}. Write text such as "
            '"data=4 tensor=2", a cjax.Plan(...), or "auto".'
        )
    if plan != "auto":
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        for rows in num_rows:
            if rows % plan.microbatches:
                near = max(1, rows // plan.microbatches) * plan.microbatches
                divisors = [str(n) for n in range(1, min(rows, 2 * plan.microbatches) + 1) if rows % n == 0]
                raise ValueError(
                    f"microbatches={plan.microbatches} does not divide a batch of {rows} rows; "
                    f"use {near} or {near + plan.microbatches} rows, or microbatches of {', '.join(divisors)}."
                )
        return plan.resolve(len(devices)), ()
    activations = Activations(read(1))
    params = sum(_bytes(leaf) for leaf in jax.tree.leaves(captured.params_shape))
    state = 0
    if optimizer is not None:
        with jax.numpy_dtype_promotion("standard"):  # of optax: see store_optimizer
            made = jax.eval_shape(optimizer.init, captured.params_shape)
        state = sum(_bytes(leaf) for leaf in jax.tree.leaves(made))
    limit, num = hardware_of(devices).memory, len(devices)

    def estimate(plan: Plan) -> int:
        return int(SLACK * (state_bytes(params, state, plan, num) + activations.bytes(plan, num)))

    chosen, size, fits = first_fitting(min(num_rows, default=1), num, limit, estimate)
    verdict = "the least that fits" if fits else "the leanest there is, and it may not fit"
    chosen = chosen.resolve(num)
    note = f"auto chose {chosen}: {verdict}, about {size / 2**30:.2g} of {limit / 2**30:.3g} GiB"
    return chosen, (note,)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _gradients(
    captured: Capture, batch_shape: PyTree, trace: Trace, storage: ModelStorage, plan: Plan, mesh: Mesh,
    line: Line | None, measures: bool,
) -> tuple[Gradients, tuple[str, ...], int]:
    """Gradients of a whole batch, what there is to say about how they are reduced, and what the sum over the losses of
    all its parts is to their mean."""
    divide = functools.partial(denominator, trace.ratio)
    num = plan.microbatches
    axes = tuple(a for a in BATCH_AXES if a in mesh.axis_names)
    num_shards = math.prod(mesh.shape[a] for a in axes)
    in_parts = plan.microbatches > 1 or line is not None
    own_sums = measures or (plan.reduce is not None and num_shards > 1)  # each device's own are needed
    why = ""
    if plan.sequence.size > 1:
        why = "positions are split, so gradients are reduced once per micro-batch"
    elif (plan.microbatches > 1 or own_sums) and plan.zero_stage < 3 and num_shards > 1:
        local = local_rows(captured, batch_shape, trace, storage, plan, mesh)
        if isinstance(local, LocalRows):
            reductions = _reductions(storage, plan, local.axes, mesh)
            more = _cost_of_waiting(reductions, storage, plan, mesh)
            if line is not None:
                stacks = line.stacks_of(local.trace)
                assert stacks is not None, "the loss on other rows has other layers"
                staged = stage_model(local.trace, stacks, storage, plan, mesh, local.layout, local.draw)
                gradients = _pipelined(staged, line, plan, local.axes, reductions, mesh, divide, measures, num_shards)
            else:
                run = place_loss(local.trace, storage, plan, mesh, local.layout, local.draw)
                gradients = locally_accumulated(
                    _as_loss(local.trace, run, num * num_shards), num, local.axes, reductions, mesh, divide, measures
                )
            gradients = sharing(gradients, trace.shared, num, num * num_shards)
            return gradients, more, num * num_shards * loss_size(local.trace)
        why = f"{local}, so gradients are reduced once per micro-batch"
    if plan.reduce is not None and num_shards > 1:
        reason = why.partition(", so")[0] or f"zero={plan.zero} reduces gradients during the backward pass"
        instead = "leave `reduce` out" + (", or write zero=2" if plan.zero_stage == 3 else "")
        raise ValueError(f"reduce={plan.reduce} needs each device's own sum of gradients, and {reason}: {instead}.")
    if measures and (line is not None or not in_parts):
        raise _cannot_measure(plan, num_shards, why)
    notes = (why,) if why and in_parts else ()
    if line is not None:
        staged = stage_model(trace, line.stacks, storage, plan, mesh)
        gradients = _pipelined(staged, line, plan, (), (), mesh, divide)
        return sharing(gradients, trace.shared, num, num), notes, num * loss_size(trace)
    loss = _as_loss(trace, place_loss(trace, storage, plan, mesh), num)
    if not in_parts:
        return sharing(plain(loss), trace.shared, 1, 1), (), 1

    def constrain(parts: list[jax.Array]) -> list[jax.Array]:
        return [lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, axes))) for x in parts]

    gradients = micro_batched(loss, num, constrain, divide, measures)
    return sharing(gradients, trace.shared, num, num), notes, num * loss_size(trace)


def _cannot_measure(plan: Plan, num_shards: int, why: str) -> ValueError:
    """Why there are no gradients of two batch sizes under a plan."""
    if why:
        reason = why.partition(", so")[0]
    elif num_shards == 1:
        reason = "no two devices see different examples"
    else:
        reason = f"zero={plan.zero} reduces gradients during the backward pass"
    instead = "take a pipeline with data > 1" if plan.pipeline.size > 1 else "add microbatches=2"
    return ValueError(f"measure_noise needs gradients of parts of the batch, and with {plan} {reason}: {instead}.")


def _pipelined(
    staged: StagedModel,
    line: Line,
    plan: Plan,
    axes: tuple[str, ...],
    reductions: Sequence[Reduction],
    mesh: Mesh,
    divide: Denominator,
    measures: bool = False,
    num_shards: int = 1,
) -> Gradients:
    trace = staged.stages.cut.trace

    def total(outs: list[jax.Array]) -> Any:
        out = _sorted_results(trace, outs, plan.microbatches * num_shards)
        return out.total, (out.total, out.weight, out.aux)

    executor = Executor(staged.stages, line.schedule, line.part, staged.trained, PIPE, total, staged.states)
    return pipelined(staged, executor, plan.microbatches, axes, reductions, mesh, divide, measures)


def _reductions(storage: ModelStorage, plan: Plan, axes: tuple[str, ...], mesh: Mesh) -> list[Reduction]:
    """Gradients go where their optimizer state is, if ZeRO splits that."""
    found = []
    for slot in storage.params.slots:
        state = storage.state_specs[slot.leaves[0]] if plan.zero_stage else slot.spec
        how = reduction(slot.stored_shape, slot.stored_spec, slot.stacked(state), axes, mesh)
        found.append(dataclasses.replace(how, dtype=plan.reduce))
    return found


def _cost_of_waiting(reductions: Sequence[Reduction], storage: ModelStorage, plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    if plan.zero_stage < 2:
        return ()
    size = 0
    for slot, how in zip(storage.params.slots, reductions, strict=True):
        shape = NamedSharding(mesh, how.summed).shard_shape(slot.stored_shape)
        size += math.prod(shape) * slot.dtype.itemsize
    return (
        f"zero=2 adds up the gradients of {plan.microbatches} micro-batches before it splits them: "
        f"{size / 2**20:,.1f} MiB a device",
    )


def _as_loss(trace: Trace, run: Any, num_parts: int) -> Loss:
    """The results of a trace, sorted, for one of several parts."""

    def loss(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: Any, index: Any) -> Evaluated:
        return _sorted_results(trace, run(params, frozen, carried, jax.tree.leaves(batch), key, index), num_parts)

    return loss


def _sorted_results(trace: Trace, results: Sequence[jax.Array], num_parts: int) -> Evaluated:
    """The results of one of `num_parts` parts; what of aux is a sum is made as large as if all parts had as much, since
    the parts' mean is taken."""
    outs = iter(results)
    total = next(outs)
    weight = next(outs) if trace.has_weight else None
    total = total if weight is None else loss_total(trace.ratio, total, weight)
    aux = []
    for i, is_mean in enumerate(trace.aux_is_mean):
        value = next(outs)
        aux.append((value * num_parts if i in trace.aux_sums else value, next(outs) if is_mean else None))
    return Evaluated(total, weight, aux, tuple(outs))


def _as_init(captured: Capture, storage: ModelStorage) -> Any:
    """`key -> stored (params, frozen, carried)`: the author's init, each stack of layers made at once."""
    trees = (storage.params, storage.frozen, storage.carried)

    def init(key: jax.Array) -> tuple[Arrays, Arrays, Arrays]:
        closed = simplify(jax.make_jaxpr(captured.init)(key))
        closed = refine(closed, [whole(key.shape)], [form for tree in trees for form in tree.forms])
        groups: list[tuple[int, ...]] = []
        offset = 0
        for tree in trees:
            groups += [tuple(i + offset for i in group) for group in tree.groups]
            offset += sum(map(len, tree.groups))
        outs = iter(vectorize(closed, [(0,)], groups)([key]))
        params, frozen, carried = (tree.pad([_in_rows(slot, next(outs)) for slot in tree.slots]) for tree in trees)
        return params, frozen, carried

    return init


def _in_rows(slot: Slot, array: jax.Array) -> jax.Array:
    """What init made: a stack has its rows' order already, a leaf that holds all layers has the author's."""
    return array if slot.is_stack else slot.in_row_order(array)
