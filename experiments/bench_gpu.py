"""Training on one GPU beside plain JAX and torch.compile: tokens a second, MFU, peak memory; without one, what a
compiled step shows.

    python experiments/bench_gpu.py                                # every row and side, each in a process of its own
    python experiments/bench_gpu.py --rows gpt2-xl --batches 8 16 --steps 100
    python experiments/bench_gpu.py --sides cjax --profile kernels # and what each kernel takes, a file a row
    python experiments/bench_gpu.py --check h100:1                 # compiles for an H100 that is not here (cjax[aot])
    python experiments/bench_gpu.py --tiny                         # small sizes, on CPUs too: what the suite runs

bfloat16 matmuls, float32 weights and AdamW on all sides. Times are medians of steps that are waited for, after 3 that
are not counted; the batch is on the device. While a process is timed, the next one imports and traces. MFU is
(6N + 12LHQT) flops a token over the card's peak (989 TFLOP/s of H100 and H200). Beside it stands what cjax counts in
the trace, and the floor: that arithmetic at the peak rate.

Expected without a GPU (`--check h100:1`, about 1 minute a row on 2 cores): every row has flash attention forwards and
backwards, no matmul in float32, no whole logits, and a peak below state + Megatron's formula (34sbh a layer of a GPT)
+ 10 %. On an H100 the numbers of docs/gpu.md; all sides of a row take 1.5 to 3.5 minutes.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from benchmarks.check import check
from benchmarks.models import ROWS, TINY, Row
from benchmarks.pictures import draw
from benchmarks.profiled import Profiled, profiled

import cjax

PEAK = 989e12  # of an H100 or H200 in bfloat16, flops a second
WARM = 3
GIB = 2**30
SIDES = ("cjax", "jax", "torch")
TURN = "CJAX_BENCH_TURN"  # a file that whoever uses the GPU holds locked


def take_turn() -> float:
    """Waits until no other process uses the GPU, and says when; this one does until it ends."""
    if name := os.environ.get(TURN):
        fcntl.flock(os.open(name, os.O_RDWR), fcntl.LOCK_EX)
    return time.perf_counter()


def joules() -> float | None:
    """What the card has drawn since its driver was loaded, by its own counter; None where that can't be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1e3
    except (ImportError, OSError, AttributeError):
        return None
    except pynvml.NVMLError:
        return None


def timed(step: Callable[[], Any], wait: Callable[[Any], float], steps: int, began: float) -> dict[str, float]:
    """Seconds of a step: median, and the spread of the middle nine tenths; from `began` to the end of the first, with
    all that is compiled for it; the last loss."""
    loss = wait(step())
    first = time.perf_counter() - began
    for _ in range(WARM - 1):
        loss = wait(step())
    seconds: list[float] = []
    drawn = joules()
    for _ in range(steps):
        start = time.perf_counter()
        loss = wait(step())
        seconds.append(time.perf_counter() - start)
    used = None if drawn is None else (joules() or drawn) - drawn
    low, high = np.quantile(seconds, [0.05, 0.95])
    return {
        "seconds": statistics.median(seconds),
        "spread": float(high - low),
        "first": first,
        "loss": loss,
        "joules": used and used / steps,
    }


def run_cjax(row: Row, batch: int, steps: int, plan: str, profile: Path | None = None) -> dict[str, Any]:
    program = cjax.parallelize(
        row.build, row.loss, optax.adamw(1e-4, weight_decay=1e-2), row.shapes(batch), plan, devices=jax.devices()[:1]
    )
    given = jax.device_put(row.batch_of(batch, 0), jax.devices()[0])  # as on the other sides
    began = take_turn()
    report = program.report()  # compiles the step, and tries kernels for it
    state = program.init(0)

    def step() -> Any:
        nonlocal state
        state, metrics = program.step(state, given)
        return metrics["loss"]

    found = timed(step, float, steps, began)
    if profile:
        found |= kept(profiled(step, 5), profile)
    used = jax.devices()[0].memory_stats() or {}
    return found | {
        "peak": used.get("peak_bytes_in_use", 0), "predicted": report.memory.total,
        "counted": report.flops.model if report.flops else 0.0,
        "about": report.time.predicted if report.time else None,
    }  # fmt: skip


def kept(found: Profiled, path: Path) -> dict[str, Any]:
    """Writes every kernel to a file; what they add up to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"milliseconds": found.milliseconds, "busy": found.busy}) + "\n" + "".join(
        json.dumps(dataclasses.asdict(kernel) | {"kind": kernel.kind}) + "\n" for kernel in found.kernels
    ))  # fmt: skip
    return {"profile": str(found)}


def run_jax(row: Row, batch: int, steps: int, profile: Path | None = None) -> dict[str, Any]:
    from benchmarks import in_jax

    began = take_turn()
    step, peak = in_jax.make_step(row, row.batch_of(batch, 0))
    found = timed(step, float, steps, began)
    if profile:
        found |= kept(profiled(step, 5), profile)
    return found | {"peak": peak()}


def run_torch(row: Row, batch: int, steps: int, compiled: bool) -> dict[str, Any]:
    from benchmarks import in_torch

    began = take_turn()
    step, peak = in_torch.make_step(row, row.batch_of(batch, 0), compiled)

    def wait(loss: Any) -> float:
        in_torch.wait()
        return float(loss.detach())

    return timed(step, wait, steps, began) | {"peak": peak()}


def facts(row: Row, batch: int, found: dict[str, Any]) -> dict[str, Any]:
    flops = row.flops(batch)
    return found | {
        "tokens/s": batch * row.tokens / found["seconds"],
        "MFU": flops / found["seconds"] / PEAK,
        "floor": flops / PEAK,
    }


@dataclass
class Side:
    """A side of a row in a process of its own: its memory is nobody else's, and running out of it is an answer."""

    name: str
    side: str
    batch: int
    process: subprocess.Popen[str] | None = None

    def begin(self, options: argparse.Namespace, turn: str) -> None:
        if self.process is None:
            command = [sys.executable, __file__, "--one", self.name, self.side, str(self.batch)]
            command += ["--steps", str(options.steps), "--plan", options.plan] + (["--tiny"] if options.tiny else [])
            command += ["--profile", str(options.profile)] if options.profile else []
            # Two processes are here at once: neither may take the memory that it does not need.
            environ = os.environ | {TURN: turn, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ)

    def found(self) -> dict[str, Any]:
        assert self.process is not None
        out, err = self.process.communicate()
        if self.process.returncode:
            lines = err.strip().splitlines() or [f"exit status {self.process.returncode}"]
            named = [
                each for each in lines if re.match(r"[\w.]*(Error|OutOfMemory)", each)
            ]  # its message may be longer
            return {"failed": (named or lines)[-1][:200]}
        return json.loads(out.splitlines()[-1])


def line(name: str, side: str, batch: int, row: Row, found: dict[str, Any]) -> str:
    head = f"{name:14} {side:6} batch {batch:4}"
    if "failed" in found:
        return f"{head}  {found['failed']}"
    return (
        f"{head}  {1e3 * found['seconds']:9.1f} ms (floor {1e3 * found['floor']:.1f}, spread "
        f"{1e3 * found['spread']:.1f})  {found['tokens/s']:10.0f} tokens/s  MFU {found['MFU']:6.1%}  "
        f"peak {found['peak'] / GIB:6.2f} GiB  first step {found['first']:.0f} s"
        + (f" (predicted {found['predicted'] / GIB:.2f})" if "predicted" in found else "")
        + (f"  {found['joules']:.1f} J" if found.get("joules") else "")
        + (f"  planned {1e3 * found['about']:.1f} ms" if found.get("about") else "")
        + (f"  {found['profile']}" if "profile" in found else "")
        + (f"  counted flops {found['counted'] / row.flops(batch):.3f} of the formula's" if "counted" in found else "")
    )


def compare(options: argparse.Namespace, rows: dict[str, Row]) -> list[dict[str, Any]]:
    """Every row on every side, at its common batch and at those asked for."""
    sides = [
        Side(name, side, batch)
        for name, row in rows.items() for batch in options.batches or [row.batch] for side in options.sides
    ]  # fmt: skip
    results = []
    with tempfile.NamedTemporaryFile() as turn:
        for this, following in zip(sides, [*sides[1:], None], strict=True):
            for side in filter(None, (this, following)):
                side.begin(options, turn.name)
            found = this.found()
            results.append({"row": this.name, "side": this.side, "batch": this.batch, **found})
            print(line(this.name, this.side, this.batch, rows[this.name], found), flush=True)
    return results


def check_all(options: argparse.Namespace, rows: dict[str, Row]) -> list[str]:
    """Every row compiled for cards that are not here; what is not as it should be."""
    problems = []
    for name, row in rows.items():
        batch = (options.batches or [row.batch])[0]
        found = check(row, batch, options.check_plan, options.check)
        mine = found.problems(row, batch)
        problems += [f"{name}: {one}" for one in mine]
        print(
            f"{name:14} batch {batch:4}  peak {found.peak / GIB:6.2f} GiB (state and gradients {found.state / GIB:.2f} "
            f"+ formula {found.formula / GIB:.2f})  largest logits {found.largest / 1e6:.0f} M  float32 matmuls "
            f"{found.float32}  {', '.join(found.kernels) or 'no kernel'}  {'; '.join(mine) or 'as it should be'}",
            flush=True,
        )
    return problems


def main(arguments: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--profile", type=Path, help="a folder: profile 5 steps more of the sides in JAX")
    parser.add_argument("--plan", default="precision=bfloat16")
    parser.add_argument("--check", metavar="DEVICES", help="compile for these instead, such as h100:1")
    parser.add_argument("--check-plan", default="data=-1")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("ROW", "SIDE", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the results, one JSON object a line; beside it a picture")
    options = parser.parse_args(arguments)
    table = TINY if options.tiny else ROWS
    if unknown := set(options.rows or ()) - set(table):
        parser.error(f"no rows {sorted(unknown)}; there are {', '.join(table)}")
    rows = {name: table[name] for name in options.rows or table}
    if options.one:
        name, side, batch = options.one
        row, profile = table[name], options.profile and options.profile / f"{name}-{side}-{batch}.jsonl"
        run = {
            "cjax": lambda: run_cjax(row, int(batch), options.steps, options.plan, profile),
            "jax": lambda: run_jax(row, int(batch), options.steps, profile),
            "torch": lambda: run_torch(row, int(batch), options.steps, compiled=not options.tiny),
        }[side]()
        print(json.dumps(facts(row, int(batch), run)))
        return run
    if options.check:
        return check_all(options, rows)
    import platform

    print(f"Python {platform.python_version()}, JAX {jax.__version__}, plan {options.plan}")
    results = compare(options, rows)
    if options.out:
        options.out.write_text("".join(json.dumps(result) + "\n" for result in results))
        draw(options.out, options.out.with_suffix(".svg"))
    return results


if __name__ == "__main__":
    sys.exit(1 if main() and "--check" in sys.argv else 0)
