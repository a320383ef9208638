"""The plan in full: what the user wrote, checked against the batch and the devices, or what `auto` chooses."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import optax

from cjax.mesh import Device
from cjax.plan import Plan
from cjax.planner.estimate import SLACK, Activations, state_bytes
from cjax.planner.hardware import hardware_of
from cjax.planner.ladder import first_fitting
from cjax.trace.source import TraceSource


def decide(
    source: TraceSource,
    optimizer: optax.GradientTransformation | None,
    plan: Plan | str,
    devices: Sequence[Device],
) -> tuple[Plan, tuple[str, ...]]:
    """The plan, every number filled in, and what there is to say about how it was chosen.

    Args:
      source: the user's model and loss; `auto` reads off its trace what a step would hold.
      optimizer: what trains it, if anything does.
      plan: text, a `Plan`, or "auto".
      devices: what the plan is for.

    Raises:
      TypeError: `plan` is none of these.
      ValueError: it does not suit the batch or the devices.
    """
    if not isinstance(plan, Plan | str):
        raise TypeError(
            f"`plan` is {plan!r}, a {type(plan).__name__}. Write text such as "
            '"data=4 tensor=2", a cjax.Plan(...), or "auto".'
        )
    if plan == "auto":
        return _chosen(source, optimizer, devices)
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    _check_divides(plan.microbatches, _num_rows(source))
    return plan.resolve(len(devices)), ()


def _num_rows(source: TraceSource) -> list[int]:
    return [leaf.shape[0] for leaf in jax.tree.leaves(source.batch_shape) if leaf.shape]


def _check_divides(microbatches: int, num_rows: Sequence[int]) -> None:
    for rows in num_rows:
        if rows % microbatches:
            near = max(1, rows // microbatches) * microbatches
            divisors = [str(n) for n in range(1, min(rows, 2 * microbatches) + 1) if rows % n == 0]
            raise ValueError(
                f"microbatches={microbatches} does not divide a batch of {rows} rows; "
                f"use {near} or {near + microbatches} rows, or microbatches of {', '.join(divisors)}."
            )


def _chosen(
    source: TraceSource, optimizer: optax.GradientTransformation | None, devices: Sequence[Device]
) -> tuple[Plan, tuple[str, ...]]:
    """The first plan of the ladder that fits, by arithmetic."""
    activations, params_shape = Activations(source.read()), source.capture.params_shape
    params = sum(_bytes(leaf) for leaf in jax.tree.leaves(params_shape))
    state = 0
    if optimizer is not None:
        with jax.numpy_dtype_promotion("standard"):  # of optax: see store_optimizer
            made: Any = jax.eval_shape(optimizer.init, params_shape)
        state = sum(_bytes(leaf) for leaf in jax.tree.leaves(made))
    limit, num = hardware_of(devices).memory, len(devices)

    def estimate(plan: Plan) -> int:
        return int(SLACK * (state_bytes(params, state, plan, num) + activations.bytes(plan, num)))

    chosen, size, fits = first_fitting(min(_num_rows(source), default=1), num, limit, estimate)
    verdict = "the least that fits" if fits else "the leanest there is, and it may not fit"
    chosen = chosen.resolve(num)
    note = f"auto chose {chosen}: {verdict}, about {size / 2**30:.2g} of {limit / 2**30:.3g} GiB"
    return chosen, (note,)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
