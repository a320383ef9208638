"""A pipeline over two processes, one core each, against the same work in one, and against the simulator.

Alone, with an address, it is one of those processes; `processes` starts them.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
import optax
from shared.results import Results, Row

import cjax
from cjax.models.gpt import GPTConfig
from cjax.pipeline import Times, build, simulate

from .schedules import program_of
from .timed import tokens_of

STAGES = 2


@dataclass(frozen=True)
class SizeOfProcesses:
    """What is run; a small vocabulary, so that the head is little beside a stage's layers."""

    num_layers: int = 8
    num_heads: int = 12
    embed_dim: int = 768
    vocab_size: int = 512
    length: int = 128
    microbatches: int = 16
    steps: int = 5

    def config(self) -> GPTConfig:
        return GPTConfig(self.num_layers, self.num_heads, self.embed_dim, None, self.length, self.vocab_size)


def median_of(run: Callable[[], Any], rounds: int, warm_up: int = 1) -> float:
    times = []
    for i in range(rounds + warm_up):
        start = time.perf_counter()
        jax.block_until_ready(run())
        if i >= warm_up:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def step_seconds(size: SizeOfProcesses, plan: str, microbatches: int) -> tuple[float, float, cjax.Program, Any]:
    """(median seconds of a step, loss of the first, program, state) with micro-batches of one row."""
    plan = f"{plan} microbatches={microbatches}" if microbatches > 1 else plan
    program = program_of(size.config(), microbatches, size.length, plan, None, optax.adam(1e-3))
    state = program.init(0)
    index, count = program.data_shard
    mine = slice(index * microbatches // count, (index + 1) * microbatches // count)
    batch = {name: rows[mine] for name, rows in tokens_of(size.vocab_size, microbatches, size.length).items()}
    losses = []

    def step() -> Any:
        nonlocal state
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        return metrics

    return median_of(step, size.steps), losses[0], program, state


def alone(size: SizeOfProcesses) -> Row:
    """In one process: a step of all micro-batches, one of a single one, and the loss of each, forwards only.

    A micro-batch more costs the difference between the two steps; what is left of the short one is the optimizer's.
    """
    whole, loss, program, state = step_seconds(size, "data=1", size.microbatches)
    rows = tokens_of(size.vocab_size, size.microbatches, size.length)
    pieces = [{name: x[i : i + 1] for name, x in rows.items()} for i in range(size.microbatches)]
    forward = median_of(lambda: program.evaluate(state, pieces), 3) / size.microbatches
    one, _, _, _ = step_seconds(size, "data=1", 1)
    each = (whole - one) / (size.microbatches - 1)
    return {"step_s": whole, "loss": loss, "forward_s": forward, "microbatch_s": each, "rest_s": max(one - each, 0.0)}


def together(size: SizeOfProcesses) -> Row:
    """In two processes: a step through the pipeline, and one transfer of what a stage hands on."""
    cjax.initialize()
    seconds, loss, _, _ = step_seconds(size, f"pipeline=1f1b:{STAGES}", size.microbatches)
    return {"step_s": seconds, "loss": loss, "transfer_s": transfer_seconds(size)}


def transfer_seconds(size: SizeOfProcesses, repeats: int = 50) -> float:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("pipe",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("pipe"))
    shape = (STAGES, size.length, size.embed_dim)
    x = jax.make_array_from_callback(shape, placed, lambda index: np.ones(shape, np.float32)[index])

    def send(x: jax.Array) -> jax.Array:
        pairs = [(i, (i + 1) % STAGES) for i in range(STAGES)]
        return jax.lax.fori_loop(0, repeats, lambda _, x: jax.lax.ppermute(x, "pipe", pairs), x)

    sent = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=placed.spec, out_specs=placed.spec))
    return median_of(lambda: sent(x), 5) / repeats


def start(size: SizeOfProcesses, count: int, timeout_s: float = 600.0) -> Row:
    """What the first of `count` processes found, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise RuntimeError(f"{count} processes need {count} cores, and {len(cores)} may be used here")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    if count > 1:
        shared |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    running = []
    for index in range(count):
        arguments = ["--core", str(cores[index]), "--size", json.dumps(asdict(size)), *["--pipeline"] * (count > 1)]
        environment = shared | ({"RANK": str(index)} if count > 1 else {})
        command = [sys.executable, "-m", __name__, *arguments]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        found = [process.communicate(timeout=timeout_s) for process in running]
    except subprocess.TimeoutExpired:
        return {"failed": f"not through after {timeout_s:g} s"}
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        return {"failed": "; ".join((errors.strip().splitlines() or ["?"])[-1] for _, errors in found)}
    return json.loads(found[0][0].splitlines()[-1])


def predicted(size: SizeOfProcesses, one: Row, transfer_s: float) -> dict[str, float]:
    """What the simulator says of the two, from slot times of one: a stage has half of every micro-batch's time and of
    the optimizer's."""
    forward = one["forward_s"] / STAGES
    backward = one["microbatch_s"] / STAGES - forward
    times = Times(forward, backward / 2, backward / 2, transfer_s)  # 1F1B adds B and W up again
    found = simulate(build("1f1b", STAGES, size.microbatches), times, lockstep=True)
    seconds = found.makespan + one["rest_s"] / STAGES
    return {"makespan_s": found.makespan, "bubble": found.bubble, "predicted_s": seconds}


def processes(results: Results, size: SizeOfProcesses = SizeOfProcesses()) -> None:
    """Part p. What fails is not kept, so that it is tried again."""
    rows = {}
    for name, count in (("one", 1), ("two", STAGES)):
        key = {"part": "p", "processes": count} | asdict(size)
        found = next((row for row in results.of("p") if key.items() <= row.items()), None) or start(size, count)
        if "failed" in found:
            print(f"  p {name} process(es): {found['failed']}", flush=True)
            return
        if count > 1 and "predicted_s" not in found:
            found |= predicted(size, rows["one"], found["transfer_s"])
            found["faster"] = rows["one"]["step_s"] / found["step_s"]
        rows[name] = results.get(key, lambda found=found: found | {"jax": jax.__version__})
        print(f"  p {name}: {rows[name]['step_s']:.3f} s a step, loss {rows[name]['loss']:.5f}", flush=True)
    two = rows["two"]
    print(f"  p {two['faster']:.2f} times as fast; simulated {two['predicted_s']:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--size", type=json.loads, required=True)
    parser.add_argument("--pipeline", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    size = SizeOfProcesses(**options.size)
    print(json.dumps(together(size) if options.pipeline else alone(size)))


if __name__ == "__main__":
    main()
