"""Which kind of gradients a plan gets, and why: data, decided in one place before any of them is made.

What decides is who adds up. A whole batch is one backward pass, in which XLA reduces each gradient where it is made. Of
micro-batches there are many: reduced in each, a gradient would be sent as many times. So a device keeps its own sums,
and all reduce once, wherever its rows can be computed apart from the other devices'. Where they can't, the reason goes
with the choice, into the report or into the error of who asked for what needs a device's own sums.
"""

import math
from dataclasses import dataclass
from typing import Literal as OneOf

import jax.numpy as jnp
from jax.sharding import Mesh

from cjax.gradients.line import Line
from cjax.jax_compat.core import Equation, Literal
from cjax.mesh import BATCH_AXES
from cjax.plan import Plan
from cjax.sharding.place.local import LocalRows, local_rows
from cjax.sharding.place.model import ModelStorage
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.trace.stages.counters import depends

Kind = OneOf["whole", "parts", "own parts", "pipeline", "own pipeline"]
Cause = OneOf["one pass", "positions", "one shard", "zero", "rows", "walk"]


@dataclass(frozen=True)
class LaidOut:
    """A loss laid out on a mesh: what gradients are made of.

    Args:
      trace: the loss, on one micro-batch.
      storage: where the model's arrays are kept.
      plan: the plan.
      mesh: the mesh.
      line: its way through the stages of a pipeline, if it has one.
    """

    trace: Trace
    storage: ModelStorage
    plan: Plan
    mesh: Mesh
    line: Line | None = None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh.axis_names)

    @property
    def num_shards(self) -> int:
        """Among how many devices, or groups of them, a batch is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)


@dataclass(frozen=True)
class Reason:
    """Why devices do not add up gradients of their own.

    Args:
      cause: "one pass": there is but one sum; "positions": these are split; "one shard": all devices see the same rows;
        "zero": stage 3 reduces in each backward pass, or no more than the plan's parts could keep; "rows": examples
        meet, or the loss says something else on fewer of them; "walk": a step goes layer by layer, each in a program
        over all devices.
      text: the same in words, as an error or a note goes on with.
    """

    cause: Cause
    text: str

    @property
    def is_news(self) -> bool:
        """Whether the plan alone does not tell."""
        return self.cause in ("positions", "rows")


@dataclass(frozen=True)
class Choice:
    """A kind of gradients.

    Args:
      kind: "whole": of the batch at once; "parts": of micro-batches, all devices together; "own parts": of
        micro-batches on each device's own rows, reduced once; "pipeline" and "own pipeline": these two through stages.
      local: the loss on a device's own rows, for the kinds that need it.
      reason: why it is not one of those; None if it is.
    """

    kind: Kind
    local: LocalRows | None = None
    reason: Reason | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: gradients that are sent once for each micro-batch."""
        if self.kind == "whole" or self.reason is None or not self.reason.is_news:
            return ()
        return (f"{self.reason.text}, so gradients are reduced once per micro-batch",)


def choose(source: TraceSource, loss: LaidOut, measures: bool = False) -> Choice:
    """The kind of gradients of a loss under its plan.

    Args:
      source: the user's model and loss, to be traced on a device's own rows.
      loss: as the plan lays it out.
      measures: whether gradients of parts of the batch are measured.

    Raises:
      ValueError: `reduce` needs each device's own sums, or `measures` gradients of two batch sizes, and there are none;
        or the weight of a `Mean` is trained.
    """
    plan = loss.plan
    _check_weight(loss.trace)
    if plan.overlap > 1:
        _check_overlap(loss, measures)
    if plan.walks:
        return _of_walk(measures)
    found = _own_rows(source, loss, measures)
    # Always, where it can be had: gradients are sent once a step in place of once a micro-batch.
    if isinstance(found, LocalRows):
        return Choice("own pipeline" if loss.line else "own parts", found)
    # XLA sums where it makes a gradient, in the dtype it made it in, and offers no other: what was asked for can't be
    # had, and to run without it would be another number than asked for.
    if plan.reduce is not None and loss.num_shards > 1:
        instead = "leave `reduce` out" + (", or write zero=2" if plan.zero_stage == 3 else "")
        raise ValueError(f"reduce={plan.reduce} needs each device's own sum of gradients, and {found.text}: {instead}.")
    # The noise scale compares gradients of two sizes of batch. A pipeline adds up micro-batches' as it goes, and one
    # pass has but one.
    if measures and (loss.line is not None or plan.microbatches == 1):
        instead = "take a pipeline with data > 1" if plan.pipeline.size > 1 else "add microbatches=2"
        raise ValueError(
            f"measure_noise needs gradients of parts of the batch, and with {plan} {found.text}: {instead}."
        )
    if loss.line is not None:
        return Choice("pipeline", reason=found)
    return Choice("parts" if plan.microbatches > 1 else "whole", reason=found)


def _of_walk(measures: bool) -> Choice:
    """A walk is between programs, each over all devices: sums of a device's own would wait from one to the next."""
    if measures:
        raise ValueError(
            "measure_noise needs gradients of parts of the batch beside those of the whole, and with budget= or "
            "offload= there are none of all layers at once: leave measure_noise out, or budget= and offload=."
        )
    return Choice("parts", reason=Reason("walk", "a layer's gradients are made in programs of their own"))


def _check_overlap(loss: LaidOut, measures: bool) -> None:
    """Micro-batches that are computed at a time can't hand each other anything, and their gradients come added up."""
    plan, trace = loss.plan, loss.trace
    if measures:
        raise ValueError(
            f"measure_noise needs the gradients of each micro-batch, and overlap={plan.overlap} adds up those of "
            f"{plan.overlap} as it makes them: leave out overlap={plan.overlap}, or measure_noise."
        )
    jaxpr, state = trace.closed.jaxpr, trace.leaves_of("model_state")
    outs = jaxpr.outvars[len(jaxpr.outvars) - len(state) :]
    changed = [
        trace.leaves[i].name
        for place, (i, out) in enumerate(zip(state, outs, strict=True))
        if out is not jaxpr.invars[i] and place not in trace.counters
    ]
    if changed:
        names = ", ".join(changed[:2]) + (f" and {len(changed) - 2} more" if len(changed) > 2 else "")
        raise ValueError(
            f"overlap={plan.overlap} computes {plan.overlap} micro-batches at a time, and each micro-batch of this "
            f"model changes {names} for the next: leave out overlap={plan.overlap}."
        )


def _check_weight(trace: Trace) -> None:
    """A weight is a number that totals of parts are divided by: a gradient of its own would be left out."""
    if not trace.has_weight:
        return
    jaxpr = trace.closed.jaxpr
    on = {jaxpr.invars[i]: frozenset(["params"]) for i in trace.leaves_of("params")}
    depends(jaxpr.eqns, on, lambda eqn, kinds: kinds if _passes_on(eqn) else frozenset())
    # By equations, not by values: a weight that is made of parameters has a gradient even where it is the same number
    # for now.
    weight = jaxpr.outvars[1]
    if not isinstance(weight, Literal) and on.get(weight):
        raise ValueError(
            "The weight of a cjax.Mean counts as a number, and this one depends on the parameters that are trained: "
            "gradients would lack what comes by way of it. Write cjax.Mean(total, jax.lax.stop_gradient(weight)) if "
            "they are to, or return total / weight (with microbatches=1, or with loss=microbatch, if each micro-batch "
            "may be a batch of its own)."
        )


def _passes_on(eqn: Equation) -> bool:
    """Whether derivatives pass through an equation."""
    # Whole numbers and flags have no derivative: a count of what a parameter exceeds is a number, as a weight should
    # be.
    dtypes = (getattr(var.aval, "dtype", bool) for var in eqn.outvars)
    return not facts_of(eqn).stops and any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def _own_rows(source: TraceSource, loss: LaidOut, measures: bool) -> LocalRows | Reason:
    """The loss on a device's own rows, if devices add up gradients of their own; or why they don't."""
    plan = loss.plan
    # Devices along that axis have positions of the same rows: none of them could compute a loss by itself.
    if plan.sequence.size > 1:
        return Reason("positions", "positions are split")
    if loss.num_shards == 1:
        return Reason("one shard", "no two devices see different examples")
    # No device holds a whole weight, or gradient, for longer than a layer: its own sum would be just that.
    if plan.zero_stage == 3:
        return Reason("zero", f"zero={plan.zero} reduces gradients during the backward pass")
    # In one pass, XLA reduces each gradient as soon as it is made, behind the rest of the backward pass; a sum of its
    # own would wait until the end for nothing.
    if plan.microbatches == 1 and not measures and plan.reduce is None:
        return Reason("one pass", "the batch is one pass")
    local = local_rows(source, loss.trace, loss.storage, plan, loss.mesh)
    return Reason("rows", local) if isinstance(local, str) else local
