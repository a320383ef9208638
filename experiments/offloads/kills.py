"""A run whose layers are on disk, killed with -9 again and again: whether it goes on to the bits of one nobody killed.

Children are forked before a backend starts. Each goes on from the folder alone, and is killed at a moment drawn from
the seed. Of each second one the state is looked at first, which makes the updates that are due.
"""

import functools
import hashlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from shared.results import Results, Row

import cjax
from offloads.overlap import OPTIMIZERS, Layers, loss

SEED, KILLS, WIDTH = 16, 50, 32
MORE = 3  # steps behind the last kill
LONGEST = 0.3  # seconds from a child's first step to its end
PLAN = "zero=1 offload=params+optimizer+gradients host=0B disk=64MiB"


def run(folder: Path, optimizer: str, told: Callable[[int, Callable[[], str]], bool]) -> None:
    """Steps until `told` says so, which is given the number of each and how to come by a digest of the state."""
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    cjax.simulate(2)
    rng = np.random.default_rng(0)
    batches: list[dict[str, Any]] = [
        {"x": rng.normal(size=(8, WIDTH)).astype("float32"), "y": rng.normal(size=(8, 4)).astype("float32")}
        for _ in range(5)
    ]
    program = cjax.parallelize(Layers(6), loss, OPTIMIZERS[optimizer](), batches[0], PLAN, disk_folder=folder)
    state = program.resume() or program.init(0)

    def digest() -> str:
        found, arrays = hashlib.sha256(), program.to_arrays(state)
        for x in jax.tree.leaves((arrays["params"], arrays["opt_state"])):
            found.update(np.asarray(x).tobytes())
        return found.hexdigest()[:16]

    while told(step := int(state.step), digest):
        state, _ = program.step(state, batches[step % len(batches)])


def killed(folder: Path, optimizer: str, kills: int) -> Row:
    """How it ends, behind so many kills, beside a run of as many steps that nobody kills."""
    chance, seen, began = random.Random(SEED), folder / "seen", time.perf_counter()
    for number in range(kills):
        looks, wait = number % 2 == 1, chance.random() * LONGEST
        reading, writing = os.pipe()
        status = _child(
            functools.partial(_until_killed, folder / "cut", optimizer, seen, looks, writing), reading, wait
        )
        os.close(writing)
        os.close(reading)
        assert status == -signal.SIGKILL, f"seed {SEED}, kill {number}: {status}"
    assert _child(functools.partial(_some_more, folder / "cut", optimizer, seen)) == 0
    found: list[tuple[int, str]] = [tuple(json.loads(line)) for line in seen.read_text().splitlines()]
    wanted, end = {step for step, _ in found}, folder / "whole.json"
    assert _child(functools.partial(_nobody_kills, folder / "whole", optimizer, end, wanted)) == 0
    whole, steps = json.loads(end.read_text()), max(wanted)
    same = all(whole[str(step)] == digest for step, digest in found)
    return {
        "seed": SEED, "kills": kills, "steps": steps, "looked_at": len(wanted) - 1, "same": same,
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }  # fmt: skip


def _until_killed(folder: Path, optimizer: str, seen: Path, looks: bool, ready: int) -> None:
    first: list[int] = []

    def told(step: int, digest: Callable[[], str]) -> bool:
        if not first:
            first.append(step)
            if looks:
                _note(seen, step, digest())
        elif len(first) == 1:  # its first step has compiled what there is to compile
            first.append(step)
            os.write(ready, b"!")
        return True

    run(folder, optimizer, told)


def _note(seen: Path, step: int, digest: str) -> None:
    with seen.open("a") as file:
        file.write(json.dumps([step, digest]) + "\n")


def _some_more(folder: Path, optimizer: str, seen: Path) -> None:
    """Steps beyond the last that was killed, and a look at the state behind them."""
    first: list[int] = []

    def told(step: int, digest: Callable[[], str]) -> bool:
        first.append(step)
        if step == first[0] + MORE:
            _note(seen, step, digest())
        return step < first[0] + MORE

    run(folder, optimizer, told)


def _nobody_kills(folder: Path, optimizer: str, to: Path, at: set[int]) -> None:
    found: dict[int, str] = {}

    def told(step: int, digest: Callable[[], str]) -> bool:
        if step in at:
            found[step] = digest()
        return step < max(at)

    run(folder, optimizer, told)
    to.write_text(json.dumps(found))


def _child(work: Callable[[], object], ready: int | None = None, wait: float = 0.0) -> int:
    """How a process of its own ends; killed so long after it has written to `ready`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    if ready is not None and select.select([ready], [], [], 300)[0]:
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def kills(results: Results, folder: Path) -> None:
    """Both optimizers: layers updated in the backward pass, and in the next step's forward pass. Expected: the same."""
    for optimizer in OPTIMIZERS:
        own = folder / optimizer.replace(" ", "-")
        own.mkdir()
        key = {"part": "kills", "optimizer": optimizer, "plan": PLAN}
        print(results.get(key, functools.partial(killed, own, optimizer, KILLS)), flush=True)
