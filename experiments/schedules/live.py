"""Eight jobs on a live cluster of Ray, and what a replay says of them."""

import dataclasses
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from schedules.training import Waves
from schedules.waiting import undisturbed
from shared.processes import processes_of

import cjax
from cjax import cluster
from cjax.cluster.folder import ClusterFolder
from cjax.job.files import read_lines, read_object
from cjax.scheduler.policy.job import Speed
from cjax.scheduler.replay.gantt import gantt_of
from cjax.scheduler.replay.knowledge import setting_of
from cjax.scheduler.replay.own import OwnModel
from cjax.scheduler.replay.simulate import Holding, Replayed, simulate
from cjax.scheduler.replay.simulated import Submission

HERE = Path(__file__).parent
NODES = {f"node{number}": 2 for number in range(4)}
PERIOD = 5.0
RESTART = 4.0  # seconds that a start is taken to cost before one was seen
SIZES = (1, 2, 4, 8)
REAL, PAUSE, REAL_STEPS = "real", 0.25, 200
DEAD, DIES = "node3", 152.0  # seconds after the beginning
RESIZES = ((32.0, 4), (60.0, 2))  # of the real job, which begins with 2 devices: processes 1, 2 and 1 again
STILL, PAIR, TRIED, CRASHED = "still", "pair", "tried", "crashed"  # jobs that are measured before
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class LiveJob:
    """One that waits.

    Attributes:
        name: its own.
        time: seconds from the beginning to its submission.
        seconds: that it would take on one device.
        power: its rate grows with devices to this power.
        crash: the step at which it fails, every time.
    """

    name: str
    time: float
    seconds: float
    power: float
    crash: int | None = None
    step = 0.2  # seconds of a step on one device

    @property
    def steps(self) -> int:
        return round(self.seconds / self.step)

    def seconds_of_step(self, size: int) -> float:
        return self.step / size**self.power

    def speeds(self) -> tuple[Speed, ...]:
        return tuple(Speed(size, 1 / self.seconds_of_step(size)) for size in SIZES)


# Between the decisions, which are at whole multiples of PERIOD: who comes at the same moment is in time, or is not.
JOBS = (
    LiveJob("long", 1.0, 480.0, 0.9),
    LiveJob("narrow", 2.0, 180.0, 0.5),
    LiveJob("crash", 12.0, 60.0, 0.9, crash=30),
    LiveJob("second", 62.0, 240.0, 0.85),
    LiveJob("short", 92.0, 90.0, 0.8),
    LiveJob("late", 122.0, 210.0, 0.9),
    LiveJob("last", 172.0, 120.0, 0.7),
)


def run(say: Say, out: Path, executor: str = "ray") -> list[list[str]]:
    """Lives, replays, and compares; rows of a table."""
    with tempfile.TemporaryDirectory() as place:
        folder = ClusterFolder(Path(place) / "cluster")
        cluster.start(NODES, executor=executor, period=PERIOD, restart=RESTART, grace=30.0, cluster=folder.place)
        try:
            seen = _measured(folder, say)
            begin, death = _live(folder, say)
            facts = {name: _facts(folder, name) for name in (*(job.name for job in JOBS), REAL)}
            same = _losses(folder)
            history = read_lines(folder.history)
        finally:
            if folder.is_alive:
                cluster.stop(cluster=folder.place)
        time.sleep(2.0)
        left = processes_of(Path(place))
    say(f"  processes left behind: {left or 'none'}; in /dev/shm: {os.listdir('/dev/shm') or 'nothing'}")
    for line in history:
        say("  " + json.dumps(line | {"time": round(line["time"] - begin, 2)}))
    outcome = _replayed(facts, seen, begin, death)
    (out / "live.svg").write_text(gantt_of(_as_replayed(history, facts, begin), NODES))
    (out / "live-replayed.svg").write_text(gantt_of(outcome, NODES))
    return _rows(facts, outcome, same)


# -- what is measured before ------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Costs:
    """Of a kind of jobs.

    Attributes:
        starts: seconds from a start until it makes steps, by devices.
        steps: seconds of one, by devices.
        leaves: seconds from when it is told to leave until its devices are free.
    """

    starts: dict[int, float]
    steps: dict[int, float]
    leaves: float

    @property
    def change(self) -> float:
        return fmean(self.starts.values()) + self.leaves


@dataclasses.dataclass(frozen=True)
class Measured:
    """By jobs that ran before the others, and are none of them."""

    waiting: Costs
    real: Costs
    crash: float  # seconds from the start of a job that crashes until it has failed, but for its steps before


def _measured(folder: ClusterFolder, say: Say) -> Measured:
    """Runs them: one that waits, on each size; one that crashes; the real one, alone and undisturbed, on 2 devices, and
    beside it, of two processes, on 4."""
    crashing = LiveJob(CRASHED, 0.0, 60.0, 0.9, crash=5)
    _submit(folder, LiveJob(TRIED, 0.0, 1e4, 0.9), devices=SIZES[-1])
    for size in (SIZES[-1], *SIZES):  # at first on all nodes, whose first start takes longer than any later one
        cluster.resize(TRIED, size, folder.place)
        _until(folder, TRIED, lambda job, size=size: job["devices"] == size and job["status"] == "running")
        time.sleep(2.0)
    cluster.stop(TRIED, folder.place)
    _submit(folder, crashing)
    _until(folder, CRASHED, lambda job: job["status"] == "failed")
    _submit_real(folder, STILL, 2, REAL_STEPS)
    _submit_real(folder, PAIR, 4, 10 * REAL_STEPS)
    _until(folder, PAIR, lambda job: job["step"] >= 20)
    cluster.stop(PAIR, folder.place)
    _until(folder, STILL, lambda job: job["status"] == "done")
    history = read_lines(folder.history)
    waiting, real = _costs(history, (TRIED,)), _costs(history, (STILL, PAIR))
    held = {line["event"]: line["time"] for line in history if line["job"] == CRASHED}
    assert crashing.crash is not None
    crash = held["end"] - held["start"] - (crashing.crash - 1) * crashing.step
    for name, costs in (("jobs that wait", waiting), ("the real job", real)):
        starts = ", ".join(f"{seconds:.2f} s on {size}" for size, seconds in costs.starts.items())
        steps = ", ".join(f"{1e3 * seconds:.0f} ms on {size}" for size, seconds in costs.steps.items())
        say(f"  measured before: {name} start in {starts}; leave in {costs.leaves:.2f} s; step in {steps}")
    say(f"  measured before: a job that crashes has failed after {crash:.2f} s and its steps")
    return Measured(waiting, real, crash)


def _costs(history: Sequence[dict[str, Any]], names: Sequence[str]) -> Costs:
    starts, steps, leaves = {}, {}, []
    for name in names:
        at: dict[str, dict[str, Any]] = {}
        for line in (line for line in history if line["job"] == name):
            at[line["event"]] = line
            if line["event"] != "end":
                continue
            size = sum(map(len, line["placement"].values()))
            last = at.get("stop", line)
            steps[size] = (last["time"] - at["step"]["time"]) / (last["step"] - at["step"]["step"])
            before = at["step"]["step"] - at["start"]["step"]
            starts[size] = max(0.0, at["step"]["time"] - at["start"]["time"] - before * steps[size])
            if "stop" in at:
                leaves.append(line["time"] - at["stop"]["time"])
            at.clear()
    return Costs(starts, steps, fmean(leaves))


def _until(folder: ClusterFolder, name: str, what: Callable[[dict[str, Any]], bool], seconds: float = 300.0) -> None:
    until = time.time() + seconds
    while not any(job["name"] == name and what(job) for job in cluster.status(folder.place)["jobs"]):
        if time.time() > until:
            raise RuntimeError(f"it does not come to that: {cluster.status(folder.place)}")
        time.sleep(0.2)


# -- the live run -----------------------------------------------------------------------------------------------------
def _live(folder: ClusterFolder, say: Say) -> tuple[float, float]:
    """Submits, resizes and kills as planned; when it began, and when the node died."""
    # Whole periods, so that rounds here are those of the replay.
    begin = (time.time() // PERIOD + 2) * PERIOD
    death = [0.0]
    events: list[tuple[float, Callable[[], Any]]] = [(job.time, lambda job=job: _submit(folder, job)) for job in JOBS]
    events.append((1.0, lambda: _submit_real(folder, REAL, 2, REAL_STEPS)))
    events += [(when, lambda size=size: cluster.resize(REAL, size, folder.place)) for when, size in RESIZES]
    events.append((DIES, lambda: death.__setitem__(0, _kill_node(DEAD))))
    threads = [threading.Timer(begin + when - time.time(), _told, (what, say)) for when, what in events]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in (*(job.name for job in JOBS), REAL):
        _until(folder, name, lambda job: job["status"] in ("done", "failed"), 900)
    return begin, death[0]


def _told(what: Callable[[], Any], say: Say) -> None:
    try:
        what()
    except Exception as error:
        say(f"  {type(error).__name__}: {error}")
        raise


def _submit(folder: ClusterFolder, job: LiveJob, devices: str | int = "1:8") -> None:
    path = folder.place / f"{job.name}.csv"
    lines = [f"{speed.devices},{speed.samples_per_second}" for speed in job.speeds()]
    path.write_text("\n".join(["devices,samples_per_second", *lines, ""]))
    seconds = json.dumps({str(size): job.seconds_of_step(size) for size in SIZES})
    crash = () if job.crash is None else (f"assert step < {job.crash}, 'it crashes'",)
    cluster.submit(
        str(HERE / "waiting.py"), steps=job.steps, devices=devices if job.crash is None else 1, name=job.name,
        speeds=path, arguments=(str(Path(cjax.__file__).parent), seconds, *crash), cluster=folder.place,
    )  # fmt: skip


def _submit_real(folder: ClusterFolder, name: str, devices: int, steps: int) -> None:
    plans, rows = folder.place / f"{name}.csv", Waves().batch_size
    plans.write_text(f"devices,samples_per_second,plan\n2,{rows / PAUSE},data=2\n4,{rows / PAUSE},data=2 tensor=2\n")
    cluster.submit(
        str(HERE / "training.py") + ":make", steps=steps, devices=devices, name=name, speeds=plans,
        arguments=(str(PAUSE),), cluster=folder.place,
    )  # fmt: skip


def _kill_node(name: str) -> float:
    """Ends the process that a node of Ray is."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if f"--node-name={name}" in path.read_bytes().decode(errors="replace").split("\0"):
            os.kill(int(path.parent.name), signal.SIGKILL)
            return time.time()
    raise RuntimeError(f"no process is {name}")


def _facts(folder: ClusterFolder, name: str) -> dict[str, Any]:
    submitted = read_object(folder.job(name).submitted) or {}
    return (read_object(folder.job(name).state) or {}) | {"submitted": submitted["time"], "name": name}


def _losses(folder: ClusterFolder) -> dict[str, str]:
    """Whether every job's losses are those of a run that nobody disturbed."""
    said = {}
    for job in JOBS:
        wanted = undisturbed(job.steps if job.crash is None else job.crash - 1)
        lines = (folder.job(job.name).run.run / "losses").read_text().splitlines()
        if job.crash is not None:
            lines = list(dict.fromkeys(lines))
        said[job.name] = "the same" if lines == wanted else f"{len(lines)} steps of {len(wanted)}, or others"
    moved, still = (_metrics(folder, name) for name in (REAL, STILL))
    common = sorted(moved.keys() & still.keys())
    apart = max(abs(moved[step] - still[step]) / still[step] for step in common)
    said[REAL] = f"{len(common)} of them, {apart:.1e} apart at most"
    return said


def _metrics(folder: ClusterFolder, name: str) -> dict[int, float]:
    lines = read_lines(folder.job(name).run.run / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


# -- the replay -------------------------------------------------------------------------------------------------------
def _replayed(facts: dict[str, dict[str, Any]], seen: Measured, begin: float, death: float) -> Replayed:
    """The same jobs, submitted when they were, resized as planned, a node gone when it was; what starts, stops and
    crashes cost, as it was measured before."""
    submissions = []
    for job in JOBS:
        model, when = OwnModel(job.name, job.speeds(), float(job.steps)), facts[job.name]["submitted"] - begin
        fails = None if job.crash is None else (job.crash - 1) * job.step + seen.crash
        most = SIZES[-1] if job.crash is None else 1
        costs = seen.waiting
        submissions.append(
            Submission(job.name, when, model, 1, 1.0, 1, most, costs.change, costs.starts, costs.leaves, fails)
        )
    costs, sizes = seen.real, tuple((when, size, size) for when, size in RESIZES)
    model = OwnModel(REAL, tuple(Speed(size, 1 / seconds) for size, seconds in costs.steps.items()), float(REAL_STEPS))
    when = facts[REAL]["submitted"] - begin
    submissions.append(
        Submission(REAL, when, model, 2, 1.0, 2, 2, costs.change, costs.starts, costs.leaves, ranges=sizes)
    )
    setting = setting_of("goodput", NODES)
    return simulate(submissions, NODES, setting, period=PERIOD, restart=RESTART, deaths={DEAD: death - begin})


def _as_replayed(history: Sequence[dict[str, Any]], facts: dict[str, dict[str, Any]], begin: float) -> Replayed:
    """What was, as a replay has it, to be drawn."""
    open_: dict[str, dict[str, Any]] = {}
    holdings = []
    for line in history:
        if line["event"] == "start":
            open_[line["job"]] = line
        elif line["event"] == "end" and line["job"] in facts and line["job"] in open_:
            start = open_.pop(line["job"])
            placement = {node: tuple(devices) for node, devices in start["placement"].items()}
            holdings.append(Holding(line["job"], placement, start["time"] - begin, line["time"] - begin))
    seconds = {name: fact["ended"] - fact["submitted"] for name, fact in facts.items()}
    return Replayed(seconds, max(h.end for h in holdings), 0.0, 0.0, {}, tuple(holdings))


def _rows(facts: dict[str, dict[str, Any]], outcome: Replayed, same: dict[str, str]) -> list[list[str]]:
    rows, lived, replayed = [], [], []
    for name, fact in facts.items():
        live = fact["ended"] - fact["submitted"]
        said = outcome.seconds[name]
        lived.append(live)
        replayed.append(said)
        times = f"{live:.1f}", f"{said:.1f}", f"{live / said - 1:+.1%}"
        rows.append([name, fact["status"], f"{fact['starts']}", *times, same[name]])
    mean = np.mean(lived), np.mean(replayed)
    rows.append(["mean", "", "", f"{mean[0]:.1f}", f"{mean[1]:.1f}", f"{mean[0] / mean[1] - 1:+.1%}", ""])
    return rows


HEAD = ("job", "ended", "starts", "live, s", "replayed, s", "apart", "losses beside an undisturbed run")
