"""Many jobs on one cluster: policies replayed on published workloads, held against what was published of them.

    python experiments/scheduling.py --data DATA            # all parts, a log and pictures in docs/results
    python experiments/scheduling.py --data DATA policies speed
    python experiments/scheduling.py live                   # eight jobs on Ray, on this machine: 5 minutes

DATA is the folder of the artifact of Qiao et al., "Pollux", OSDI 2021 (github.com/petuum/adaptdl, branch
osdi21-artifact, folder simulator), with workloads, traces and published results. 16 nodes of 4 devices, rounds of 60 s,
restarts of 30 s, as there. About 5 minutes on one core. Expected: Tiresias and Optimus as published, to the second;
the goodput policy as docs/scheduling.md has it. Rules of the policy were chosen on workloads 1, 3, 5 and 7, and those
of 2, 4, 6 and 8 are what counts.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from schedules import live
from shared.markdown import table

from cjax.planner.choice.scored import IDLE_POWER
from cjax.scheduler.policy.goodput import allocate
from cjax.scheduler.policy.job import Job, Speed, SpeedTable
from cjax.scheduler.replay.gantt import gantt_of
from cjax.scheduler.replay.knowledge import Knowledge, setting_of
from cjax.scheduler.replay.simulate import Replayed, simulate
from cjax.scheduler.replay.workload import Library, read_workload

KEPT = Path(__file__).parent.parent / "docs" / "results"
NODES = {f"node{number:02}": 4 for number in range(16)}
CHOSEN_ON, REPORTED = (1, 3, 5, 7), (2, 4, 6, 8)
WATTS = 70.0  # of a T4, of which the published nodes are: NVIDIA's datasheet
HEAD = ("what", "1-8", "1, 3, 5, 7", "2, 4, 6, 8", "published", "p99", "restarts", "held", "CPU s")
Say = Callable[[str], None]


class Replays:
    """Runs of a policy on the workloads of a load, and their row of a table."""

    def __init__(self, data: Path, say: Say) -> None:
        self.data, self.say = data, say
        self.library = Library(data / "traces")

    def outcomes(self, policy: str, load: str, restart: float, knowledge: Knowledge) -> list[Replayed]:
        folder = self.data / ("workloads" if load == "1.0" else f"workloads-{load}")
        found = []
        for number in range(1, 9):
            jobs = read_workload(folder / f"workload-{number}.csv", self.data / "traces", self.library)
            found.append(simulate(jobs, NODES, setting_of(policy, NODES, knowledge), restart=restart))
        return found

    def row(
        self,
        what: str,
        policy: str = "goodput",
        load: str = "1.0",
        restart: float = 30.0,
        knowledge: Knowledge = Knowledge(),  # noqa: B008
    ) -> list[str]:
        start = time.process_time()
        outcomes = self.outcomes(policy, load, restart, knowledge)
        means = np.array([outcome.mean for outcome in outcomes])
        halves = [means[[number - 1 for number in half]].mean() for half in (CHOSEN_ON, REPORTED)]
        path = self.data / "published" / f"{policy}-{load}.json"
        published = f"{json.loads(path.read_text())['mean']:,.0f}" if path.exists() else ""
        row = [
            what,
            *(f"{value:,.0f}" for value in (means.mean(), *halves)),
            published,
            f"{np.mean([outcome.quantile(0.99) for outcome in outcomes]):,.0f}",
            f"{np.mean([np.mean(list(outcome.restarts.values())) for outcome in outcomes]):.1f}",
            f"{np.mean([outcome.utilisation for outcome in outcomes]):.0%}",
            f"{time.process_time() - start:.0f}",
        ]
        self.say("  " + "  ".join([*row, *(f"{mean:.1f}" for mean in means)]))
        return row

    def pollux(self) -> list[list[str]]:
        """Its own results, for each load: nothing of it is run here."""
        rows = []
        for load in ("0.5", "1.0", "1.5", "2.0"):
            found = json.loads((self.data / "published" / f"pollux-{load}.json").read_text())["avgs"]
            means = np.array([found[f"workload-{number}"] for number in range(1, 9)])
            halves = [means[[number - 1 for number in half]].mean() for half in (CHOSEN_ON, REPORTED)]
            rows.append(
                [f"Pollux, load {load}", *[""] * 1, *(f"{half:,.0f}" for half in halves), f"{means.mean():,.0f}"]
            )
        return [[*row, "", "", "", ""] for row in rows]


def policies(replays: Replays) -> list[list[str]]:
    """All policies at the published load."""
    return [replays.row(policy, policy) for policy in ("fifo", "optimus", "tiresias")] + [replays.row("goodput")]


def less(replays: Replays) -> list[list[str]]:
    """The goodput policy, told less."""
    return [
        replays.row("work left unknown", knowledge=Knowledge(work=False)),
        replays.row("speeds learned", knowledge=Knowledge(speeds=False)),
        replays.row("neither known", knowledge=Knowledge(work=False, speeds=False)),
    ]


def errors(replays: Replays) -> list[list[str]]:
    """The goodput policy, told what is wrong; and quicker restarts."""
    return [
        replays.row("work left wrong by e^N(0, 0.7)", knowledge=Knowledge(wrong_work=0.7)),
        replays.row("speeds wrong by e^N(0, 0.2)", knowledge=Knowledge(wrong_speeds=0.2)),
        replays.row("restarts of 5 s", restart=5.0),
    ]


def loads(replays: Replays) -> list[list[str]]:
    """Half as many jobs, and up to twice as many."""
    return [replays.row(f"goodput, load {load}", load=load) for load in ("0.5", "1.5", "2.0")]


def energy(replays: Replays) -> list[list[str]]:
    """What a workload draws under each policy: cards at their full power while they compute, and at the planner's share
    of it while they wait for each other, for a start, or for a job."""
    rows = []
    for policy in ("fifo", "tiresias", "optimus", "goodput"):
        kwh, jobs, seconds = np.zeros(3), 0, 0.0
        for outcome in replays.outcomes(policy, "1.0", 30.0, Knowledge()):
            card_hours = outcome.makespan * sum(NODES.values()) / 3600
            computing, held = outcome.computing * card_hours, outcome.utilisation * card_hours
            waiting = np.array([0.0, held - computing, card_hours - held])
            kwh += WATTS / 1e3 * (IDLE_POWER * waiting + np.array([computing, 0.0, 0.0]))
            jobs += len(outcome.seconds)
            seconds += outcome.mean / 8
        rows.append(
            [
                policy,
                f"{seconds:,.0f}",
                *(f"{each / 8:.1f}" for each in (*kwh, kwh.sum())),
                f"{kwh[:2].sum() / jobs:.3f}",
            ]
        )
        replays.say("  energy: " + "  ".join(rows[-1]))
    return rows


ENERGY_HEAD = (
    "kWh of a workload", "mean s", "computing", "held, waiting", "nobody's", "in all", "of a job, while it held cards",
)  # fmt: skip


def speed(say: Say) -> list[list[str]]:
    """Seconds of one decision: 160 jobs on 64 devices, 1,000 on 2,048."""
    rows = []
    for num_jobs, num_nodes, per_node in ((160, 16, 4), (1000, 256, 8)):
        random = np.random.default_rng(0)
        nodes = {f"node{number}": per_node for number in range(num_nodes)}
        whole = [per_node * n for n in range(1, num_nodes + 1)]
        jobs = []
        for number in range(num_jobs):
            power = random.uniform(0.3, 1.0)
            speeds = [Speed(size, size**power) for size in [*range(1, per_node), *whole]]
            jobs.append(Job(f"job{number}", SpeedTable(speeds), work_left=float(10 ** random.uniform(2, 5))))
        current = allocate(jobs[: num_jobs // 2], nodes, {}, 0.0)
        times = []
        for _ in range(5):
            start = time.process_time()
            allocate(jobs, nodes, current, 0.0)
            times.append(time.process_time() - start)
        rows.append([f"{num_jobs} jobs on {num_nodes * per_node} devices", f"{np.median(times) * 1e3:.0f}"])
        say(f"  {rows[-1][0]}: CPU ms of five decisions {', '.join(f'{1e3 * each:.0f}' for each in times)}")
    return rows


def pictures(replays: Replays, folder: Path) -> None:
    """Who held what in workload 6, under our policy and under Tiresias."""
    folder.mkdir(parents=True, exist_ok=True)
    for policy in ("goodput", "tiresias"):
        path = replays.data / "workloads" / "workload-6.csv"
        jobs = read_workload(path, replays.data / "traces", replays.library)
        outcome = simulate(jobs, NODES, setting_of(policy, NODES))
        (folder / f"{policy}.svg").write_text(gantt_of(outcome, NODES))


OTHERS = ("energy", "live", "speed", "pictures")
PARTS: dict[str, Callable[[Replays], list[list[str]]]] = {
    "policies": policies,
    "less": less,
    "errors": errors,
    "loads": loads,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, *OTHERS, []], help="all but live, if none is named")
    parser.add_argument("--data", type=Path, help="folder of the published workloads and tables")
    parser.add_argument("--out", type=Path, help="folder of the log and the pictures")
    options = parser.parse_args(arguments)
    out = options.out or KEPT / f"scheduling-{datetime.date.today()}"
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "scheduling.log").open("a")

    def say(line: str) -> None:
        print(line, flush=True)
        log.write(f"{line}\n")
        log.flush()

    parts = options.parts or [*PARTS, "energy", "speed", "pictures"]
    if options.data is None and set(parts) - {"speed", "live"}:
        parser.error("--data: these parts read the published workloads")
    replays = Replays(options.data or Path(), say)
    say(f"python experiments/scheduling.py {' '.join(parts)}: mean seconds from submission to end")
    say("  " + ", ".join(HEAD) + ", then each workload")
    rows: list[list[str]] = []
    for part in parts:
        rows += PARTS[part](replays) if part in PARTS else []
    if rows:
        say("\n" + table(HEAD, [*rows, *(replays.pollux() if "loads" in parts else [])]) + "\n")
    if "energy" in parts:
        say("\n" + table(ENERGY_HEAD, energy(replays)) + "\n")
    if "live" in parts:
        say("\n" + table(live.HEAD, live.run(say, out)) + "\n")
    if "speed" in parts:
        say("\n" + table(("one decision", "CPU ms"), speed(say)) + "\n")
    if "pictures" in parts:
        pictures(replays, out)


if __name__ == "__main__":
    main()
