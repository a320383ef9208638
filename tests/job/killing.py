"""A job whose processes are killed with -9 again and again, at moments drawn from a seed; and what must be true then.

    python tests/job/killing.py --kills 200 --seed 0 --steps 1500 --folder FOLDER --log FILE
    python tests/job/killing.py --between 300 --pause 1.5 --every auto --steps 2000 --folder FOLDER --log FILE

Each kill is of a worker, of the first worker, at which all others meet, or of the supervisor, which is then started
again as it was typed. Its moment is in one of PHASES: behind a random time from when the victim is first seen in it.
With --between there is a kill every so many seconds instead, whatever the job does then. With --resizes, that share of
what happens to it are resizes, to all of its workers or to one; with --plans each start takes the next of these.
"""

import argparse
import collections
import contextlib
import datetime
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cjax.job.beat import read_beat
from cjax.job.files import read_lines, read_object
from cjax.job.folder import JobFolder
from cjax.job.spec import JobSpec, start_line
from cjax.job.status import ask_for, status_of

SCRIPT = Path(__file__).with_name("train.py")
# The phase of a beat, or what lies in the folder of checkpoints; and how long after it is seen at most.
PHASES = {
    "importing": 2.0,  # before the first beat
    "starting": 1.0,  # joining, tracing, and where nothing was kept the first parameters
    "restoring": 0.4,
    "compiling": 0.5,
    "training": 1.5,
    "evaluating": 0.1,
    "saving": 0.1,
    "snapshotting": 0.02,  # what a process holds is written into host memory; where the job makes snapshots
    "renaming": 0.05,  # a checkpoint is written behind the training's back, described, and gets its name
}
WHO = ("worker", "first worker", "supervisor")
FAR = {"float64": 1e-9, "float32": 1e-4}  # of final parameters, where other plans round otherwise on the way
PATIENCE = 300.0  # seconds to wait for a phase


@dataclass
class Killing:
    """A job and its killer.

    Attributes:
        folder: of the run.
        seed: of all moments and victims.
        workers: of the job.
        steps: of the run.
        pause: seconds that a batch takes, so that steps have a length.
        every: steps between checkpoints, or "auto".
        snapshots: steps between snapshots; 0 for none.
        between: seconds between kills; 0 for one as soon as the job comes to a phase that is drawn.
        phases: in which processes are killed.
        plan: of the program, on two devices at first; or several, between `|`, each start the next one.
        resizes: the share of resizes among all that happens to the job.
        devices: of all workers at first.
        is_double: train in float64.
        hosts_are_lost: what a killed worker held in memory goes with it, snapshots included; a peer has them.
        spare: processes wait to take over.
    """

    folder: Path
    seed: int = 0
    workers: int = 2
    steps: int = 60
    pause: float = 0.02
    every: int | str = 5
    between: float = 0.0
    snapshots: int = 0
    phases: tuple[str, ...] = tuple(PHASES)
    plan: str = "data=2"
    resizes: float = 0.0
    devices: int = 2
    is_double: bool = False
    hosts_are_lost: bool = False
    spare: bool = False
    kills: list[dict[str, Any]] = field(default_factory=list)
    farthest: float = 0.0

    def __post_init__(self) -> None:
        if not self.snapshots:
            self.phases = tuple(phase for phase in self.phases if phase != "snapshotting")
        self.job, self._random, self._supervisor = JobFolder(self.folder), random.Random(self.seed), None
        self._due = 0.0

    def run(self, num_kills: int, seconds: float = float("inf")) -> int:
        """Kills so often, or for so long, or until the job is done; then lets it end. Its exit status."""
        self._start()
        until = time.monotonic() + seconds
        self._due = time.monotonic() + self.between
        while len(self.kills) < num_kills and time.monotonic() < until and self._kill_one():
            pass
        while True:
            status = self._supervisor.wait()
            if status != -signal.SIGKILL:
                return status
            self._start()

    def _start(self) -> None:
        command = (sys.executable, str(SCRIPT), str(self.steps), str(self.pause), self.plan, str(self.every))
        command += (f"{self.snapshots}{':peers' * self.hosts_are_lost}",)
        spec = JobSpec(
            command, str(self.folder), self.workers, restarts=10**6, fruitless=10**6,
            devices=self.devices // self.workers, hang_after=60.0, grace=30.0, spare=self.spare,
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_ENABLE_X64": str(int(self.is_double))}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        with open(self.folder / "supervisor.log", "ab") as log:
            self._supervisor = subprocess.Popen(start_line(spec), stdout=log, stderr=log, env=environment)

    def _kill_one(self) -> bool:
        """Whether there was anybody to kill."""
        who, phase = self._random.choice(WHO), self._random.choice(self.phases)
        after = self._random.uniform(0.0, PHASES[phase])
        rank = self._random.randrange(1, self.workers) if who == "worker" and self.workers > 1 else 0
        if self.resizes and self._random.random() < self.resizes:
            who = "resize"
        if self.resizes and len((read_object(self.job.state) or {}).get("pids") or [0]) <= rank:
            rank = 0  # there is one at present
        if self.between:
            phase = "whatever comes"
            if not self._await_due():
                return False
        elif not self._await(phase, rank):
            return self._supervisor.poll() is None
        else:
            time.sleep(after)
        state, beat = read_object(self.job.state) or {}, self._beat(rank)
        pids = [pid for pid, _ in state.get("pids") or []]
        pid = self._supervisor.pid if who == "supervisor" else pids[rank] if rank < len(pids) else 0
        saved = self.saved()
        if not pid or self._supervisor.poll() is not None:
            return self._supervisor.poll() is None
        try:
            if who == "resize":
                ask_for(self.folder, 1 if state["size"] > 1 else self.workers)
                self._kill_while_others_get_ready()
            else:
                os.kill(pid, signal.SIGKILL)
                # Not a second one before what the first held is there again, and kept twice.
                is_whole = beat is not None and beat["first"] is not None
                if self.hosts_are_lost and who != "supervisor" and is_whole:
                    shutil.rmtree(self.folder / f"memory-{rank}", ignore_errors=True)
        except (ProcessLookupError, RuntimeError):  # it ended just now
            return True
        self.kills.append({
            "who": who, "in": phase, "after": round(after, 3), "incarnation": state.get("incarnation"), "saved": saved,
            "step": (beat or {}).get("step"), "was": (beat or {}).get("phase"),
        })  # fmt: skip
        if who == "supervisor":
            self._supervisor.wait()
            self._start()
        # Whoever watches has seen it, and what comes next is not the same incarnation.
        while (now := read_object(self.job.state) or {}).get("incarnation") == state.get("incarnation"):
            if self._supervisor.poll() is not None:
                return False
            if who == "resize" and "has failed" in now.get("resize", ""):
                break  # and the present ones go on
            time.sleep(0.01)
        return True

    def _kill_while_others_get_ready(self) -> None:
        """Half of the times, of those who train, those who get ready, and whoever watches."""
        who, after = self._random.choice(("nobody", "worker", "new worker", "supervisor")), self._random.uniform(0, 5)
        if who == "nobody":
            return
        time.sleep(after)
        state = read_object(self.job.state) or {}
        pids = [pid for pid, _ in state.get("pids") or []]
        old, new = pids[: state.get("size", 0)], pids[state.get("size", 0) :]
        victims = {"supervisor": [self._supervisor.pid], "worker": old, "new worker": new}[who]
        pid = self._random.choice(victims or [0])
        if not pid or self._supervisor.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        beat = self._beat(0) or {}
        self.kills.append({
            "who": who, "in": "a resize", "after": round(after, 3), "incarnation": state["incarnation"],
            "saved": self.saved(), "step": beat.get("step"), "was": beat.get("phase"),
        })  # fmt: skip
        if who == "supervisor":
            self._supervisor.wait()
            self._start()

    def _await(self, phase: str, rank: int) -> bool:
        """Whether a worker came to a phase."""
        until = time.monotonic() + PATIENCE
        while not self._is_in(phase, rank):
            if self._supervisor.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def _await_due(self) -> bool:
        """Whether the job still runs when the next kill is due."""
        while time.monotonic() < self._due:
            if self._supervisor.poll() is not None:
                return False
            time.sleep(0.05)
        self._due += self.between
        return True

    def stop(self, phase: str) -> int:
        """Starts the job, and tells it to stop in a phase of its first worker; its exit status."""
        self._start()
        assert self._await(phase, 0), phase
        self._supervisor.terminate()
        return self._supervisor.wait()

    def _beat(self, rank: int) -> dict[str, Any] | None:
        state = read_object(self.job.state) or {}
        return read_beat(self.job.beat(state.get("incarnation", 0), rank))

    def _is_in(self, phase: str, rank: int) -> bool:
        beat = self._beat(rank)
        if phase == "importing":
            return beat is None and bool((read_object(self.job.state) or {}).get("pids"))
        if phase == "snapshotting":
            place = (read_object(self.folder / "snapshots.json") or {}).get("place", "nowhere")
            if self.hosts_are_lost:
                place = self.folder / f"memory-{rank}" / Path(place).name
            return any(Path(place).glob(f".*-{rank}.*.unfinished"))
        if phase == "renaming":
            return any((self.folder / "checkpoints").glob("*.unfinished"))
        return beat is not None and (beat["phase"] == phase or (phase == "restoring" and beat["phase"] == "compiling"))

    def saved(self) -> int:
        """The step of the last whole checkpoint; 0 where there is none."""
        found = (self.folder / "checkpoints").glob("*/checkpoint.json")
        return max((int(each.parent.name) for each in found if each.parent.name.isdecimal()), default=0)

    def check(self, wanted: Path) -> list[str]:
        """What is not as it must be, against the final parameters of a run that nobody killed."""
        lines = read_lines(self.job.history)
        firsts = {line["incarnation"]: line["first"] for line in lines if line["event"] == "end"}
        problems = []
        for kill in self.kills:
            later = [first for number, first in firsts.items() if number > kill["incarnation"] and first is not None]
            if kill["who"] == "resize" and kill["incarnation"] == max(firsts):
                continue  # the last steps were done before others were ready to take over
            if not later or later[0] < kill["saved"]:
                problems.append(f"{kill}: goes on from {later[:1]}, which loses committed steps")
            # One interval, and one more that was on its way. (Of a new start nothing is known at first.)
            elif self.snapshots and kill["who"] != "supervisor" and (kill["step"] or 0) - later[0] > 2 * self.snapshots:
                problems.append(f"{kill}: goes on from {later[0]}, more than two snapshots before")
            elif self.snapshots and later[0] < (firsts.get(kill["incarnation"]) or 0):
                problems.append(
                    f"{kill}: goes on from {later[0]}, before {firsts[kill['incarnation']]}, as it had before"
                )
        final, whole = (np.load(place / "final.npz") for place in (self.folder, wanted))
        atol = 0.0 if self.resizes == 0 else FAR[final["['seen']"].dtype.name]
        far = {name: float(np.max(np.abs(final[name] - whole[name]))) for name in whole}
        self.farthest = max(far.values())
        problems += [f"{name} differs by {by:g}" for name, by in far.items() if not by <= atol]
        problems += seen_otherwise(final["['seen']"], self.steps)
        return problems


def seen_otherwise(seen: np.ndarray, steps: int, batch: int = 8) -> list[str]:
    """Samples that were not in the batches of so many steps exactly once each; `seen` counts downwards."""
    order = np.random.default_rng(0).permutation(len(seen))
    wanted = np.zeros(len(seen), seen.dtype)
    wanted[order[: steps * batch]] = -1
    return [f"sample {i} was seen {-seen[i]:g} times" for i in np.flatnonzero(seen != wanted)[:5]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--between", type=float, default=0.0, help="seconds between kills")
    parser.add_argument("--phases", nargs="+", choices=[*PHASES], default=[*PHASES], help="in which to kill")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that a batch takes")
    parser.add_argument("--snapshots", type=int, default=0, help="steps between snapshots; 0 for none")
    parser.add_argument("--plans", default="data=2", help="a plan, or several between |, each start the next one")
    parser.add_argument("--resizes", type=float, default=0.0, help="the share of resizes among all that happens")
    parser.add_argument("--devices", type=int, default=2, help="of all workers at first")
    parser.add_argument("--lose", action="store_true", help="each worker is a host whose memory goes with it")
    parser.add_argument("--spare", action="store_true", help="processes wait to take over")
    parser.add_argument("--double", action="store_true", help="float64")
    parser.add_argument("--every", default="5", help="steps between checkpoints, or auto")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    more = {"devices": options.devices, "is_double": options.double}
    whole = Killing(
        options.folder / "whole", workers=options.workers, steps=options.steps, pause=0.0, every=100,
        plan=options.plans.split("|")[0], **more,
    )  # fmt: skip
    status = whole.run(0)
    begin = time.time()
    killed = Killing(
        options.folder / "killed", options.seed, options.workers, options.steps, options.pause, options.every,
        options.between, options.snapshots, tuple(options.phases), options.plans, options.resizes,
        hosts_are_lost=options.lose, spare=options.spare, **more,
    )  # fmt: skip
    status = killed.run(options.kills, options.minutes * 60) or status
    problems = killed.check(whole.folder) if not status else [f"it ended with status {status}"]
    text = report(killed, options, problems, time.time() - begin)
    print(text)
    if options.log:
        options.log.write_text(text + "\n")
    return bool(problems)


def report(killed: Killing, options: argparse.Namespace, problems: list[str], wall: float) -> str:
    by = collections.Counter(f"{kill['who']}, {kill['in']}" for kill in killed.kills)
    whole, size = "those of a run that nobody killed", f"within {killed.farthest:.2g}"
    good = f"{whole}, {size if options.resizes else 'to the bit'}"
    said = {name: value for name, value in vars(options).items() if name not in ("folder", "log", "minutes")}
    typed = [
        f"--{name} {' '.join(value) if isinstance(value, list) else value}".removesuffix(" True")
        for name, value in said.items()
        if value is not False
    ]
    resizes = sum(kill["who"] == "resize" for kill in killed.kills)
    lines = [
        f"{datetime.date.today()}, tests/job/killing.py {' '.join(typed)}: {os.cpu_count()} cores, load "
        f"{os.getloadavg()[2]:.0f}, {wall:.0f} s",
        f"{len(killed.kills) - resizes} kills with -9, {resizes} resizes, {len(problems)} problems; final parameters, "
        f"and how often each sample was seen, are {good if not problems else 'NOT as they must be'}",
        *problems,
        *str(status_of(killed.folder)).splitlines()[:5],
        *(f"{number:4}  {name}" for name, number in by.items()),
        *(str(kill) for kill in killed.kills),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
