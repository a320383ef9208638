"""What a supervisor keeps, so that another one can go on where it was killed."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cjax.job.beat import read_beat
from cjax.job.files import read_object
from cjax.job.folder import JobFolder
from cjax.job.spec import JobSpec


@dataclass
class JobState:
    """How far a job is.

    Attributes:
        spec: the job, as it was typed last.
        size: how many workers it is to have, after the last resize.
        incarnation: which start of workers these are.
        next: that of those who get ready to follow them; 0 where there are none.
        leaving: that of those who have kept what they had, and end; 0 where there are none.
        started: the highest number that any start was given, so that no number is given twice.
        restarts: how often since the job was typed, after a failure.
        fruitless: how many of the last starts brought no new step.
        lost: places at which no worker comes to life.
        pids: of the workers, of those who get ready, and of those who leave, each with the time of its start.
        resize: what became of the last one that was asked for, if it is not done.
        status: "running", "done", "failed" or "stopped".
    """

    folder: str
    spec: dict[str, Any]
    size: int
    incarnation: int = 0
    next: int = 0
    leaving: int = 0
    started: int = 0
    restarts: int = 0
    fruitless: int = 0
    lost: list[str] = field(default_factory=list)
    pids: list[list[Any]] = field(default_factory=list)
    resize: str = ""
    status: str = "new"

    @staticmethod
    def of(folder: JobFolder, spec: JobSpec) -> "JobState":
        """That of a job that is typed, again or for the first time. A size that was asked for since is kept."""
        told = json.loads(spec.text())
        found = read_object(folder.state)
        if found is None:
            return JobState(spec.folder, told, spec.workers)
        known = JobState(**{each.name: found[each.name] for each in fields(JobState) if each.name in found})
        if known.spec.get("workers") != spec.workers or known.spec.get("hosts") != told["hosts"]:
            known.size, known.lost = spec.workers, []
        known.spec, known.folder = told, spec.folder
        known.restarts = known.fruitless = 0
        return known

    @property
    def places(self) -> tuple[str, ...]:
        """Where workers are to be."""
        return self.places_of(self.size)

    def places_of(self, size: int) -> tuple[str, ...]:
        """Where so many would be."""
        hosts = tuple(self.spec["hosts"])
        return hosts[:size] if hosts else tuple(str(number) for number in range(size))

    def new_number(self) -> int:
        """One that no start was given yet."""
        self.started = max(self.started, self.incarnation) + 1
        return self.started

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def last_facts(self) -> dict[str, Any]:
        """What workers said last whom nobody watched to their end."""
        folder = JobFolder(Path(self.folder))
        found = [read_beat(folder.beat(self.incarnation, rank)) for rank in range(len(self.places))]
        beats = [beat for beat in found if beat and beat["first"] is not None]
        first = max((beat["first"] for beat in beats), default=None)
        steps = [beat["step"] for beat in beats if beat["step"] is not None]
        seconds = beats[0]["seconds"] if beats else {}
        return {"first": first, "step": max(steps, default=first), "seconds": seconds}
