"""Gradients of the kind that was chosen, made of a loss that is laid out: one short function for each kind."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.gradients.accumulated import (
    Arrays,
    Denominator,
    Evaluated,
    Gradients,
    Loss,
    gathering,
    locally_accumulated,
    micro_batched,
    plain,
    sharing,
)
from cjax.gradients.choose import Choice, LaidOut
from cjax.gradients.line import Line
from cjax.gradients.pipelined import pipelined
from cjax.gradients.reduced import Reduction, reduction
from cjax.jax_compat.core import Literal
from cjax.mesh import PIPE
from cjax.pipeline.execute import Executor
from cjax.plan import Plan
from cjax.sharding.place.ahead import make_ahead
from cjax.sharding.place.for_gpus import works_in_turn
from cjax.sharding.place.local import LocalRows, batches_of_their_own
from cjax.sharding.place.model import place_loss
from cjax.sharding.place.stacked import read_again, stacked_leaves, stacks_of_leaves
from cjax.sharding.place.staged import StagedModel, stage_model
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.microbatches.combine import denominator, loss_size, loss_total
from cjax.trace.reading import Trace
from cjax.trace.stages.counters import depends
from cjax.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Built:
    """Gradients of a whole batch.

    Args:
      gradients: the function.
      notes: what there is to say about how they are reduced.
      loss_size: what the sum over the losses of all parts is to their mean: gradients of parts are that much larger.
      gathers_in_turn: whether layers gather their weights, and keep them for their backward pass.
    """

    gradients: Gradients
    notes: tuple[str, ...]
    loss_size: int
    gathers_in_turn: bool


def build_gradients(loss: LaidOut, choice: Choice, measures: bool = False) -> Built:
    """The gradients that were chosen.

    Args:
      loss: as the plan lays it out.
      choice: of this loss, by `choose`.
      measures: whether gradients of parts of the batch are measured.
    """
    plan, shared, trace = loss.plan, loss.trace.shared, loss.trace if choice.local is None else choice.local.trace
    # A part is one device's rows of one micro-batch where devices add up alone.
    num = plan.microbatches * (1 if choice.local is None else loss.num_shards)
    # Losses of parts add up to that many means. Told to whoever scales a loss against overflow: gradients are as much
    # larger until they are divided.
    size = num * loss_size(trace)
    turns = _turns(loss, choice, measures)
    match choice.kind, choice.local, loss.line:
        # One part of all rows: nothing is added up, so that XLA may reduce each gradient where it is made.
        case "whole", _, _:
            run = place_loss(trace, loss.storage, plan, loss.mesh)
            gradients, size = plain(_as_loss(trace, run, 1), dtypes_of(loss)), 1
        case "parts", _, _:
            gradients = _parts(loss, measures)
        case "own parts", LocalRows() as local, _:
            gradients = _own_parts(loss, local, measures, turns)
        case "pipeline", _, Line() as line:
            gradients = _pipeline(loss, line)
        case "own pipeline", LocalRows() as local, Line() as line:
            gradients = _own_pipeline(loss, line, local, measures)
        case _:
            raise AssertionError(f"{choice.kind} gradients without what they are made of")
    # Around all parts: weights that are gathered once a step would be gathered in each of them within.
    ahead = make_ahead(trace, loss.storage, plan, loss.mesh, in_parts=turns[1])
    gradients = sharing(gathering(gradients, ahead), shared, plan.microbatches, num)
    waits = () if choice.local is None else _cost_of_waiting(loss)
    told = (*batches_of_their_own(trace, plan), *_changes_on_the_way(trace, plan), *_idle_overlap(plan))
    return Built(gradients, (*told, *choice.notes, *waits), size, bool(loss.storage.in_turn or turns[1]))


def _changes_on_the_way(trace: Trace, plan: Plan) -> tuple[str, ...]:
    """A note of numbers that the loss reads and each micro-batch changes for the next: a codebook of running means."""
    jaxpr, state = trace.closed.jaxpr, trace.leaves_of("model_state")
    if plan.microbatches == 1 or not state:
        return ()
    pairs = [(i, jaxpr.invars[i], out) for i, out in zip(state, jaxpr.outvars[-len(state) :], strict=True)]
    changed = [(i, var) for i, var, out in pairs if out is not var and jnp.issubdtype(var.aval.dtype, jnp.floating)]
    on = {var: frozenset([trace.leaves[i].name]) for i, var in changed}
    depends(jaxpr.eqns, on, lambda eqn, kinds: kinds)
    losses = [var for var in jaxpr.outvars[: trace.num_loss] if not isinstance(var, Literal)]
    read = sorted(frozenset[str]().union(*(on.get(var, frozenset()) for var in losses)))
    if not read:
        return ()
    names = ", ".join(read[:2]) + (f" and {len(read) - 2} more" if len(read) > 2 else "")
    return (f"the loss reads {names}, which each micro-batch changes: it is another than with microbatches=1",)


def _idle_overlap(plan: Plan) -> tuple[str, ...]:
    """A note of micro-batches that have nothing to hide."""
    if plan.overlap == 1 or plan.tensor.size > 1:
        return ()
    return (
        f"overlap={plan.overlap} hides what the layers of tensor=N wait for, and this plan has no tensor parallelism: "
        f"it needs the memory of {plan.overlap} micro-batches, and is no faster",
    )


Turns = tuple[dict[int, tuple[int, ...]], frozenset[int]]


def _parts(loss: LaidOut, measures: bool) -> Gradients:
    """Of micro-batches, each of which all devices see together."""
    num, mesh, axes = loss.plan.microbatches, loss.mesh, loss.batch_axes
    run = place_loss(loss.trace, loss.storage, loss.plan, mesh)

    # Every device has rows of every micro-batch. Cut as they lie, a micro-batch would be on some devices alone, and the
    # others idle while it runs.
    def constrain(parts: list[jax.Array]) -> list[jax.Array]:
        return [lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, axes))) for x in parts]

    own = _as_loss(loss.trace, run, num)
    return micro_batched(own, dtypes_of(loss), num, constrain, divide_by(loss), measures, loss.plan.overlap)


def _own_parts(loss: LaidOut, local: LocalRows, measures: bool, turns: Turns) -> Gradients:
    """Of micro-batches on each device's own rows, reduced once."""
    num, mesh = loss.plan.microbatches, loss.mesh
    run = place_loss(local.trace, loss.storage, loss.plan, mesh, local.layout, local.draw)
    own = _as_loss(local.trace, run, num * loss.num_shards)
    reductions = _reductions(loss, [local.axes] * len(loss.storage.params.slots))
    stacks, in_parts = turns
    return locally_accumulated(
        own, dtypes_of(loss), num, local.axes, reductions, mesh, divide_by(loss), measures, loss.plan.overlap, stacks,
        in_parts,
    )  # fmt: skip


def _turns(loss: LaidOut, choice: Choice, measures: bool) -> Turns:
    """The stored arrays whose gradients layers reduce in their turn, with their shapes; and those that they gather.

    Each layer reads its own once, and as it is stored. The dim that is scattered is split by nothing else.
    """
    # What is measured is each micro-batch's own gradient.
    if choice.local is None or choice.kind != "own parts" or measures or not works_in_turn(loss.plan, loss.mesh):
        return {}, frozenset()
    trace, storage = choice.local.trace, loss.storage
    found, in_parts = dict[int, tuple[int, ...]](), set[int]()
    once, stacks = stacked_leaves(trace) - read_again(trace), stacks_of_leaves(trace)
    reductions = _reductions(loss, [choice.local.axes] * len(storage.params.slots))
    for i, (slot, kept, how) in enumerate(zip(storage.given.slots, storage.params.slots, reductions, strict=True)):
        is_apart = not how.scatter or (how.dim > 0 and not axes_of_entry(how.summed[how.dim]))
        if slot.leaves in stacks and once.issuperset(slot.leaves) and slot.padded == slot.shape and is_apart:
            found[i] = slot.stored_shape
            if how.scatter and kept.spec != slot.spec:
                in_parts.add(i)
    return found, frozenset(in_parts)


def _pipeline(loss: LaidOut, line: Line) -> Gradients:
    """Of micro-batches that go through stages, within which all devices see them together."""
    staged = stage_model(loss.trace, line.stacks, loss.storage, loss.plan, loss.mesh)
    num, reductions = loss.plan.microbatches, _reductions(loss, staged.summed_over(()))
    return pipelined(staged, _executor(staged, line, num), num, (), reductions, loss.mesh, divide_by(loss))


def _own_pipeline(loss: LaidOut, line: Line, local: LocalRows, measures: bool) -> Gradients:
    """Of micro-batches that go through stages on each device's own rows, reduced once."""
    # Weights are kept for the stages as the whole batch's trace has them; the other trace has to run the same ones.
    stacks = line.stacks_of(local.trace)
    assert stacks is not None, "the loss on other rows has other layers"
    num, mesh = loss.plan.microbatches, loss.mesh
    staged = stage_model(local.trace, stacks, loss.storage, loss.plan, mesh, local.layout, local.draw)
    executor = _executor(staged, line, num * loss.num_shards)
    reductions = _reductions(loss, staged.summed_over(local.axes))
    return pipelined(staged, executor, num, local.axes, reductions, mesh, divide_by(loss), measures)


def _executor(staged: StagedModel, line: Line, num_parts: int) -> Executor:
    """What runs the stages of a model, and adds up results over micro-batches."""
    total = total_of(staged.stages.cut.trace, num_parts)
    return Executor(staged.stages, line.schedule, line.partition, staged.trained, PIPE, total, staged.states)


def total_of(trace: Trace, num_parts: int) -> Callable[[list[jax.Array]], tuple[jax.Array, Any]]:
    """From the results of one of `num_parts` parts to its total, and to what is added up: total, weight, aux."""

    def total(outs: list[jax.Array]) -> tuple[jax.Array, Any]:
        out = _sorted_results(trace, outs, num_parts)
        return out.total, (out.total, out.weight, out.aux)

    return total


def dtypes_of(loss: LaidOut) -> list[Any]:
    """Those that parameters are kept in."""
    return [slot.dtype for slot in loss.storage.params.slots]


def divide_by(loss: LaidOut) -> Denominator:
    return functools.partial(denominator, loss.trace.ratio)


def _reductions(loss: LaidOut, axes: Sequence[tuple[str, ...]]) -> list[Reduction]:
    """Over these axes, gradients go where their optimizer state is, if ZeRO or a pipeline's stages split that."""
    found = []
    for slot, over in zip(loss.storage.given.slots, axes, strict=True):
        # Each device updates the piece of a parameter whose optimizer state it has, and needs no more of the gradient
        # than that.
        both = loss.storage.state_specs, loss.storage.zero_specs
        state, zero = (slot.stacked(specs[slot.leaves[0]]) for specs in both)
        # What the compiler has summed over the batch, each device has a part of without asking anybody.
        summed = zero if over == (PIPE,) and _divides(slot.stored_shape, zero, loss.mesh) else slot.stored_spec
        how = reduction(slot.stored_shape, summed, state, over, loss.mesh)
        found.append(dataclasses.replace(how, dtype=loss.plan.reduce))
    return found


def _divides(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> bool:
    shards = (math.prod(mesh.shape[a] for a in axes_of_entry(entry)) for entry in spec)
    return all(n % s == 0 for n, s in zip(shape, shards, strict=False))


def _cost_of_waiting(loss: LaidOut) -> tuple[str, ...]:
    """What ZeRO-2 holds until the last micro-batch, as a note."""
    # ZeRO-2 promises that no device holds a whole gradient. Reducing once means to hold it until then; told, not
    # hidden, since somebody may have counted on the bytes.
    if loss.plan.zero_stage < 2:
        return ()
    size = 0
    for slot in loss.storage.given.slots:
        shape = NamedSharding(loss.mesh, slot.stored_spec).shard_shape(slot.stored_shape)
        size += math.prod(shape) * slot.dtype.itemsize
    return (
        f"zero=2 adds up the gradients of {loss.plan.microbatches} micro-batches before it splits them: "
        f"{size / 2**20:,.1f} MiB a device",
    )


def _as_loss(trace: Trace, run: Any, num_parts: int) -> Loss:
    """The results of a trace, sorted, for one of several parts."""

    def loss(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: Any, index: Any) -> Evaluated:
        results = run(params, frozen, model_state, jax.tree.leaves(batch), key, index)
        out = _sorted_results(trace, results, num_parts)
        state, gathered = out.model_state[: len(model_state)], out.model_state[len(model_state) :]
        return dataclasses.replace(out, model_state=state, gathered=gathered)

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
        # All of aux is averaged over the parts, which for a sum would be a part's.
        aux.append((value * num_parts if i in trace.aux_sums else value, next(outs) if is_mean else None))
    return Evaluated(total, weight, aux, tuple(outs))
