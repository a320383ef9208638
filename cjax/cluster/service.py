"""The service of a cluster: reads what is submitted, asks the policy who gets what, and starts and stops jobs."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import fmean
from types import FrameType

from cjax.cluster.executor import LocalExecutor, ProcessExecutor
from cjax.cluster.folder import ClusterFolder, ClusterJobFolder
from cjax.cluster.on_ray import RayExecutor
from cjax.cluster.running import RunningJob
from cjax.cluster.submitted import Submitted
from cjax.cluster.tracked import TrackedJob
from cjax.job.files import append_line, read_object, write_whole
from cjax.job.lock import locked
from cjax.scheduler.policy.goodput import allocate
from cjax.scheduler.policy.job import Placement

TICK = 0.2  # seconds between two looks
SHOWN = 1.0  # between two writings of the status
KEPT = 10.0  # between two of what is known of each job


@dataclasses.dataclass(frozen=True)
class ClusterSettings:
    """How a cluster was started.

    Attributes:
        nodes: devices of each.
        executor: "local" or "ray".
        card: what the devices are: "cpu" for virtual ones, or a card that the planner knows.
        period: seconds from one decision to the next.
        grace: seconds that workers have to save and leave.
        restart: seconds that a change of devices is taken to cost, before one was seen.
        address: of a Ray that runs; one is started on this machine, if empty.
    """

    nodes: dict[str, int]
    executor: str = "local"
    card: str = "cpu"
    period: float = 10.0
    grace: float = 60.0
    restart: float = 30.0
    address: str = ""


class Service:
    """Of one cluster.

    Args:
        folder: the cluster's.
        settings: how it was started.
        executor: who starts the processes of jobs.
    """

    def __init__(self, folder: ClusterFolder, settings: ClusterSettings, executor: ProcessExecutor) -> None:
        self.folder, self.settings, self.executor = folder, settings, executor
        self.jobs: dict[str, TrackedJob] = {}
        self._told = 0
        self._round = self._written = self._kept = 0.0

    def tell(self, number: int, frame: FrameType | None = None) -> None:
        """To end: jobs save, and go on when the cluster is started again. A second time ends their workers at once."""
        self._told += 1

    def run(self) -> None:
        """Until it is told to end."""
        while not self._told:
            self.look()
            time.sleep(TICK)
        told = 0
        while any(job.running for job in self.jobs.values()):
            while told < min(self._told, 2):
                told += 1
                for job in self.jobs.values():
                    job.wanted = None
                    if job.running is not None:
                        job.running.stop()
            self._collect()
            time.sleep(TICK)
        for job in self.jobs.values():
            job.keep()
        self._write()

    def look(self) -> None:
        """One round."""
        self._read()
        self._collect()
        # At whole multiples of the period, as in a replay, and at once where a node is lost or a range is changed.
        round_, now = time.time() // self.settings.period, time.monotonic()
        if round_ != self._round:
            self._round = round_
            self.decide()
        self._start()
        if now - self._written >= SHOWN:
            self._written = now
            self._write()
        if now - self._kept >= KEPT:
            self._kept = now
            for job in self.jobs.values():
                if not job.is_over:
                    job.keep()

    # -- what users say -----------------------------------------------------------------------------------------------
    def _read(self) -> None:
        for place in self.folder.jobs.glob("*/submitted.json"):
            if place.parent.name not in self.jobs:
                folder = ClusterJobFolder(place.parent)
                submitted = Submitted.of(place)
                if submitted is not None:
                    self.jobs[submitted.name] = TrackedJob(submitted, folder)
        for job in self.jobs.values():
            wish = read_object(job.folder.wish)
            if wish is None:
                continue
            job.folder.wish.unlink(missing_ok=True)
            if job.is_over:
                continue
            if wish.get("stop"):
                job.is_told = True
                job.wanted = None
                if job.running is not None:
                    self._leave(job, job.running)
                else:
                    self._end(job, "stopped", "")
            elif "least" in wish:
                job.least, job.most = int(wish["least"]), int(wish["most"])
                self._round = 0.0
            job.keep()

    # -- what has become of jobs --------------------------------------------------------------------------------------
    def _collect(self) -> None:
        for job in self.jobs.values():
            job.look()
            running = job.running
            if running is None:
                continue
            if running.told is None and job.status == "starting" and running.stepped is not None:
                job.status = "running"
                self._note(job, "step", running.placement, running.speed.plan)
            if not running.is_over:
                continue
            self._learn_restart(job, running)
            job.running = None
            self._note(job, "end", running.placement, running.outcome or "")
            if running.outcome in ("done", "failed"):
                self._end(job, running.outcome, running.why)
            elif job.is_told:
                self._end(job, "stopped", "")
            else:
                job.status, job.why = "waiting", running.why
                if running.outcome == "lost":
                    print(f"{job.submitted.name}: {running.why}", flush=True)
                    job.wanted, self._round = None, 0.0
            job.keep()

    def _learn_restart(self, job: TrackedJob, running: RunningJob) -> None:
        """What a stop and a start have cost it, where both were seen."""
        if running.told is not None and running.stepped is not None:
            seconds = time.monotonic() - running.told + running.stepped - running.begun
            job.restart = seconds if job.restart is None else (job.restart + seconds) / 2

    def _end(self, job: TrackedJob, status: str, why: str) -> None:
        job.status, job.why, job.ended, job.wanted = status, why, time.time(), None
        job.keep()
        print(f"{job.submitted.name}: {status}{': ' + why if why else ''}", flush=True)

    # -- who gets what ------------------------------------------------------------------------------------------------
    def decide(self) -> None:
        """Asks the policy, and says to those that are to move that they are."""
        jobs = {name: job for name, job in self.jobs.items() if not job.is_over and not job.is_told}
        seen = [job.restart for job in jobs.values() if job.restart is not None]
        for job in jobs.values():
            job.look_at_noise()
        told = [job.told(fmean(seen) if seen else self.settings.restart) for job in jobs.values()]
        current = {name: job.placement for name, job in jobs.items() if job.placement}
        given = allocate(told, self.executor.nodes(), current, time.time())
        for name, job in jobs.items():
            placement = given.get(name)
            if job.running is None:
                job.wanted = placement
            elif placement != job.placement:
                job.wanted = placement
                if job.running.told is None:
                    self._leave(job, job.running)

    def _leave(self, job: TrackedJob, running: RunningJob) -> None:
        """Tells it; a second time, its workers are ended at once."""
        self._note(job, "stop", running.placement, "")
        running.stop()
        job.status = "stopping"

    def _start(self) -> None:
        """Those whose devices nobody holds any more."""
        held = {
            (node, device)
            for job in self.jobs.values()
            if job.running is not None
            for node, devices in job.running.placement.items()
            for device in devices
        }
        for job in self.jobs.values():
            placement = job.wanted
            if not placement or job.running is not None or job.is_over or job.is_told:
                continue
            if held & {(node, device) for node, devices in placement.items() for device in devices}:
                continue
            self._begin(job, placement)

    def _begin(self, job: TrackedJob, placement: Placement) -> None:
        speed = job.way(placement)
        platform = "cpu" if self.settings.card == "cpu" else "cuda"
        job.wanted, job.status, job.why = None, "starting", ""
        job.starts += 1
        until = job.begin(speed.batch)
        self._note(job, "start", placement, speed.plan)
        job.running = RunningJob(
            job.submitted, job.folder, speed, until, placement, self.executor, platform, self.settings.grace
        )
        job.keep()

    # -- what is kept -------------------------------------------------------------------------------------------------
    def _note(self, job: TrackedJob, event: str, placement: Placement, what: str) -> None:
        line = {"time": time.time(), "job": job.submitted.name, "event": event, "step": job.step, "what": what}
        line["placement"] = {node: list(devices) for node, devices in placement.items()}
        append_line(self.folder.history, line)

    def _write(self) -> None:
        nodes = self.executor.nodes()
        found = {"time": time.time(), "nodes": nodes, "jobs": [job.shown() for job in self.jobs.values()]}
        write_whole(self.folder.status, json.dumps(found))


def main(text: str) -> int:
    """Runs the service of a cluster: its folder and settings, as JSON. In a process that nobody waits for: this one
    says its number, and ends."""
    if pid := os.fork():
        print(pid, flush=True)
        return 0
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    told = json.loads(text)
    folder, settings = ClusterFolder(Path(told["folder"])), ClusterSettings(**told["settings"])
    folder.jobs.mkdir(parents=True, exist_ok=True)
    with locked(folder.place):
        if settings.executor == "ray":
            executor: ProcessExecutor = RayExecutor(settings.nodes, settings.address, settings.card != "cpu")
        else:
            executor = LocalExecutor(settings.nodes)
        try:
            service = Service(folder, settings, executor)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, service.tell)
            described = dataclasses.asdict(settings) | {"nodes": executor.nodes(), "pid": os.getpid()}
            write_whole(folder.settings, json.dumps(described))
            sys.stdout.flush()
            service.run()
        finally:
            executor.close()
    return 0
