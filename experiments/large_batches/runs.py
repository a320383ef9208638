"""One training run of `large_batch.py`, as a row of numbers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from shared.results import Results, Row

import cjax

from .data import stream
from .recipes import RECIPES, schedule

MICROBATCH = 1024  # rows; more are no faster on a CPU, and take memory


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and for how many samples."""

    part: str
    model: Any
    loss: Callable[..., Any]
    source: Any
    num_samples: int
    num_scores: int
    plan: str


def run(results: Results, task: Task, optimizer: str, batch: int, seed: int, rate: float) -> Row:
    """Trains once to the peak rate `rate`, or finds the row of it on disk."""
    rate = float(f"{rate:.4g}")
    key = {"part": task.part, "data": task.source.name, "optimizer": optimizer, "batch": batch, "seed": seed}
    size = {"width": task.model.width, "num_layers": task.model.num_layers}
    key |= size | {"samples": task.num_samples, "rate": rate, "plan": task.plan}
    row = results.get(key, lambda: _trained(task, optimizer, batch, seed, rate))
    print(
        f"  {task.part} {optimizer:4s} batch {batch:5d} seed {seed} rate {rate:<8.3g} {row['steps']:5d} steps: "
        f"test loss {row['test_loss'][-1]:.4f}, accuracy {row['accuracy'][-1]:.4f}, {row['seconds']:.0f} s",
        flush=True,
    )
    return row


def _trained(task: Task, optimizer: str, batch: int, seed: int, rate: float) -> Row:
    start, start_cpu = time.perf_counter(), time.process_time()
    num_steps = task.num_samples // batch
    tx = RECIPES[optimizer].make(schedule(rate, batch, num_steps), batch)
    example = next(stream(task.source, batch, 1, seed))
    devices = jax.devices()[: cjax.Plan.parse(task.plan).num_devices]
    plan = with_microbatches(task.plan, batch)
    program = cjax.parallelize(task.model, task.loss, tx, example, plan, devices=devices)
    state = program.init(seed)
    scored = {-(-num_steps * i // task.num_scores) for i in range(1, task.num_scores + 1)}
    row: dict[str, list[float]] = {"epochs": [], "loss": [], "test_loss": [], "accuracy": []}
    losses: list[float] = []
    skipped = 0.0
    for step, data in enumerate(stream(task.source, batch, num_steps, seed), 1):
        state, metrics = program.step(state, data)
        # Waits for the step: collectives of virtual devices can starve one another when many steps are queued.
        losses.append(float(metrics["loss"]))
        skipped += metrics["skipped"]
        if step in scored:
            found = program.evaluate(state, task.source.test)
            row["epochs"].append(round(step * batch / len(task.source), 3))
            row["loss"].append(_short(np.mean(losses)))
            row["test_loss"].append(_short(found["loss"]))
            row["accuracy"].append(_short(found["aux"]["accuracy"]))
            losses = []
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - start_cpu}
    about = {name: round(value, 1) for name, value in seconds.items()}
    about |= {"steps": num_steps, "skipped": int(skipped), "jax": jax.__version__}
    return row | about | {"microbatches": program.plan.microbatches}


def with_microbatches(plan: str, batch: int) -> str:
    """The plan with the fewest micro-batches of at most 1,024 rows that divide the batch, unless it says its own."""
    if "microbatches" in plan:
        return plan
    num = next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= MICROBATCH)
    return f"{plan} microbatches={num}"


def _short(value: Any) -> float:
    return float(f"{float(value):.5g}")
