"""`parallelize`: a model, a loss and an optimizer become a `Program`."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax

from cjax.machines import Cluster
from cjax.mesh import Device, own_context, resolve_devices
from cjax.models import readers
from cjax.optim import LossScale
from cjax.pipeline.table import Schedule
from cjax.plan import Plan
from cjax.program import Program
from cjax.program.batches import batch_structs
from cjax.program.composed import Given
from cjax.program.program import composed_program
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource
from cjax.tree import PyTree, kind_of


@own_context
def parallelize(
    model: Any,
    loss: Any,
    optimizer: optax.GradientTransformation | None,
    batch: PyTree,
    plan: Plan | str = "auto",
    *,
    wrt: Any = None,
    devices: Sequence[Device] | Cluster | str | None = None,
    schedule: Schedule | None = None,
    loss_scale: LossScale | None = None,
    measure_noise: bool = False,
    verify: bool = False,
    disk_folder: str | Path | None = None,
) -> Program:
    """Lay a Flax model out over many devices.

    Args:
      model: a `flax.linen.Module`, a `flax.nnx.Module` that holds its weights, or a builder `lambda rngs: Net(rngs)`.
      loss: `loss(model, batch[, key][, train])`, a scalar mean, a `cjax.Mean`, or a pair of either and aux.
      optimizer: any optax transformation; None for evaluation alone.
      batch: arrays or ShapeDtypeStructs of global shape, batch dim first.
      plan: text or `Plan`; see `cjax.Plan`. "auto" searches for the fastest that fits memory, and "auto
        precision=bfloat16" for the fastest with these words; `program.explain()` says why it is the one.
      wrt: what is trained: a regex on the path, `(path, leaf) -> bool`, or an NNX filter.
      devices: JAX devices; or a `cjax.Cluster` or its text, such as "h100:64" or "a100:16/node=4,network=25GB/s", to
        compile for machines that are not here.
      schedule: a table of your own for a plan with `pipeline`, from `cjax.pipeline`; as many stages and micro-batches.
      loss_scale: how `precision=float16` scales the loss, if not as `cjax.optim.LossScale()` does.
      measure_noise: whether steps also give `metrics["noise_scale"]`, the batch size in examples beyond which larger
        ones are wasted, from the gradients of micro-batches or of data-parallel devices. Where there are the latter
        alone, all gradients are reduced behind the backward pass rather than during it.
      verify: whether the plan is checked before the first step, on a few rows of its batch against the loss as you
        wrote it on one device; a plan that computes something else raises `cjax.MismatchError`. A model that does not
        fit one device is not checked, and `program.verified` and the report say so.
      disk_folder: where plans with `disk=` keep what they move there, of all processes; made if it is missing, the one
        above must be there. No plan can name it: a plan is no property of a machine. Other plans leave it alone.

    Returns:
      the program. It is compiled when it is first used; if only that can tell whether a plan of "auto" fits, at once.

    Raises:
      TypeError: a model, loss, optimizer or `wrt` that is none, with what to write.
      ValueError: a plan that the devices or the model can't have, with one that they can; a loss that is no scalar, or
        that can't be shown to be right under the plan; `loss_scale` under another precision than float16.

    >>> import flax.linen as nn, jax, numpy as np
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
    shape = batch_structs(batch)
    source = TraceSource(capture(model, loss, batch, wrt), shape)
    folder = None if disk_folder is None else _checked_folder(disk_folder)
    given = Given(source, optimizer, loss_scale, measure_noise, verify, readers, folder)
    program = composed_program(given, plan, resolve_devices(devices), schedule)
    if loss_scale is not None and program.plan.precision != "float16":
        raise ValueError(
            f"loss_scale is for float16, and the plan {str(program.plan)!r} computes in {program.plan.precision}, "
            "whose range is float32's: leave loss_scale out, or write precision=float16."
        )
    return program


def _check_kinds(schedule: Any, loss_scale: Any, measure_noise: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` is {schedule!r}; give one of cjax.pipeline, or write the kind in the plan.")
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(f"`loss_scale` is {loss_scale!r}; write cjax.optim.LossScale(initial=2.0**15).")
    if not isinstance(measure_noise, bool):
        raise TypeError(f"`measure_noise` is {measure_noise!r}; write True or False.")


def _checked_folder(folder: Any) -> Path:
    if not isinstance(folder, str | Path) or not str(folder):
        raise TypeError(f'`disk_folder` is {folder!r}; give the path of a folder, such as "/scratch/run".')
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"disk_folder={str(folder)!r} is a file; give a folder, which is made if it is missing.")
    return Path(folder)


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is None or (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        return
    given = f"the function {optimizer.__name__}" if inspect.isfunction(optimizer) else kind_of(optimizer)
    raise TypeError(
        f"`optimizer` is {given}, not an optax transformation. Write optax.adamw(1e-3), or None for evaluation alone."
    )
