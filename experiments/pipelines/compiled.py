"""GPT-2 small on 4 absent H100s: what a step moves, holds and at least takes under each plan."""

import time
from collections.abc import Sequence

import jax
import optax
from shared.compiled import described
from shared.results import Results, Row

import cjax
from cjax import Plan
from cjax.mesh import compile_lowered, resolve_devices
from cjax.models.gpt import GPTConfig, gpt
from cjax.pipeline import Simulation, Times, build, simulate
from cjax.planner.hardware import hardware_of

from .schedules import program_of

BATCH, LENGTH, DEVICES = 32, 1024, 4
PLANS = [
    "data=4",
    "data=4 microbatches=4",  # 2 rows at a time on a device, as in the pipelines
    "tensor=4",
    "tensor=2d:4",
    "pipeline=1f1b:4 microbatches=16",
    "pipeline=zero_bubble:4 microbatches=16",
    "pipeline=1f1b:2 tensor=2 microbatches=16",
]


def slot_flops(config: GPTConfig, tokens: int, length: int, layers: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """FLOPs of matmuls in F, B and W of one micro-batch, for each stage.

    The head is no layer: the last stage runs it, loss and all its gradients, in its B. What attention multiplies has no
    weights, so both its gradients are in B.
    """
    weights = tokens * 2 * 12 * config.embed_dim**2
    attention = tokens * 2 * 2 * length * config.embed_dim
    head = [0] * (len(layers) - 1) + [3 * tokens * 2 * config.embed_dim * config.vocab_size]
    return {
        "forward": tuple(float(n * (weights + attention)) for n in layers),
        "backward": tuple(float(n * (weights + 2 * attention) + more) for n, more in zip(layers, head, strict=True)),
        "weight": tuple(float(n * weights) for n in layers),
    }


def layers_of(program: cjax.Program) -> list[int]:
    """How many layers each stage has."""
    line = program._composed.line
    if line is None:
        return []
    blocks = list(zip(line.partition.route, line.partition.count, strict=True))
    return [sum(n for at, n in blocks if at == stage) for stage in range(line.schedule.num_stages)]


def on_paper(
    plan: Plan, layers: Sequence[int], config: GPTConfig, batch: int, length: int, flops_per_s: float
) -> Simulation:
    """The plan's pipeline, with as many layers on each stage, at the devices' peak rate."""
    tokens = batch // plan.microbatches * length
    shares = max(plan.tensor.size, 1) * max(plan.data, 1) * flops_per_s
    flops = slot_flops(config, tokens, length, layers)
    seconds = {name: tuple(value / shares for value in values) for name, values in flops.items()}
    times = Times(seconds["forward"], seconds["backward"], seconds["weight"])
    schedule = build(plan.pipeline.schedule, plan.pipeline.size, plan.microbatches, plan.pipeline.chunks)
    return simulate(schedule, times, lockstep=True)


def compiled(results: Results, text: str) -> Row:
    """One compilation. A refusal is a row too."""
    config = gpt("gpt2", context=LENGTH)

    def make() -> Row:
        start = time.perf_counter()
        plan, devices = Plan.parse(text), resolve_devices(f"h100:{DEVICES}")
        hardware = hardware_of(devices)
        assert hardware.bf16_flops is not None
        try:
            program = program_of(config, BATCH, LENGTH, f"{text} precision=bfloat16", devices, optax.adamw(1e-3))
            row = described(cjax.audit(compile_lowered(program.lower(), devices), program.mesh), hardware)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return {"failed": str(error).splitlines()[0]}
        flops = sum(map(sum, slot_flops(config, BATCH * LENGTH, LENGTH, [config.num_layers]).values()))
        # An even share of the model's own arithmetic: what the program does beside it, or unevenly, is in compute_s.
        row["even_s"] = flops / DEVICES / hardware.bf16_flops
        busy = row["compute_s"]
        if layers := layers_of(program):
            simulation = on_paper(plan, layers, config, BATCH, LENGTH, hardware.bf16_flops)
            row["layers"] = layers
            row["bubble"] = simulate(simulation.schedule, Times(1, 1, 1), lockstep=True).bubble
            row["bubble_as_cut"] = simulation.bubble
            row["makespan_s"] = busy = simulation.makespan
            row["held"] = max(simulation.in_flight)
        row["floor_s"] = busy + row["exposed_s"]
        return row | {"seconds": round(time.perf_counter() - start, 1), "jax": jax.__version__}

    row = results.get({"part": "c", "plan": text, "model": "gpt2", "batch": BATCH, "length": LENGTH}, make)
    if "failed" in row:
        print(f"  c {text:42s} not compiled: {row['failed'][:90]}", flush=True)
        return row
    gib = {name: row[name] / 2**30 for name in ("received", "peak")}
    print(
        f"  c {text:42s} received {gib['received']:7.3f} GiB, peak {gib['peak']:6.2f} GiB, "
        f"floor {1e3 * row['floor_s']:6.1f} ms, {row['seconds']:.0f} s",
        flush=True,
    )
    return row
