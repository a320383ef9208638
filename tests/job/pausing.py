"""How long a job stands still when a worker is killed, and when it is resized: seconds, and CPU seconds of a worker.

    python tests/job/pausing.py --folder FOLDER --log FILE

A small GPT (`cjax train gpt-mini`, 8 rows of 64 tokens) on two workers of one virtual device each. From the kill, or
where it is resized from the last step of the present workers, to the first step of the next ones, as their beats say.
To be run where nothing else is.
"""

import argparse
import dataclasses
import datetime
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cjax.job.beat import READY, read_beat
from cjax.job.files import read_object
from cjax.job.folder import JobFolder
from cjax.job.spec import JobSpec, start_line
from cjax.job.status import ask_for

TRAIN = "import sys; from cjax.cli import main; sys.exit(main())"
OPTIONS = "--batch 8 --seq 64 --steps 100000 --checkpoint-every 50 --snapshot-every 5 --evaluate-every 100000"
TICKS = os.sysconf("SC_CLK_TCK")


class Job:
    """One that is watched at each hundredth of a second."""

    def __init__(self, folder: Path, spare: bool = False) -> None:
        self.folder = JobFolder(folder)
        command = (sys.executable, "-c", TRAIN, "train", "gpt-mini", *OPTIONS.split(), "--plan", "zero=1")
        spec = JobSpec(command, str(folder), 2, devices=1, hang_after=60.0, spare=spare)
        self.spare = spare
        folder.mkdir(parents=True)
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        with open(folder / "supervisor.log", "wb") as log:
            self.supervisor = subprocess.Popen(start_line(spec), stdout=log, stderr=log, env=environment)

    @property
    def state(self) -> dict[str, Any]:
        return read_object(self.folder.state) or {"incarnation": 0, "pids": []}

    def steps(self, incarnation: int, number: int) -> dict[str, Any]:
        """Waits until the first worker of an incarnation has done so many steps; its beat then."""
        while True:
            assert self.supervisor.poll() is None, (self.folder.run / "supervisor.log").read_text()[-2000:]
            beat = read_beat(self.folder.beat(incarnation, 0))
            if beat and beat["step"] is not None and beat["step"] - beat["first"] >= number:
                return beat
            time.sleep(0.01)

    def after(self, how: Callable[["Job"], None]) -> "Pause":
        """What follows on what `how` does."""
        number = self.state["incarnation"]
        self.steps(number, 12)
        before = {pid: cpu(pid) for pid in self.spares()} if self.spare else {}
        watching = cpu(self.supervisor.pid)
        asked = stepped = time.monotonic()
        how(self)
        last = None
        while self.state["incarnation"] == number:
            beat = read_beat(self.folder.beat(number, 0))
            if beat and beat["step"] != last:
                last, stepped = beat["step"], time.monotonic()
            time.sleep(0.01)
        turn = time.monotonic()
        beat = self.steps(self.state["incarnation"], 1)
        done = time.monotonic()
        pids = [pid for pid, _ in self.state["pids"][: self.state["size"]]]  # others leave
        taken = statistics.mean(cpu(pid) - before.get(pid, 0.0) for pid in pids)
        begun = asked if how is Job.kill else stepped
        return Pause(
            done - begun, done - asked, turn - begun, taken, cpu(self.supervisor.pid) - watching, beat["seconds"]
        )

    def spares(self) -> list[int]:
        """Waits until all that the first two are to have wait for their turn."""
        while True:
            beats = [read_beat(self.folder.beat(self.state.get("next", 0), rank)) for rank in range(2)]
            if all(beat and beat["phase"] == READY for beat in beats):
                return [pid for pid, _ in self.state["pids"][2:]]
            time.sleep(0.1)

    def kill(self) -> None:
        os.kill(self.state["pids"][1][0], 9)


@dataclasses.dataclass
class Pause:
    """How long no step was done, in seconds.

    Attributes:
        wall: of the pause.
        asked: from the kill, or the request.
        leaving: until it was the turn of the next workers.
        cpu: of a worker, from its start, or of a spare from the kill, to its first step.
        watching: CPU seconds of the supervisor.
        parts: what the first worker did in its turn.
    """

    wall: float
    asked: float
    leaving: float
    cpu: float
    watching: float
    parts: dict[str, float]

    def __str__(self) -> str:
        parts = {"leaving": self.leaving, **self.parts}
        return (
            f"pause {self.wall:5.1f} s, {self.asked:5.1f} s from the request; CPU {self.cpu:5.1f} s a worker, "
            f"{self.watching:.1f} s of the supervisor  {said(parts)}"
        )


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def floor() -> float:
    """CPU seconds of a Python that imports what a worker does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import cjax.cli.train"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    least = min(floor() for _ in range(2))
    lines = [
        f"{datetime.date.today()}, tests/job/pausing.py: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"floor: importing alone takes a process {least:.1f} CPU seconds",
    ]
    plain, spared = options.folder / "plain", options.folder / "spared"
    lines += paused(Job(plain), [
        *[("worker killed, compiled before", Job.kill)] * 3,
        ("resized 2 to 1, nothing compiled", lambda _: ask_for(plain, 1)),
        ("resized 1 to 2, compiled before", lambda _: ask_for(plain, 2)),
        ("resized 2 to 1, compiled before", lambda _: ask_for(plain, 1)),
        ("resized 1 to 2, stopping first", lambda _: ask_for(plain, 2, stop_first=True)),
    ])  # fmt: skip
    lines += paused(Job(spared, spare=True), [("worker killed, with spares", Job.kill)] * 3)
    text = "\n".join(lines)
    print(text)
    if options.log:
        options.log.write_text(text + "\n")
    return 0


def paused(job: Job, events: Sequence[tuple[str, Callable[[Job], None]]]) -> list[str]:
    try:
        first = job.steps(1, 1)["seconds"]
        lines = [f"{'start, nothing compiled':34} CPU {cpu(job.state['pids'][0][0]):5.1f} s a worker  {said(first)}"]
        for name, how in events:
            lines.append(f"{name:34} {job.after(how)}")
            print(lines[-1], flush=True)
    finally:
        job.supervisor.terminate()
        job.supervisor.wait()
    return lines


def said(seconds: dict[str, float]) -> str:
    return "(" + ", ".join(f"{phase} {taken:.1f}" for phase, taken in seconds.items() if taken >= 0.05) + ")"


if __name__ == "__main__":
    sys.exit(main())
