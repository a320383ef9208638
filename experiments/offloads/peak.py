"""What a process takes in all, beside what the report says of it: each plan in a process of its own."""

import ctypes
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from shared.results import Results, Row

import cjax
from offloads.overlap import AWAY, WIDTH, Layers, loss

NUM_ROWS, NUM_LAYERS, STEPS = 512, 64, 3
PLANS = {
    "device": "budget=64GiB",
    "budget": "budget=96MiB",
    "budget and disk": "budget=96MiB host=32MiB disk=8GiB",
    "disk": f"{AWAY} host=0B disk=8GiB",
}


def peaks(results: Results, folder: Path) -> None:
    """Expected: above what the same process takes without a state, no more than 1.03 of what devices (which are memory
    of this process here), host memory and rows on their way are said to take."""
    for name, plan in PLANS.items():
        results.get({"part": "peak", "homes": name, "plan": plan}, functools.partial(measured, plan, folder / name))


def measured(plan: str, folder: Path, num_layers: int = NUM_LAYERS) -> Row:
    """What `run` finds in a process of its own."""
    row = apart("offloads.peak", plan, folder, num_layers)
    print(plan, row)
    return row


def apart(module: str, plan: str, folder: Path, num: int) -> Row:
    """What a module prints in a process of its own, with an empty folder."""
    folder.mkdir()
    # What is freed goes back at once, or what the process took before would hide what it takes now.
    # Whoever asks may have told glibc to keep what is freed, which would be counted here.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, plan, str(folder), str(num)]
    return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)


def run(plan: str, folder: str, num_layers: int) -> Row:
    """Steps of a fresh state: what the process takes at most, above what it took before there was one."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(NUM_ROWS, WIDTH)).astype("float32"),
        "y": rng.normal(size=(NUM_ROWS, 4)).astype("float32"),
    }
    program = cjax.parallelize(
        Layers(num_layers), loss, optax.adamw(1e-4), batch, f"data=1 {plan}", devices=jax.devices()[:1],
        disk_folder=folder,
    )  # fmt: skip
    walk = program.report().walk
    assert walk is not None
    steps(program, batch, 1)  # compiles what the report has no need of
    assert program._walking is not None
    program._walking._release()  # a program holds the rows of its last state
    for path in Path(folder).iterdir():
        shutil.rmtree(path)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    steps(program, batch, STEPS)
    took, said = status("VmHWM") - before, walk.peak + walk.total("host") + walk.moving
    return {
        "layers": num_layers,
        "before": before,
        "device": walk.peak,
        "host": walk.total("host"),
        "moving": walk.moving,
        "took": took,
        "took_to_said": round(took / said, 3),
    }


def steps(program: cjax.Program, batch: Any, num: int) -> None:
    state = program.init(0)
    for _ in range(num):
        state, _ = program.step(state, batch)
    jax.block_until_ready(state)


def status(name: str) -> int:
    """Bytes, as Linux counts them for this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
