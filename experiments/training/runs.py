"""What the scripts that train share: options, devices, AdamW under a cosine, and the run itself."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optax

import cjax
from cjax.cli.devices import training_devices
from cjax.optim import weights_only
from cjax.optim.schedules import cosine_annealing_warmup_lr
from cjax.train import FitResult, fit


def make_parser(
    description: str | None, *, steps: int, rate: float, plan: str = "data=1", disk: bool = True
) -> argparse.ArgumentParser:
    """The options that every run has, and those of one that may keep its layers on disk."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=plan, help='how the devices are used, such as "data=2 tensor=2 zero=1"')
    parser.add_argument("--devices", help='a number, or "cpu:8" for virtual ones; as the plan needs if not given')
    parser.add_argument("--steps", type=int, default=steps or None)
    parser.add_argument("--rate", type=float, default=rate, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where metrics and checkpoints go; kept nowhere if not given")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --folder, under this plan")
    if disk:
        parser.add_argument("--disk-folder", type=Path, help="where plans with disk= keep what they move there")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a smaller model, to see that it runs")
    return parser


def devices_of(plans: Sequence[str], text: str | None) -> list[Any]:
    """The devices of `--devices`, or as many virtual ones as the largest of the plans needs."""
    return training_devices(text, default_virtual=max(_needed(cjax.Plan.parse(plan)) for plan in plans))


def devices_for(plan: str, devices: Sequence[Any]) -> Sequence[Any]:
    """The first of them, as many as the plan needs; all, if it leaves data parallelism open."""
    parsed = cjax.Plan.parse(plan)
    return devices if parsed.data == -1 else devices[: _needed(parsed)]


def _needed(plan: cjax.Plan) -> int:
    return plan.model_size * max(plan.data, 1)


def adamw(
    rate: float, steps: int, *, warmup: int, end: float = 0.0, b2: float = 0.999, decay: float = 0.1
) -> optax.GradientTransformation:
    """AdamW with gradients clipped to norm 1: warm-up, then half a cosine down to `end`; norms and biases keep."""
    schedule = cosine_annealing_warmup_lr(rate, max(steps, warmup + 1), warmup, end)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=b2, weight_decay=decay, mask=weights_only)
    )


def run(
    build: Callable[..., Any], loss: Callable[..., Any], tx: optax.GradientTransformation, data: Any,
    options: argparse.Namespace, *, steps: int, evaluate_every: int,
) -> tuple[cjax.Program, FitResult]:  # fmt: skip
    """Trains a model under the options' plan, each process on its own rows of the data."""
    devices = devices_for(options.plan, devices_of([options.plan], options.devices))
    program = cjax.parallelize(
        build, loss, tx, next(data.batches()), options.plan, devices=devices, disk_folder=options.disk_folder
    )
    where = f"{len(devices)} x {devices[0].device_kind}"
    print(f"plan {program.plan} on {where}, {steps} steps of {data.batch_size} samples")
    result = fit(
        program, dataclasses.replace(data, shard=program.data_shard), steps=steps, seed=options.seed,
        folder=options.folder, resume=options.resume, evaluate_every=max(1, evaluate_every), log_every=50,
    )  # fmt: skip
    return program, result


class Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall, cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        return f"{wall:.0f} s ({cpu:.0f} s of CPU)"
