"""From what the user gave and a plan to what a program is made of: each room called once, in order, lowest first."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from cjax.gradients import LaidOut, arrange_stages, build_gradients, check_scaled, choose
from cjax.mesh import Device, build_mesh, is_compile_only
from cjax.pipeline.table import Schedule
from cjax.plan import Plan
from cjax.planner.choice.decide import Decision, decide, planning_of
from cjax.planner.choice.planning import Planning
from cjax.planner.reading.readings import how_read
from cjax.program.composed import Composed, Given
from cjax.sharding.place.born import born
from cjax.sharding.place.model import store_model
from cjax.sharding.storage.optimizer import store_optimizer
from cjax.trace.microbatches.combine import loss_size
from cjax.trace.microbatches.part import read_part
from cjax.trace.reading import Trace
from cjax.walk.build import build_walker, find_layers, store_layers

_HOMES = ("budget", "host", "disk", "offload")  # words of a plan that say where rows live, and nothing else
MOST_REFUSED = 8  # plans of a search, before the model's reason is the user's to see


def compose(
    given: Given,
    plan: Plan | str | Decision,
    devices: Sequence[Device],
    schedule: Schedule | None = None,
    num_rows: int | None = None,
) -> Composed:
    """What a program is made of under one plan. Nothing is allocated and nothing is compiled.

    Args:
      given: what the user gave.
      plan: the plan; "auto", which takes another plan if the model refuses the one that was found; or one that was
        decided on before.
      devices: what the plan is for.
      schedule: the user's own, of a pipeline.
      num_rows: of the batch, in place of the user's.

    Raises:
      ValueError: the plan does not suit the model, the batch or the devices; the message says what does.
    """
    source = given.source if num_rows is None else given.source.on_rows(num_rows)
    planning = planning_of(source, given.optimizer, devices, given.learned)
    if isinstance(plan, Decision):
        return _composed(given, planning, plan, devices, schedule)
    refused: dict[Plan, ValueError] = {}
    while True:
        try:
            decision = decide(planning, plan, len(devices), list(refused))
        except ValueError as error:
            if not refused:
                raise
            # No plan is left. That is the model's doing, and not that of the rows and devices.
            last, reason = list(refused.items())[-1]
            raise ValueError(f"plan={str(plan)!r}: the model can't be trained under {str(last)!r}: {reason}") from error
        try:
            return _composed(given, planning, decision, devices, schedule)
        except ValueError as error:
            # What a search knows of a model is what splits and divides. Gradients and stages have reasons of their own.
            if decision.found is None or _is_plain(decision.plan) or len(refused) == MOST_REFUSED:
                raise
            refused[decision.plan] = error


def _is_plain(plan: Plan) -> bool:
    """Whether there is nothing in a plan that a model could refuse."""
    return plan.model_size == 1 and plan.microbatches == 1


def _composed(
    given: Given, planning: Planning, decision: Decision, devices: Sequence[Device], schedule: Schedule | None
) -> Composed:
    plan, source = decision.plan, planning.source
    if plan.disk is not None and given.disk_folder is None and not is_compile_only(devices):
        raise ValueError(
            f"plan {str(plan)!r} may keep state on disk, and nothing says in which folder: give parallelize "
            'disk_folder="...", or the command --disk-folder; or leave out disk=.'
        )
    how, size = how_read(plan), plan.pipeline.size
    adds_up = plan.microbatches > 1 or given.measures or plan.reduce is not None
    trace = read_part(
        source,
        plan.microbatches,
        pairs=how.pairs,
        at_once=how.at_once,
        adds_up=adds_up,
        apart=plan.loss == "microbatch",
    )
    mesh = build_mesh(plan.axis_sizes(), devices)
    if schedule is not None and size == 1:
        raise ValueError(
            f"`schedule` is for pipelines, and the plan {str(plan)!r} has none: add "
            f"pipeline={schedule.num_stages} microbatches={schedule.num_microbatches}"
        )
    decision = dataclasses.replace(decision, notes=(*decision.notes, *check_scaled(trace, plan)))
    line = arrange_stages(trace, plan, schedule) if size > 1 else None
    if plan.walks:
        return _walked(given, planning, decision, trace, mesh)
    storage = store_model(source.capture, trace, plan, mesh, line.rows if line else {}, adds_up)
    loss = LaidOut(trace, storage, plan, mesh, line)
    choice = choose(source, loss, given.measures)
    built = build_gradients(loss, choice, given.measures)
    optimizer = None
    if given.optimizer is not None:
        optimizer = store_optimizer(
            given.optimizer, source.capture.params_shape, storage.params, storage.state_specs.__getitem__, mesh
        )
    return Composed(
        given, source, plan, mesh, trace, storage, optimizer, choice, built.gradients, built.loss_size,
        init=born(source.capture, storage), line=line, planning=planning, decision=decision,
        has_own_schedule=schedule is not None, gathers_in_turn=built.gathers_in_turn,
        notes=(*decision.notes, *storage.layout.notes, *built.notes, *(line.notes if line else ())),
    )  # fmt: skip


def _idle_remat(plan: Plan) -> list[str]:
    """What to say of a plan that walks and says what to recompute."""
    if plan.remat == "none":
        return []
    return [
        f"remat={plan.remat} changes nothing under budget= and offload=: a step that walks makes each layer once "
        "more from what it was handed, and keeps nothing else of it between the passes"
    ]


def _walked(given: Given, planning: Planning, decision: Decision, trace: Trace, mesh: Mesh) -> Composed:
    """A program whose steps walk over the layers."""
    plan, source = decision.plan, planning.source
    # Programs do not depend on where rows live: plans that differ in nothing else share them, compiled as they are.
    # A walker has its trace, so that no other comes by its number.
    words = repr(
        [(word.name, getattr(plan, word.name)) for word in dataclasses.fields(plan) if word.name not in _HOMES]
    )
    shared = given.walkers.get((id(trace), mesh, words))
    stacks = find_layers(trace) if shared is None else ()
    storage = store_layers(source.capture, trace, plan, mesh, stacks) if shared is None else shared.storage
    loss = LaidOut(trace, storage, plan, mesh)
    choice = choose(source, loss, given.measures)
    built = build_gradients(loss, choice)
    walker = shared or build_walker(stacks, loss, given.optimizer, source.capture.params_shape, source.batch_shape)
    given.walkers[id(trace), mesh, words] = walker
    return Composed(
        given, source, plan, mesh, trace, storage, walker.optimizer, choice, built.gradients,
        plan.microbatches * loss_size(trace), init=born(source.capture, storage), planning=planning, decision=decision,
        walker=walker, notes=(*decision.notes, *storage.layout.notes, *built.notes, *_idle_remat(plan)),
    )  # fmt: skip
