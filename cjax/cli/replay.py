"""`cjax replay`."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import tyro

from cjax.scheduler.policy.job import Nodes
from cjax.scheduler.replay.gantt import gantt_of
from cjax.scheduler.replay.knowledge import Knowledge, setting_of
from cjax.scheduler.replay.simulate import Replayed, simulate
from cjax.scheduler.replay.workload import read_workload

TOLD = {
    "all": Knowledge(),
    "work": Knowledge(speeds=False),
    "speeds": Knowledge(work=False),
    "nothing": Knowledge(work=False, speeds=False),
}


@dataclasses.dataclass(frozen=True)
class ReplayCommand:
    """Simulates what a policy would have done with the jobs of a log: their times, how busy devices were, a chart.

    Attributes:
        workload: a csv file of jobs; docs/scheduling.md has its columns.
        tables: a csv file of speeds, or for published workloads the folder of the models' tables; speeds.csv or traces
            beside the workload, or beside its folder, if not given.
        nodes: how many, and devices of each: 16x4.
        policy: goodput, fifo, tiresias or optimus.
        told: what the goodput policy is told of jobs: all; work, with speeds learned as they run; speeds; or nothing.
        period: seconds from one decision to the next.
        restart: seconds that a start or a change costs.
        gantt: where to write the chart, as SVG.
        jobs: where to write the seconds of each job, as csv.
    """

    workload: tyro.conf.Positional[str]
    tables: str | None = None
    nodes: str = "16x4"
    policy: str = "goodput"
    told: str = "all"
    period: float = 60.0
    restart: float = 30.0
    gantt: str | None = None
    jobs: str | None = None

    @staticmethod
    def parse(arguments: Sequence[str]) -> "ReplayCommand":
        return tyro.cli(ReplayCommand, args=arguments, prog="cjax replay")

    def run(self) -> int:
        nodes = nodes_of(self.nodes)
        if self.told not in TOLD:
            raise ValueError(f"--told {self.told}: it is one of {', '.join(TOLD)}")
        if self.told != "all" and self.policy != "goodput":
            raise ValueError("--told goes with --policy goodput; the others are told what their authors say")
        if not self.period > 0 or not self.restart >= 0:
            raise ValueError(f"--period {self.period:g} and --restart {self.restart:g} are seconds, the first above 0")
        setting = setting_of(self.policy, nodes, TOLD[self.told])
        jobs = read_workload(Path(self.workload), self._tables())
        outcome = simulate(jobs, nodes, setting, period=self.period, restart=self.restart)
        print(f"{self.workload} on {self.nodes} devices, {self.policy}\n\n{summary(outcome)}")
        if self.gantt:
            Path(self.gantt).write_text(gantt_of(outcome, nodes))
        if self.jobs:
            lines = [f"{name},{seconds:g},{outcome.restarts[name]}" for name, seconds in outcome.seconds.items()]
            Path(self.jobs).write_text("\n".join(["name,seconds,restarts", *lines, ""]))
        return 0

    def _tables(self) -> Path:
        if self.tables:
            return Path(self.tables)
        if not Path(self.workload).is_file():
            raise FileNotFoundError(f"there is no file {self.workload}; `cjax replay` takes a log of jobs as CSV")
        beside = Path(self.workload).absolute().parent
        for folder in (beside, beside.parent):
            for name in ("speeds.csv", "traces"):
                if (folder / name).exists():
                    return folder / name
        raise FileNotFoundError(f"neither speeds.csv nor traces is beside {self.workload}; say --tables where they are")


def nodes_of(text: str) -> Nodes:
    """`16x4` is 16 nodes of 4 devices.

    Raises:
        ValueError: it is no such text.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
    if not match:
        raise ValueError(f"--nodes {text}: write how many, and the devices of each, as 16x4")
    width = len(str(int(match[1]) - 1))
    return {f"node{number:0{width}}": int(match[2]) for number in range(int(match[1]))}


def summary(outcome: Replayed) -> str:
    seconds, restarts = outcome.seconds.values(), sum(outcome.restarts.values())
    lines = [
        ("jobs", f"{len(seconds)}"),
        ("mean seconds from submission to end", f"{outcome.mean:,.0f}"),
        ("half of the jobs within", f"{outcome.quantile(0.5):,.0f}"),
        ("99 of 100 within", f"{outcome.quantile(0.99):,.0f}"),
        ("first submission to last end", f"{outcome.makespan:,.0f}"),
        ("devices held, share of that time", f"{outcome.utilisation:.1%}"),
        ("restarts a job", f"{restarts / len(seconds):.2f}"),
    ]
    return "\n".join(f"{name:36} {value:>9}" for name, value in lines)
