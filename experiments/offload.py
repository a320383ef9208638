"""Models larger than the devices: what a budget holds, what a step under one waits for, and what a process takes.

    python experiments/offload.py            # all of it, half an hour on two quiet cores; or one part:
    python experiments/offload.py sizes      # GPT-2 XL in 6 GiB, Llama 7B in 12, 13B in 16; needs the extra aot
    python experiments/offload.py depth      # 320 layers under 1/120 of what plain training needs, on this CPU
    python experiments/offload.py generation # texts of a model ten times its budget; needs the extras weights, quantize
    python experiments/offload.py overlap    # how much of a step waits for host memory and disk, on this CPU
    python experiments/offload.py peak       # what a process takes in all, beside what the report says
    python experiments/offload.py steady     # what it takes after each hundred of a thousand steps
    python experiments/offload.py slides     # GPT-2 XL and T5-3B on 2 absent A100s, ZeRO-3 beside budgets; needs aot
    python experiments/offload.py arithmetic # what `cjax plan --budget` says, beside compiled programs; needs aot
    python experiments/offload.py kills      # a run on disk that is killed a hundred times, to the same bits
    python experiments/offload.py card       # GPT-2 XL and Llama 7B under budgets, on the GPU that is here

`sizes` compiles the programs of a walk for one H100, with 8,192 tokens a micro-batch, and runs nothing. `depth` trains
three steps on one virtual device, plain, with everything at home on the device, and under the budget, and compares all
bits of the latter two. Expected: every budget is kept, and the bits are the same. What the other parts expect is in
`offloads/`; `overlap` wants a machine that does nothing else. Each part has a log, to which a row is written as soon as
it is known; what is there isn't done again. Where a part fails, the others are done all the same, and the status is 1.
"""

import argparse
import functools
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # a card is compiled for, not looked for; `card` has processes of its own

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from offloads.arithmetic import arithmetics
from offloads.card import cards
from offloads.generation import generation
from offloads.kills import kills
from offloads.overlap import overlaps
from offloads.peak import peaks
from offloads.slides import slides
from offloads.steady import steadies
from shared.results import KEPT, Results, Row

import cjax
from cjax.models import GPT, gpt
from cjax.models import loss as gpt_loss
from cjax.models.llama import Llama, LlamaConfig
from cjax.models.llama import loss as llama_loss

DATE = "2026-11-23"
NUM_LAYERS, WIDTH, FACTOR = 320, 128, 120
LLAMAS = {"llama-7b": (32, 32, 4096, 11008), "llama-13b": (40, 40, 5120, 13824)}
SIZES = {"gpt2-xl": "6GiB", "llama-7b": "12GiB", "llama-13b": "16GiB"}


def size(name: str, budget: str) -> Row:
    """A model under its budget, compiled."""
    make: Any
    if name == "gpt2-xl":
        config = gpt(name, context=1024)
        make, loss, rows, length = (lambda rngs: GPT(config, rngs=rngs)), gpt_loss, 8, 1024
    else:
        layers, heads, embed, ffn = LLAMAS[name]
        llama = LlamaConfig(layers, heads, heads, embed, ffn, context=2048)
        make, loss, rows, length = (lambda rngs: Llama(llama, rngs=rngs)), llama_loss, 4, 2048
    ids = jax.ShapeDtypeStruct((rows, length), "int32")
    batch, plan = {"inputs": ids, "targets": ids}, f"precision=bfloat16 budget={budget}"
    began = time.perf_counter()
    walk = cjax.parallelize(make, loss, optax.adamw(1e-4), batch, plan, devices="h100:1").report().walk
    assert walk is not None and walk.seconds is not None
    moved = {name: walk.total(name) for name in ("host", "link_in", "link_out")}
    return {
        "peak": walk.peak,
        "fullest": walk.fullest,
        **moved,
        "least_seconds": round(walk.seconds, 3),
        "hidden_from": walk.hidden_from,
        "compiled_in": round(time.perf_counter() - began, 1),
    }


class Layer(nn.Module):
    """Two matmuls and a residual."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.relu(y)) * NUM_LAYERS**-0.5, None


class Deep(nn.Module):
    """Layers in a scan, so that tracing takes no longer with more of them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM_LAYERS)
        x, _ = layers()(x, None)
        return nn.Dense(4)(x)


def deep_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def bits(program: cjax.Program, state: cjax.State) -> str:
    found = hashlib.sha256()
    arrays = program.to_arrays(state)
    for x in jax.tree.leaves({name: arrays[name] for name in ("params", "opt_state")}):
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()[:16]


def trained(plain: cjax.Program, plan: str, needs: int) -> Row:
    """Three steps under a plan."""
    program, batch = plain.replan(plan), deep_batch()
    state, losses, began = program.init(0), [], time.perf_counter()
    for _ in range(3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    seconds = (time.perf_counter() - began) / 3
    report = program.report()
    peak = report.walk.peak if report.walk else report.memory.total
    return {
        "layers": NUM_LAYERS,
        "peak": peak,
        "plain_to_peak": round(needs / peak, 1),
        "bits": bits(program, state),
        "losses": losses,
        "seconds_a_step": round(seconds, 2),
    }


def deep_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(4, WIDTH)).astype("float32"), "y": rng.normal(size=(4, 4)).astype("float32")}


def sizes(results: Results, folder: Path) -> None:
    """Each model under its budget."""
    for name, budget in SIZES.items():
        print(results.get({"part": "sizes", "model": name, "budget": budget}, functools.partial(size, name, budget)))


def depth(results: Results, folder: Path) -> None:
    """Plain, with everything on the device, and under the budget."""
    plain = cjax.parallelize(Deep(), deep_loss, optax.adamw(1e-5), deep_batch(), "data=1", devices=jax.devices()[:1])
    needs = plain.report().memory.total
    for plan in ("data=1", "data=1 budget=64GiB", f"data=1 budget={needs // FACTOR}B"):
        print(results.get({"part": "depth", "plan": plan}, functools.partial(trained, plain, plan, needs)))


PARTS = {
    "sizes": sizes, "depth": depth, "generation": generation, "overlap": overlaps, "peak": peaks, "steady": steadies,
    "slides": slides, "arithmetic": arithmetics, "kills": kills,
    "card": cards,
}  # fmt: skip
MINUTES = {
    "sizes": 1, "depth": 1, "generation": 3, "overlap": 3, "peak": 3, "steady": 2, "slides": 3, "arithmetic": 4,
    "kills": 6, "card": 8,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", *PARTS), default="all")
    parser.add_argument("--logs", type=Path, default=KEPT, help="the folder of logs and pictures")
    parser.add_argument("--disk-folder", type=Path, help="for overlap, peak and steady: on the disk that is measured")
    args = parser.parse_args()
    if args.what == "all":
        # Each in a process of its own: one that forks, or measures what a process takes, has no other's before it.
        command = [sys.executable, *sys.argv[:1], "--logs", str(args.logs)]
        command += ["--disk-folder", str(args.disk_folder)] if args.disk_folder else []
        failed = [name for name in PARTS if subprocess.run([*command, name], check=False).returncode]
        if failed:
            raise SystemExit(f"not done: {', '.join(failed)}. What they have found is kept; the same command goes on.")
        return
    results = Results(args.logs / f"offload-{args.what}-{DATE}.log")
    rows = f"without the {len(results.rows)} rows there are"
    print(f"{args.what}: {MINUTES[args.what]} min on two cores, {rows}", flush=True)
    with tempfile.TemporaryDirectory(dir=args.disk_folder) as folder:
        PARTS[args.what](results, Path(folder))


if __name__ == "__main__":
    main()
