"""What a schedule costs on paper, and the memory of the step that runs it: a row for each."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from shared.results import Results, Row

import cjax
from cjax.models.gpt import GPT, GPTConfig, gpt, loss
from cjax.pipeline import Times, build, simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]
STAGES = (4, 8)
MICROBATCHES = (1, 2, 4, 8)  # times the stages


@dataclass(frozen=True)
class SizeOfStep:
    """What is compiled in part s: a small GPT, of which every micro-batch has as many rows."""

    model: str = "gpt-mini"
    num_layers: int = 16
    vocab_size: int = 512
    length: int = 64
    rows: int = 2

    def config(self) -> GPTConfig:
        return gpt(self.model, num_layers=self.num_layers, vocab_size=self.vocab_size, context=self.length)


def program_of(
    config: GPTConfig, batch: int, length: int, plan: str, devices: Any, optimizer: optax.GradientTransformation
) -> cjax.Program:
    """A GPT under a plan."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return cjax.parallelize(
        lambda rngs: GPT(config, rngs=rngs),
        loss,
        optimizer,
        {"inputs": tokens, "targets": tokens},
        plan,
        devices=devices,
    )


def text_of(kind: str, num_chunks: int, num_stages: int) -> str:
    """As a plan writes it."""
    return f"{kind}:{num_stages}" + (f"/{num_chunks}" if num_chunks > 1 else "")


def schedule_row(
    results: Results, kind: str, num_chunks: int, num_stages: int, num_microbatches: int, size: SizeOfStep
) -> Row:
    """Bubbles and activations held with F = B = W = 1, and bytes of temporaries a device of the compiled step."""
    name = text_of(kind, num_chunks, num_stages)

    def make() -> Row:
        start = time.perf_counter()
        schedule = build(kind, num_stages, num_microbatches, num_chunks)
        found = simulate(schedule, Times(1, 1, 1), lockstep=True)
        row = {
            "ticks": schedule.num_ticks,
            "bubble": found.bubble,
            "bubble_alone": simulate(schedule, Times(1, 1, 1), lockstep=False).bubble,
            "held": max(found.in_flight),
        }
        program = program_of(
            size.config(), size.rows * num_microbatches, size.length,
            f"pipeline={name} microbatches={num_microbatches}", jax.devices("cpu")[:num_stages], optax.adamw(1e-3),
        )  # fmt: skip
        memory = program.lower().compile().memory_analysis()
        row["temporary"] = memory.temp_size_in_bytes if memory else 0
        return row | {"seconds": round(time.perf_counter() - start, 1), "jax": jax.__version__}

    key = {"part": "s", "schedule": kind, "chunks": num_chunks, "stages": num_stages, "microbatches": num_microbatches}
    row = results.get(key | asdict(size), make)
    print(
        f"  s {name:16s} {num_microbatches:3d} micro-batches: bubble {row['bubble']:6.1%}, "
        f"{row['held']:5.1f} held, {row['temporary'] / 2**20:7.1f} MiB, {row['seconds']:.0f} s",
        flush=True,
    )
    return row
