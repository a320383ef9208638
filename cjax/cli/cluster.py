"""`cjax cluster` and `cjax submit`."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import tyro

from cjax.cli.replay import nodes_of
from cjax.cluster import logs, resize, start, status, stop, submit


@dataclasses.dataclass(frozen=True)
class Submit:
    """Gives a job to a cluster that was started by `cjax cluster start`, which chooses its devices and plan.

    Attributes:
        script: `train.py:make`, with a function of yours that returns (model, loss, optimizer, data); or a script that
            trains by itself, with --speeds. What follows it is for that function, or the script.
        steps: that the job takes, at the base batch.
        devices: the least and the most that it may have: 1:8.
        name: its own; the script's, if not given.
        batch: the least and the most rows of the global batch, where that may change: 256:4096.
        rate_rule: how the rate of learning follows the batch: sqrt or linear.
        plan: "auto", and behind it words that every plan has to have.
        speeds: a csv file of devices and samples_per_second, with batch and plan where they are known.
        cluster: the folder of the cluster; that of CJAX_CLUSTER, or your own, if not given.
    """

    script: tyro.conf.Positional[str]
    steps: int
    devices: str
    name: str | None = None
    batch: str | None = None
    rate_rule: str | None = None
    plan: str = "auto"
    speeds: str | None = None
    cluster: str | None = None
    arguments: tyro.conf.Suppress[tuple[str, ...]] = ()

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Submit":
        ours, rest = list(arguments), []
        if "--" in ours:
            position = ours.index("--")
            ours, rest = ours[:position], ours[position + 1 :]
        return dataclasses.replace(tyro.cli(Submit, args=ours, prog="cjax submit"), arguments=tuple(rest))

    def run(self) -> int:
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        name = submit(said.pop("script"), **said)
        print(f"{name} is submitted; cjax cluster status, and cjax cluster logs {name}")
        return 0


@dataclasses.dataclass(frozen=True)
class StartCluster:
    """Starts a cluster, which runs until `cjax cluster stop`; the jobs that it had before go on.

    What is not given is as it was when this cluster was started last.

    Attributes:
        nodes: how many, and devices of each: 1x8.
        executor: local, plain processes on this machine, if not given; or ray.
        card: what the devices are: cpu, if not given, for virtual ones; or a card such as h100.
        period: seconds from one decision to the next; 10 if not given.
        grace: seconds that workers have to save and leave; 60 if not given.
        restart: seconds that a change of devices is taken to cost, before one was seen; 30 if not given.
        address: of a Ray to join, whose nodes are taken; without it Ray is started on this machine.
        cluster: the folder that it keeps all in; that of CJAX_CLUSTER, or your own, if not given.
    """

    nodes: str | None = None
    executor: str | None = None
    card: str | None = None
    period: float | None = None
    grace: float | None = None
    restart: float | None = None
    address: str | None = None
    cluster: str | None = None

    def run(self) -> int:
        if self.nodes is not None and self.address:
            raise ValueError("--nodes are those of the Ray at --address: leave --nodes out")
        folder = start(
            None if self.nodes is None else nodes_of(self.nodes),
            executor=self.executor, card=self.card, period=self.period, grace=self.grace, restart=self.restart,
            address=self.address, cluster=self.cluster,
        )  # fmt: skip
        print(f"the cluster of {folder.place} takes jobs: cjax submit train.py:make --steps 1000 --devices 1:8")
        return 0


@dataclasses.dataclass(frozen=True)
class ClusterStatus:
    """Shows all jobs of a cluster: devices, plan, rate, and when each is expected to end.

    Attributes:
        cluster: its folder; that of CJAX_CLUSTER, or your own, if not given.
    """

    cluster: str | None = None

    def run(self) -> int:
        print(shown(status(self.cluster)))
        return 0


@dataclasses.dataclass(frozen=True)
class ResizeJob:
    """Gives a job of a cluster another range of devices.

    Attributes:
        name: of the job.
        devices: the least and the most from now on, 1:8; or just so many, 4.
        cluster: the cluster's folder; that of CJAX_CLUSTER, or your own, if not given.
    """

    name: tyro.conf.Positional[str]
    devices: tyro.conf.Positional[str]
    cluster: str | None = None

    def run(self) -> int:
        resize(self.name, self.devices, self.cluster)
        print(f"{self.name} has {self.devices} devices at the next decision, where there is room")
        return 0


@dataclasses.dataclass(frozen=True)
class StopJob:
    """Ends a job of a cluster, which saves first; without a name the whole cluster, whose jobs go on when it is started
    again.

    Attributes:
        name: of the job; all, if not given.
        cluster: the cluster's folder; that of CJAX_CLUSTER, or your own, if not given.
    """

    name: tyro.conf.Positional[str | None] = None
    cluster: str | None = None

    def run(self) -> int:
        stop(self.name, self.cluster)
        print(f"{self.name or 'the cluster'} has ended")
        return 0


@dataclasses.dataclass(frozen=True)
class JobLogs:
    """Shows what was said about a job's workers, and what one of them printed since its last start.

    Attributes:
        name: of the job.
        rank: which worker.
        cluster: the cluster's folder; that of CJAX_CLUSTER, or your own, if not given.
    """

    name: tyro.conf.Positional[str]
    rank: int = 0
    cluster: str | None = None

    def run(self) -> int:
        print(logs(self.name, self.rank, self.cluster), end="")
        return 0


VERBS: dict[str, Any] = {
    "start": StartCluster,
    "status": ClusterStatus,
    "resize": ResizeJob,
    "stop": StopJob,
    "logs": JobLogs,
}


class ClusterCommand:
    """Starts a cluster for many jobs, shows what they do, resizes and stops them: start, status, resize, stop, logs."""

    @staticmethod
    def parse(arguments: Sequence[str]) -> Any:
        verb, *rest = arguments or [""]
        if verb in VERBS:
            return tyro.cli(VERBS[verb], args=rest, prog=f"cjax cluster {verb}")
        if verb in ("-h", "--help"):
            print(f"usage: cjax cluster {{{','.join(VERBS)}}} ...\n")
            for name, command in VERBS.items():
                print(f"  {name:7} {(command.__doc__ or '').splitlines()[0]}")
            raise SystemExit(0)
        raise ValueError(f"{verb!r} is nothing that a cluster does; type cjax cluster {' | '.join(VERBS)}")


def shown(found: dict[str, Any], now: float | None = None) -> str:
    """The table of jobs."""
    now = time.time() if now is None else now
    devices = sum(found["nodes"].values())
    held = sum(job["devices"] for job in found["jobs"])
    lines = [f"{held} of {devices} devices on {len(found['nodes'])} nodes are held"]
    rows = [("job", "status", "devices", "step", "samples/s", "ends in", "plan")]
    for job in found["jobs"]:
        rate = "" if job["rate"] is None else f"{job['rate']:,.4g}"
        left = "" if job["end"] is None else span(job["end"] - now)
        many = f"{job['devices']} ({job['least']}:{job['most']})"
        plan = job["plan"] or job["why"].partition("\n")[0]
        rows.append((job["name"], job["status"], many, f"{job['step']}/{job['steps']}", rate, left, plan))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def span(seconds: float) -> str:
    """`1 h 5 min`, for people."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
