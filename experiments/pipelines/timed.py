"""Wall time of one GPT under plans for 4 virtual CPU devices, a step of each in turn."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import jax
import numpy as np
import optax
from shared.results import Results, Row

from cjax.mesh import resolve_devices
from cjax.models.gpt import GPTConfig

from .schedules import program_of

PLANS = [
    "data=4",
    "tensor=4",
    "pipeline=gpipe:4 microbatches=8",
    "pipeline=1f1b:4 microbatches=8",
    "pipeline=zero_bubble:4 microbatches=8",
    "pipeline=interleaved:2/2 tensor=2 microbatches=8",
    "pipeline=1f1b:2 tensor=2 microbatches=8",
]


@dataclass(frozen=True)
class SizeOfRun:
    """What is timed."""

    num_layers: int = 8
    num_heads: int = 8
    embed_dim: int = 512
    vocab_size: int = 8192
    length: int = 128
    batch: int = 8

    def config(self) -> GPTConfig:
        return GPTConfig(self.num_layers, self.num_heads, self.embed_dim, None, self.length, self.vocab_size)


def tokens_of(vocab_size: int, batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, vocab_size, (batch, length), dtype=np.int32) for name in ("inputs", "targets")}


def stepper(size: SizeOfRun, plan: str) -> Callable[[], float]:
    """A function that takes a step and gives its loss."""
    program = program_of(size.config(), size.batch, size.length, plan, resolve_devices("cpu:4"), optax.adam(1e-3))
    state = program.init(0)
    batch = tokens_of(size.vocab_size, size.batch, size.length)

    def step() -> float:
        nonlocal state
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        return float(metrics["loss"])

    return step


def in_turn(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median ms of each, a step of each in turn, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(kept) for name, kept in times.items()}


def timed(results: Results, size: SizeOfRun, rounds: int) -> list[Row]:
    """Rows of all plans; measured together, so all of them again where one is missing."""
    keys = [{"part": "t", "plan": plan, "rounds": rounds} | asdict(size) for plan in PLANS]
    missing = [key for key in keys if not any(key.items() <= row.items() for row in results.of("t"))]
    if missing:
        steps: dict[str, Callable[[], float]] = {}
        failed: dict[str, Row] = {}
        for plan in PLANS:
            print(f"  t {plan}", flush=True)
            try:
                steps[plan] = stepper(size, plan)
                steps[plan]()  # compiles
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                steps.pop(plan, None)
                failed[plan] = {"failed": str(error).splitlines()[0]}
        medians = in_turn(steps, rounds)
        for key in keys:
            plan = str(key["plan"])
            found = failed.get(plan) or {"ms": medians[plan], "loss": steps[plan](), "jax": jax.__version__}
            results.get(key, lambda found=found: found)
    rows = [results.get(key, dict) for key in keys]
    for row in rows:
        text = f"{row['ms']:9.1f} ms, {row['ms'] / rows[0]['ms']:.3f} of data=4" if "ms" in row else row["failed"]
        print(f"  t {row['plan']:50s} {text}", flush=True)
    return rows
