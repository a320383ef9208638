"""What a process takes after each hundred of a thousand steps: nothing grows from step to step."""

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from shared.results import Results, Row

import cjax
from offloads.overlap import AWAY, Layers, loss
from offloads.peak import apart, status

NUM_ROWS, WIDTH, NUM_LAYERS, STEPS, PARTS = 16, 64, 8, 1000, 10
PLANS = {"device": "budget=64GiB", "host": AWAY, "disk": f"{AWAY} host=0B disk=1GiB"}


def steadies(results: Results, folder: Path) -> None:
    """Expected: behind the second hundred of steps, until when pools fill, no plan takes a MiB more, and arrays as many
    bytes as behind the first."""
    for name, plan in PLANS.items():
        key = {"part": "steady", "homes": name, "plan": plan}
        print(results.get(key, functools.partial(apart, "offloads.steady", plan, folder / name, STEPS)), flush=True)


def run(plan: str, folder: str, num_steps: int) -> Row:
    """Bytes of this process, and of all arrays, after each tenth of the steps."""
    rng = np.random.default_rng(0)
    batch: Any = {
        "x": rng.normal(size=(NUM_ROWS, WIDTH)).astype("float32"), "y": rng.normal(size=(NUM_ROWS, 4)).astype("float32")
    }  # fmt: skip
    program = cjax.parallelize(
        Layers(NUM_LAYERS), loss, optax.adamw(1e-4), batch, f"data=1 {plan}", devices=jax.devices()[:1],
        disk_folder=folder,
    )  # fmt: skip
    state: Any = program.init(0)
    process, arrays = [], []
    for _ in range(PARTS):
        for _ in range(num_steps // PARTS):
            state, _ = program.step(state, batch)
        jax.block_until_ready(state)
        for rows in state._rows.every:
            rows.settle()
        gc.collect()
        process.append(status("VmRSS"))
        arrays.append(sum(x.nbytes for x in jax.live_arrays()))
    grown = process[-1] - process[1]
    return {"steps": num_steps, "process": process, "arrays": arrays, "grown": grown}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
