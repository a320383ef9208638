"""Budgets on the GPU that is here: what a step takes, waits and needs, beside its arithmetic and its bytes."""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from shared.results import Results, Row

import cjax
from cjax.models import GPT, gpt
from cjax.models import loss as gpt_loss
from cjax.models.llama import Llama, LlamaConfig
from cjax.models.llama import loss as llama_loss
from offloads.overlap import waited

GIB = 2**30
PIECE = 2**30  # bytes of a copy whose rate is measured
STEPS = 3
# Model, rows and tokens of each, micro-batches, budgets. Without one, everything is on the card.
CASES: tuple[tuple[str, int, int, int, tuple[str, ...]], ...] = (
    ("gpt2-xl", 32, 1024, 4, ("", "budget=70GiB", "budget=12GiB")),
    ("llama-7b", 32, 2048, 8, ("budget=70GiB",)),
    ("llama-7b", 8, 2048, 2, ("budget=70GiB",)),
    ("gpt2-xl", 32, 1024, 4, ("budget=6GiB",)),
    ("llama-7b", 32, 2048, 8, ("budget=40GiB",)),
    ("tiny", 8, 64, 2, ("", "budget=64GiB", "offload=params+optimizer+gradients+activations")),
)
# JAX gives a process three quarters of a card, and page-locks 64 GB of host memory, if nobody says otherwise.
ENVIRON = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "115"}
LLAMAS = {"llama-7b": LlamaConfig(32, 32, 32, 4096, 11008, context=2048), "tiny": LlamaConfig(4, 4, 4, 64, 96)}


def cards(results: Results, folder: Path) -> None:
    """Expected: what waits for the link is what the report says; where a step has more than `hidden_from` tokens, it
    takes about as long as its arithmetic."""
    rates = results.get({"part": "card", "what": "link"}, functools.partial(apart, "link"))
    print(rates)
    tiny = rates.get("platform") != "gpu"
    for model, rows, length, microbatches, budgets in CASES:
        if tiny != (model == "tiny"):
            continue
        for budget in budgets:
            key = {"part": "card", "model": model, "rows": rows, "length": length, "budget": budget}
            print(results.get(key, functools.partial(apart, model, rows, length, microbatches, budget)), flush=True)


def apart(*given: Any) -> Row:
    """A case in a process of its own, whose peak is nobody else's; this one stays off the card."""
    command = [sys.executable, "-m", "offloads.card", *map(str, given)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, env=os.environ | ENVIRON
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def step_of(model: str, rows: int, length: int, microbatches: int, budget: str) -> tuple[cjax.Program, Any, int]:
    """A program, its batch, and how many parameters its layers multiply by."""
    if model.startswith("gpt"):
        config: Any = gpt(model, context=length)
        make, loss = (lambda rngs: GPT(config, rngs=rngs)), gpt_loss
    else:
        config = LLAMAS[model]
        make, loss = (lambda rngs: Llama(config, rngs=rngs)), llama_loss
    ids = jax.ShapeDtypeStruct((rows, length), "int32")
    plan = f"data=1 precision=bfloat16 microbatches={microbatches} {budget or 'remat=block'}"
    program = cjax.parallelize(
        make, loss, optax.adamw(1e-4), {"inputs": ids, "targets": ids}, plan, devices=jax.devices()[:1]
    )
    rng = np.random.default_rng(0)
    texts = rng.integers(0, config.vocab_size, (2, rows, length), dtype=np.int32)
    return program, {"inputs": texts[0], "targets": texts[1]}, config.num_params


def run(model: str, rows: int, length: int, microbatches: int, budget: str) -> Row:
    began = time.perf_counter()
    program, batch, num_params = step_of(model, rows, length, microbatches, budget)
    report = program.report()
    compiled = time.perf_counter()
    state = program.init(0)
    jax.block_until_ready(jax.tree.leaves(state))
    ready = time.perf_counter()
    seconds, waits, losses = [], [], []
    walk = report.walk
    for number in range(STEPS + 1):
        before, start = waited(state._rows) if walk else 0.0, time.perf_counter()
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        if number:
            seconds.append(time.perf_counter() - start)
            waits.append(waited(state._rows) - before if walk else 0.0)
    tokens = rows * length
    took = statistics.median(seconds)
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    found: Row = {
        "seconds": round(took, 3), "spread": round(max(seconds) - min(seconds), 3), "losses": losses,
        "waited": round(statistics.median(waits), 3), "peak_GiB": round(used / GIB, 2),
        "parameters": num_params, "tokens": tokens,
        "model_TFLOPs": round(6 * num_params * tokens / took / 1e12, 1),  # what is computed again not counted
        "prepared_in": round(compiled - began, 1), "init_in": round(ready - compiled, 1),
    }  # fmt: skip
    if walk is not None:
        moved = {name: round(walk.total(name) / GIB, 2) for name in ("host", "link_in", "link_out")}
        found |= {"planned_GiB": round(walk.peak / GIB, 2), **moved}
        found |= {"least_seconds": walk.seconds and round(walk.seconds, 3), "hidden_from": walk.hidden_from}
    return found


def link() -> Row:
    """Bytes a second from host to device, back, and both at once."""
    device = jax.devices()[0]
    size = PIECE if device.platform == "gpu" else 2**20
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    x = jax.device_put(np.ones(size // 4, np.float32), here)
    y = jax.device_put(x, there)
    jax.block_until_ready((x, y))
    ways = {
        "in": lambda: jax.device_put(y, here),
        "out": lambda: jax.device_put(x, there),
        "both": lambda: (jax.device_put(y, here), jax.device_put(x, there)),
    }

    def timed(way: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(way())
        return time.perf_counter() - start

    rates = {name: size / statistics.median(timed(way) for _ in range(7)) / 1e9 for name, way in ways.items()}
    return {"device": device.device_kind, "platform": device.platform, "bytes": size} | {
        f"GBs_{name}": round(rate, 1) for name, rate in rates.items()
    }


if __name__ == "__main__":
    name, *sizes = sys.argv[1:]
    print(json.dumps(link() if name == "link" else run(name, *map(int, sizes[:-1]), sizes[-1])))
