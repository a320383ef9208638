"""Pipeline schedules beside each other, and beside the other ways to use the same devices.

    python experiments/pipeline.py                            # parts s, c: simulated and compiled (c: `cjax[aot]`)
    python experiments/pipeline.py --parts "" --timed         # part t: step times on 4 virtual CPU devices
    python experiments/pipeline.py --parts "" --processes     # part p: two processes, a core each (Linux)

Parts: s, bubble, activations held and memory of every schedule on 4 and 8 stages; c, GPT-2 small on 4 absent H100s
under seven plans; t, wall time of one GPT under plans for 4 devices; p, a pipeline over two processes against one, and
against what the simulator says of it. Each row is kept in `results.jsonl` of the folder `--out` as soon as it is
known, and isn't computed again; tables and pictures are made of all that is there. About 3
minutes for s, 1 for c, 1 for t and 2 for p, on 2 quiet cores.

In part t virtual devices share the cores, so a stage that waits costs nothing there: those times show what a schedule
adds in work and copies, not its bubble. Part p has a core for each stage and shows the bubble too.
Expected: in s, from 2p micro-batches on zero bubble waits 0.4 times as long as 1F1B, and the memory of GPipe alone
grows with their number; in c, the head leaves no cut even, so bubbles are wider than of equal slots; in t, tensor=4
takes 0.85 of the time of data=4 and pipelines 1 to 1.2; in p, two processes are at least 1.5 times as fast as one,
within 20 % of what the simulator says.
"""

import argparse
import datetime
from pathlib import Path

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")  # GPUs are compiled for, not looked for

from pipelines.compiled import PLANS, compiled
from pipelines.plots import write_plots
from pipelines.processes import processes
from pipelines.schedules import MICROBATCHES, SCHEDULES, STAGES, SizeOfStep, schedule_row
from pipelines.tables import write_tables
from pipelines.timed import SizeOfRun, timed
from shared.results import KEPT, Results


def schedules(results: Results, wanted: str) -> None:
    """Part s: every schedule on 4 and 8 stages, with p to 8p micro-batches."""
    for num_stages in STAGES:
        for times in MICROBATCHES:
            for kind, num_chunks in SCHEDULES:
                if wanted in kind:
                    schedule_row(results, kind, num_chunks, num_stages, times * num_stages, SizeOfStep())


def comparison(results: Results, wanted: str) -> None:
    """Part c: GPT-2 small on 4 H100s."""
    for plan in PLANS:
        if wanted in plan:
            compiled(results, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="sc", help="of s, c; none with --parts ''")
    parser.add_argument("--plans", default="", help="in s and c, only schedules or plans whose text contains this")
    parser.add_argument("--timed", action="store_true", help="part t as well: step times on virtual CPU devices")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each program in part t")
    parser.add_argument("--processes", action="store_true", help="part p as well: two processes, a core each")
    parser.add_argument("--out", type=Path, default=KEPT / f"pipeline-{datetime.date.today()}")
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    for part, run in (("s", schedules), ("c", comparison)):
        if part in options.parts:
            run(results, options.plans)
    if options.timed:
        timed(results, SizeOfRun(), options.rounds)
    if options.processes:
        processes(results)
    print(write_tables(results, options.out))
    write_plots(results, options.out)


if __name__ == "__main__":
    main()
