"""Runs strangers under plans and keeps what came out: python -m strangers.run [--models a,b] [--plans 1,2] [--table]

Each stranger is a process, which is ended and started again at the next plan when it hangs or is aborted. What is kept
is known by the cjax and the stranger that it was run with, and not run again with the same.
"""

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent import futures
from importlib import metadata
from pathlib import Path
from typing import Any

from strangers import table
from strangers.plans import NUM_DEVICES, PLANS
from strangers.rows import BY_NAME, ROWS

import cjax

HERE = Path(__file__).parent
STORE = HERE.parent.parent / ".strangers" / "results.jsonl"
# Of a device that waits for another: XLA ends the process and says so.
PATIENCE = 90
JUDGES = ("author", "common", "worker")


def main() -> None:
    options = arguments()
    names = options.models.split(",") if options.models else [row.name for row in ROWS]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        sys.exit(f"No stranger is called {', '.join(unknown)}. There are: {', '.join(BY_NAME)}.")
    plans = [PLANS[int(number) - 1] for number in options.plans.split(",")] if options.plans else list(PLANS)
    kept = {} if options.again else results()
    left = {name: [plan for plan in plans if (name, plan) not in kept] for name in names}
    with futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: run(name, left[name], options.seconds), names))
    if options.table:
        table.write(results())
    print(table.summary({pair: line for pair, line in results().items() if pair[0] in names and pair[1] in plans}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="strangers.run", description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="names, with commas; all by default")
    parser.add_argument("--plans", help=f"numbers from 1 to {len(PLANS)}, with commas; all by default")
    parser.add_argument("--again", action="store_true", help="also what was run with this cjax before")
    parser.add_argument("--seconds", type=int, default=300, help="how long a pair may take before it is ended")
    parser.add_argument("--jobs", type=int, default=1, help="how many strangers at a time")
    parser.add_argument("--table", action="store_true", help="write docs/strangers.md")
    return parser.parse_args()


# -- what is kept -----------------------------------------------------------------------------------------------------
@functools.cache
def version(name: str) -> str:
    """This cjax and this stranger, by what their files say, and the JAX they run on."""
    house, module = Path(cjax.__file__).parent, BY_NAME[name].make.split(":")[0]
    files = [*sorted(house.rglob("*.py")), HERE / f"{module}.py", *(HERE / f"{part}.py" for part in JUDGES)]
    text = b"".join(path.read_bytes() for path in files)
    return f"{hashlib.sha256(text).hexdigest()[:12]} jax {metadata.version('jax')}"


def results() -> dict[tuple[str, str], dict[str, Any]]:
    """The last outcome of each pair that is of these versions."""
    lines = [json.loads(line) for line in STORE.read_text().splitlines()] if STORE.exists() else []
    known = [line for line in lines if line["model"] in BY_NAME]
    return {(line["model"], line["plan"]): line for line in known if line["version"] == version(line["model"])}


def keep(name: str, plan: str, outcome: str, why: str, seconds: float) -> None:
    line = {"model": name, "plan": plan, "outcome": outcome, "why": why, "seconds": seconds}
    line |= {"version": version(name), "date": time.strftime("%Y-%m-%d")}
    STORE.parent.mkdir(exist_ok=True)
    with STORE.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{name:24} {plan:48} {seconds:6.1f} s  {outcome}  {why.splitlines()[0][:160] if why else ''}", flush=True)


# -- processes --------------------------------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    """As the suite's: eight virtual devices, few optimizations, compiled programs kept."""
    flags = (
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={PATIENCE}",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else "",
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cjax" / "strangers"
    house = Path(cjax.__file__).parent.parent
    return {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(house), str(HERE.parent)]),
        "XLA_FLAGS": " ".join(flags).strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "NPROC": "32",
        "USE_TORCH": "0",
        "HF_HUB_OFFLINE": "1",
    }


def run(name: str, plans: list[str], seconds: int) -> None:
    """The plans one after another; a process that ends before its plans do is blamed on the plan it was at."""
    while plans:
        phase, started = "start", time.monotonic()
        log = STORE.parent / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as errors:
            command = [sys.executable, "-m", "strangers.worker", name, *plans]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
            watch = Watch(worker, seconds)
            assert worker.stdout
            for text in worker.stdout:
                line = json.loads(text)
                if "outcome" in line:
                    keep(name, line["plan"], line["outcome"], line["why"], line["seconds"])
                    plans = plans[1:]
                    started = time.monotonic()
                phase = line.get("phase", "start")
                watch.starts_over()
            watch.stop()
        if not plans:
            return
        if phase in ("start", "author") and not watch.was_late:
            print(f"{name} does not run for its author:\n{log.read_text()[-3000:]}", flush=True)
            return
        outcome, why = ended(worker.returncode, watch.was_late, phase, log.read_text())
        keep(name, plans[0], outcome, why, round(time.monotonic() - started, 1))
        plans = plans[1:]


class Watch:
    """Ends a process that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[str], seconds: int) -> None:
        self.process, self.seconds, self.was_late = process, seconds, False
        self.starts_over()

    def starts_over(self) -> None:
        if hasattr(self, "timer"):
            self.timer.cancel()
        self.timer = threading.Timer(self.seconds, self.end)
        self.timer.daemon = True
        self.timer.start()

    def end(self) -> None:
        self.was_late = True
        self.process.kill()

    def stop(self) -> None:
        self.timer.cancel()
        self.process.wait()


def ended(code: int, was_late: bool, phase: str, errors: str) -> tuple[str, str]:
    if was_late or "rendezvous" in errors.lower():
        return "HANG", f"in {phase}"
    last = [line for line in errors.splitlines() if "Check failed" in line or line.startswith("F")]
    said = last[0] if last else "\n".join(errors.splitlines()[-3:])
    return "CRASH", f"aborted in {phase} ({code}): {said[:500]}"


if __name__ == "__main__":
    main()
