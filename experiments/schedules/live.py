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
DEAD, DIES = "node3", 107.0  # seconds after the beginning
RESIZES = ((30, 4), (90, 2))  # of the real job, by step, which begins with 2 devices: processes 1, 2 and 1 again
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

    def speeds(self) -> tuple[Speed, ...]:
        return tuple(Speed(size, size**self.power / self.step) for size in SIZES)


# Between the decisions, which are at whole multiples of PERIOD: who comes at the same moment is in time, or is not.
JOBS = (
    LiveJob("long", 1.0, 320.0, 0.9),
    LiveJob("narrow", 2.0, 120.0, 0.5),
    LiveJob("crash", 12.0, 60.0, 0.9, crash=30),
    LiveJob("second", 52.0, 160.0, 0.85),
    LiveJob("short", 67.0, 50.0, 0.8),
    LiveJob("late", 87.0, 140.0, 0.9),
    LiveJob("last", 122.0, 70.0, 0.7),
)


def run(say: Say, out: Path, executor: str = "ray") -> list[list[str]]:
    """Lives, replays, and compares; rows of a table."""
    with tempfile.TemporaryDirectory() as place:
        folder = ClusterFolder(Path(place) / "cluster")
        cluster.start(NODES, executor=executor, period=PERIOD, restart=RESTART, grace=30.0, cluster=folder.place)
        try:
            begin, death = _live(folder, say)
            facts = {name: _facts(folder, name) for name in (*(job.name for job in JOBS), REAL)}
            same = _losses(folder, say)
            history = read_lines(folder.history)
        finally:
            if folder.is_alive:
                cluster.stop(cluster=folder.place)
        time.sleep(2.0)
        left = processes_of(Path(place))
    say(f"  processes left behind: {left or 'none'}; in /dev/shm: {os.listdir('/dev/shm') or 'nothing'}")
    for line in history:
        say("  " + json.dumps(line | {"time": round(line["time"] - begin, 2)}))
    outcome = _replayed(facts, history, begin, death)
    (out / "live.svg").write_text(gantt_of(_as_replayed(history, facts, begin), NODES))
    (out / "live-replayed.svg").write_text(gantt_of(outcome, NODES))
    return _rows(facts, outcome, same, begin)


def _live(folder: ClusterFolder, say: Say) -> tuple[float, float]:
    """Submits, resizes and kills as planned; when it began, and when the node died."""
    plans = folder.place / "real.csv"
    plans.write_text("devices,samples_per_second,plan\n2,100,data=2\n4,110,data=2 tensor=2\n")
    # Whole periods, so that rounds here are those of the replay.
    begin = (time.time() // PERIOD + 2) * PERIOD
    death = [0.0]
    events: list[tuple[float, Callable[[], Any]]] = [(job.time, lambda job=job: _submit(folder, job)) for job in JOBS]
    real = str(HERE / "training.py") + ":make"
    more = {"steps": REAL_STEPS, "speeds": plans, "arguments": (str(PAUSE),), "cluster": folder.place}
    events.append((1.0, lambda: cluster.submit(real, devices=2, name=REAL, **more)))
    events.append((2.0, lambda: _resize(folder)))
    events.append((DIES, lambda: death.__setitem__(0, _kill_node(DEAD))))
    threads = [threading.Timer(begin + when - time.time(), _told, (what, say)) for when, what in events]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.time() + 600
    while any(job["status"] not in ("done", "failed") for job in cluster.status(folder.place)["jobs"]):
        if time.time() > until:
            raise RuntimeError(f"jobs do not end: {cluster.status(folder.place)}")
        time.sleep(1.0)
    return begin, death[0]


def _resize(folder: ClusterFolder) -> None:
    """The real job, as soon as it has come so far."""
    for step, size in RESIZES:
        while (next((j["step"] for j in cluster.status(folder.place)["jobs"] if j["name"] == REAL), 0)) < step:
            time.sleep(0.5)
        cluster.resize(REAL, size, folder.place)


def _told(what: Callable[[], Any], say: Say) -> None:
    try:
        what()
    except Exception as error:
        say(f"  {type(error).__name__}: {error}")
        raise


def _submit(folder: ClusterFolder, job: LiveJob) -> None:
    path = folder.place / f"{job.name}.csv"
    lines = [f"{speed.devices},{speed.samples_per_second}" for speed in job.speeds()]
    path.write_text("\n".join(["devices,samples_per_second", *lines, ""]))
    seconds = json.dumps({str(speed.devices): 1 / speed.samples_per_second for speed in job.speeds()})
    crash = () if job.crash is None else (f"assert step < {job.crash}, 'it crashes'",)
    cluster.submit(
        str(HERE / "waiting.py"), steps=job.steps, devices="1:8" if job.crash is None else 1, name=job.name,
        speeds=path, arguments=(str(Path(cjax.__file__).parent), seconds, *crash), cluster=folder.place,
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


def _losses(folder: ClusterFolder, say: Say) -> dict[str, str]:
    """Whether every job's losses are those of a run that nobody disturbed."""
    said = {}
    for job in JOBS:
        wanted = undisturbed(job.steps if job.crash is None else job.crash - 1)
        lines = (folder.job(job.name).run.run / "losses").read_text().splitlines()
        if job.crash is not None:
            lines = list(dict.fromkeys(lines))
        said[job.name] = "the same" if lines == wanted else f"{len(lines)} steps of {len(wanted)}, or others"
    twin = "still"
    say("  the real job again, alone and undisturbed")
    cluster.submit(
        str(HERE / "training.py") + ":make", steps=REAL_STEPS, devices=2, name=twin,
        speeds=folder.place / "real.csv", cluster=folder.place,
    )  # fmt: skip
    while _facts(folder, twin).get("status") not in ("done", "failed"):
        time.sleep(0.5)
    moved, still = (_metrics(folder, name) for name in (REAL, twin))
    common = sorted(moved.keys() & still.keys())
    apart = max(abs(moved[step] - still[step]) / still[step] for step in common)
    said[REAL] = f"{len(common)} of them, {apart:.1e} apart at most"
    return said


def _metrics(folder: ClusterFolder, name: str) -> dict[int, float]:
    lines = read_lines(folder.job(name).run.run / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


# -- the replay -------------------------------------------------------------------------------------------------------
def _replayed(
    facts: dict[str, dict[str, Any]], history: Sequence[dict[str, Any]], begin: float, death: float
) -> Replayed:
    """The same jobs, submitted when they were, a node gone when it was, and starts that cost what they did."""
    base = begin // PERIOD * PERIOD
    seen = [fact["restart"] for name, fact in facts.items() if fact.get("restart") and name != REAL]
    restart = fmean(seen) if seen else RESTART
    submissions = []
    for job in JOBS:
        work, most = float(job.steps), SIZES[-1]
        if job.crash is not None:
            # It starts three times in its place, and fails: as long as that took is its work.
            mine = (line for line in history if line["job"] == job.name)
            held = sum(line["time"] * (1 if line["event"] == "end" else -1) for line in mine)
            work, most = max(1.0, (held - restart) / job.step), 1
        model = OwnModel(job.name, job.speeds(), work)
        when = facts[job.name]["submitted"] - base
        submissions.append(Submission(job.name, when, model, 1, 1.0, 1, most))
    submissions += _stages(facts[REAL], history, base)
    setting = setting_of("goodput", NODES)
    return simulate(submissions, NODES, setting, period=PERIOD, restart=restart, deaths={DEAD: death - base})


def _stages(fact: dict[str, Any], history: Sequence[dict[str, Any]], base: float) -> list[Submission]:
    """The real job as one job for each of its sizes, submitted when it was to have that."""
    mine = [line for line in history if line["job"] == REAL]
    starts = [line for line in mine if line["event"] == "start"]
    ends = [line for line in mine if line["event"] == "end"]
    found = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        size = sum(map(len, start["placement"].values()))
        steps = max(1, end["step"] - start["step"])
        cost = max(0.0, end["time"] - start["time"] - steps * PAUSE)
        model = OwnModel(f"{REAL}-{number}", (Speed(size, 1 / PAUSE),), float(steps))
        asked = fact["submitted"] if not number else max(ends[number - 1]["time"] - PERIOD / 10, fact["submitted"])
        found.append(Submission(f"{REAL}-{number}", asked - base, model, size, 1.0, size, size, restart=cost))
    return found


def _as_replayed(history: Sequence[dict[str, Any]], facts: dict[str, dict[str, Any]], begin: float) -> Replayed:
    """What was, as a replay has it, to be drawn."""
    open_: dict[str, dict[str, Any]] = {}
    holdings = []
    for line in history:
        if line["event"] == "start":
            open_[line["job"]] = line
        elif line["job"] in facts and line["job"] in open_:
            start = open_.pop(line["job"])
            placement = {node: tuple(devices) for node, devices in start["placement"].items()}
            holdings.append(Holding(line["job"], placement, start["time"] - begin, line["time"] - begin))
    seconds = {name: fact["ended"] - fact["submitted"] for name, fact in facts.items()}
    return Replayed(seconds, max(h.end for h in holdings), 0.0, 0.0, {}, tuple(holdings))


def _rows(facts: dict[str, dict[str, Any]], outcome: Replayed, same: dict[str, str], begin: float) -> list[list[str]]:
    rows, lived, replayed = [], [], []
    for name, fact in facts.items():
        live = fact["ended"] - fact["submitted"]
        stages = [job for job in outcome.seconds if job == name or job.startswith(f"{name}-")]
        ends = [holding.end for holding in outcome.holdings if holding.job in stages]
        base = begin // PERIOD * PERIOD
        said = max(ends) - (fact["submitted"] - base)
        lived.append(live)
        replayed.append(said)
        times = f"{live:.1f}", f"{said:.1f}", f"{live / said - 1:+.1%}"
        rows.append([name, fact["status"], f"{fact['starts']}", *times, same[name]])
    mean = np.mean(lived), np.mean(replayed)
    rows.append(["mean", "", "", f"{mean[0]:.1f}", f"{mean[1]:.1f}", f"{mean[0] / mean[1] - 1:+.1%}", ""])
    return rows


HEAD = ("job", "ended", "starts", "live, s", "replayed, s", "apart", "losses beside an undisturbed run")
