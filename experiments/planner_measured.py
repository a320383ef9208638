"""Predicted against measured: twelve plans of each of three models, on 8 virtual devices that share the cores here.

    python experiments/planner_measured.py                 # about 20 minutes on 2 quiet cores; a log in docs/results
    python experiments/planner_measured.py --models GPT    # this model alone, added to the log

The machine's rates are measured first (`cjax calibrate`). Which plans are tried is no choice of ours: of the hundreds
or thousands that the search sees, those nearest to twelve times that are evenly spaced between the fastest and the
slowest predicted. Every plan of a model then takes a step in turn, round after round, and its least time counts:
what else the machine does only adds. Expected: Spearman's correlation of predicted and measured times 0.85 or more, and
the plan predicted first at most 10 % slower than the fastest measured.

Rates and steps are measured in a process that keeps the memory it once had, as accelerators' allocators do: by
default glibc gives a step's buffers back after each, and new pages cost more than what is computed in them. And
operations run in the order of the program: by default XLA's CPU devices take whatever is ready, and now and then two of
them wait for each other in different collectives for ever; and they have threads enough to wait on. And there is one
library of products: by default XLA takes one of two by the layout of the operands, which no plan knows, and small
products are several times slower in one than in the other.
"""

import argparse
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax
from predicted.chosen import spaced
from predicted.models import Setting, settings
from shared.results import KEPT

import cjax
from cjax.calibrate import calibrate
from cjax.planner.profile import write_profile

KEEPING = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28), "NPROC": "32",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_cpu_experimental_ynn_fusion_type=",
}  # fmt: skip


def main() -> None:
    if not KEEPING.items() <= os.environ.items():  # glibc and XLA read them when they start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEPING})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--models", nargs="*", help="of GPT, Mixer, Llama")
    parser.add_argument("--log", type=Path, default=KEPT / f"planner-measured-{datetime.date.today()}.log")
    options = parser.parse_args()
    lines = [] if options.log.exists() else ["python experiments/planner_measured.py\n"]

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # not the user's own profile
        profile = calibrate(jax.devices())
        write_profile(profile)
        say(f"{profile}\n")
        for setting in settings():
            if not options.models or setting.name in options.models:
                compare(setting, options.rounds, say)
    with options.log.open("a") as log:
        log.write("\n".join([*lines, ""]))


def compare(setting: Setting, rounds: int, say: Callable[[str], None], count: int = 12) -> None:
    """One model: the predictions of some plans beside their measured steps."""
    from scipy.stats import spearmanr  # half a second, and not for who only wants this module's settings

    call = setting.model, setting.loss, optax.adam(1e-3), setting.batch
    found = cjax.plans(call, jax.devices(), top=10**6, verify=0)
    rows, notes = found.plans, []
    program = cjax.parallelize(*call, rows[0].plan)
    predicted, running = {}, {}
    for places in spaced([sum(row.parts.values()) for row in rows], count):
        for row in (rows[place] for place in places if rows[place].plan not in predicted):
            try:
                mine = program.replan(row.plan)
                running[row.plan] = mine, mine.step(mine.init(0), setting.batch)[0]
            except ValueError as refused:
                notes.append(f"  {row.plan}: refused, and another one taken: {str(refused).splitlines()[0]}")
                continue
            predicted[row.plan] = row.parts
            break
    plans, measured = list(predicted), {plan: [] for plan in predicted}
    print(f"{setting.name}: compiled", flush=True)
    for _ in range(rounds):
        for plan, (mine, state) in running.items():
            start = time.perf_counter()
            state, metrics = mine.step(state, setting.batch)
            jax.block_until_ready((state, metrics))  # or its optimizer would run into the next plan
            measured[plan].append(time.perf_counter() - start)
            running[plan] = mine, state
    least = np.array([min(measured[plan]) for plan in plans])
    told = np.array([sum(predicted[plan].values()) for plan in plans])
    halves = [[min(measured[plan][half::2]) for plan in plans] for half in (0, 1)]
    say(f"{setting.name}: {count} of {len(rows):,} plans; ms a step, least of {rounds} rounds, and their median")
    for plan, seconds, one in zip(plans, least, told, strict=True):
        parts = ", ".join(f"{k} {1e3 * v:.0f}" for k, v in predicted[plan].items() if v > 0.005 * one)
        median = 1e3 * np.median(measured[plan])
        say(f"  {plan:78} measured {1e3 * seconds:7.1f} ({median:7.1f})  predicted {1e3 * one:7.1f}  ({parts})")
    order = spearmanr(told, least).statistic
    regret = least[told.argmin()] / least.min() - 1
    factor = np.exp(np.median(np.log(least / told)))
    off = np.median(np.abs(least / told / factor - 1))
    say(
        f"  Spearman {order:.2f} (goal 0.85; every other round against the others {spearmanr(*halves).statistic:.2f}), "
        f"regret {100 * regret:.0f} % (goal 10); measured {factor:.2f} times predicted, with that factor "
        f"{100 * off:.0f} % off at the median"
    )
    for note in notes:
        say(note)
    for plan in plans:
        say(f"  {plan:78} each round {' '.join(f'{1e3 * seconds:.0f}' for seconds in measured[plan])}")
    say("")


if __name__ == "__main__":
    main()
