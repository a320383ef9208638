"""Training on one GPU beside torch.compile: tokens a second, MFU, peak memory; without one, what a compiled step shows.

    python experiments/bench_gpu.py                                # every row, cjax and torch, each in its own process
    python experiments/bench_gpu.py --rows gpt2-xl --batches 8 16 --steps 100
    python experiments/bench_gpu.py --check h100:1                 # compiles for an H100 that is not here (cjax[aot])
    python experiments/bench_gpu.py --tiny                         # small sizes, on CPUs too: what the suite runs

bfloat16 matmuls, float32 weights and AdamW on both sides. Times are medians of steps that are waited for, after 3 that
are not counted. MFU is (6N + 12LHQT) flops a token over the card's peak (989 TFLOP/s of H100 and H200). Beside it
stands what cjax counts in the trace, and the floor: that arithmetic at the peak rate. On an H200 about 3 minutes a row.

Expected without a GPU (`--check h100:1`, about 1 minute a row on 2 cores): every row has flash attention forwards and
backwards, no matmul in float32, no whole logits, and a peak below state + Megatron's formula (34sbh a layer of a GPT)
+ 10 %. No time has been measured on a GPU yet, so there are none to expect.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from benchmarks.check import check
from benchmarks.models import ROWS, TINY, Row

import cjax

PEAK = 989e12  # of an H100 or H200 in bfloat16, flops a second
WARM = 3
GIB = 2**30
SIDES = ("cjax", "torch")


def timed(step: Callable[[], Any], wait: Callable[[Any], float], steps: int) -> dict[str, float]:
    """Seconds of a step: median, and the spread of the middle nine tenths; the last loss."""
    loss = float("nan")
    for _ in range(WARM):
        loss = wait(step())
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = wait(step())
        seconds.append(time.perf_counter() - start)
    low, high = np.quantile(seconds, [0.05, 0.95])
    return {"seconds": statistics.median(seconds), "spread": float(high - low), "loss": loss}


def run_cjax(row: Row, batch: int, steps: int, plan: str) -> dict[str, Any]:
    program = cjax.parallelize(
        row.build, row.loss, optax.adamw(1e-4, weight_decay=1e-2), row.shapes(batch), plan, devices=jax.devices()[:1]
    )
    given = row.batch_of(batch, 0)
    state = program.init(0)

    def step() -> Any:
        nonlocal state
        state, metrics = program.step(state, given)
        return metrics["loss"]

    found = timed(step, float, steps)
    report = program.report()
    used = jax.devices()[0].memory_stats() or {}
    return found | {
        "peak": used.get("peak_bytes_in_use", 0), "predicted": report.memory.total,
        "counted": report.flops.model if report.flops else 0.0,
    }  # fmt: skip


def run_torch(row: Row, batch: int, steps: int, compiled: bool) -> dict[str, Any]:
    from benchmarks import in_torch

    step, peak = in_torch.make_step(row, row.batch_of(batch, 0), compiled)

    def wait(loss: Any) -> float:
        in_torch.wait()
        return float(loss.detach())

    return timed(step, wait, steps) | {"peak": peak()}


def facts(row: Row, batch: int, found: dict[str, Any]) -> dict[str, Any]:
    flops = row.flops(batch)
    return found | {
        "tokens/s": batch * row.tokens / found["seconds"],
        "MFU": flops / found["seconds"] / PEAK,
        "floor": flops / PEAK,
    }


def in_process(options: argparse.Namespace, name: str, side: str, batch: int) -> dict[str, Any]:
    """A side of a row in a process of its own: its memory is nobody else's, and running out of it is an answer."""
    command = [sys.executable, __file__, "--one", name, side, str(batch), "--steps", str(options.steps)]
    command += ["--plan", options.plan] + (["--tiny"] if options.tiny else [])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        named = [each for each in lines if re.match(r"[\w.]*(Error|OutOfMemory)", each)]  # its message may be longer
        return {"failed": (named or lines)[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, side: str, batch: int, row: Row, found: dict[str, Any]) -> str:
    head = f"{name:14} {side:6} batch {batch:4}"
    if "failed" in found:
        return f"{head}  {found['failed']}"
    return (
        f"{head}  {1e3 * found['seconds']:9.1f} ms (floor {1e3 * found['floor']:.1f}, spread "
        f"{1e3 * found['spread']:.1f})  {found['tokens/s']:10.0f} tokens/s  MFU {found['MFU']:6.1%}  "
        f"peak {found['peak'] / GIB:6.2f} GiB"
        + (f" (predicted {found['predicted'] / GIB:.2f})" if "predicted" in found else "")
        + (f"  counted flops {found['counted'] / row.flops(batch):.3f} of the formula's" if "counted" in found else "")
    )


def compare(options: argparse.Namespace, rows: dict[str, Row]) -> list[dict[str, Any]]:
    """Every row on every side, at its common batch and at those asked for."""
    results = []
    for name, row in rows.items():
        for batch in options.batches or [row.batch]:
            for side in options.sides:
                if side == "torch" and row.kind == "t5":
                    continue
                found = in_process(options, name, side, batch)
                results.append({"row": name, "side": side, "batch": batch, **found})
                print(line(name, side, batch, row, found), flush=True)
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
    parser.add_argument("--plan", default="precision=bfloat16")
    parser.add_argument("--check", metavar="DEVICES", help="compile for these instead, such as h100:1")
    parser.add_argument("--check-plan", default="data=-1")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("ROW", "SIDE", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the results, one JSON object a line")
    options = parser.parse_args(arguments)
    table = TINY if options.tiny else ROWS
    if unknown := set(options.rows or ()) - set(table):
        parser.error(f"no rows {sorted(unknown)}; there are {', '.join(table)}")
    rows = {name: table[name] for name in options.rows or table}
    if options.one:
        name, side, batch = options.one
        row = table[name]
        run = run_cjax(row, int(batch), options.steps, options.plan) if side == "cjax" else run_torch(
            row, int(batch), options.steps, compiled=not options.tiny
        )  # fmt: skip
        print(json.dumps(facts(row, int(batch), run)))
        return run
    if options.check:
        return check_all(options, rows)
    import platform

    print(f"Python {platform.python_version()}, JAX {jax.__version__}, plan {options.plan}")
    results = compare(options, rows)
    if options.out:
        options.out.write_text("".join(json.dumps(result) + "\n" for result in results))
    return results


if __name__ == "__main__":
    sys.exit(1 if main() and "--check" in sys.argv else 0)
