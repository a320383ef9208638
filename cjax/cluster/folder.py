"""What a cluster keeps on disk: how it was started, and a folder for each job."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cjax.job.files import read_object
from cjax.job.folder import JobFolder
from cjax.job.lock import is_locked

VARIABLE = "CJAX_CLUSTER"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ClusterJobFolder:
    """Of one job.

    Attributes:
        place: the folder.
    """

    place: Path

    @property
    def submitted(self) -> Path:
        """What was submitted. Its environment is in it: nobody else reads it."""
        return self.place / "submitted.json"

    @property
    def wish(self) -> Path:
        """What its user asks for since."""
        return self.place / "wish.json"

    @property
    def state(self) -> Path:
        """What the service knows of it."""
        return self.place / "state.json"

    @property
    def said(self) -> Path:
        """What was said about its workers: deaths, hangs, restarts."""
        return self.place / "supervisor.log"

    @property
    def run(self) -> JobFolder:
        """That of its run, which is its own."""
        return JobFolder(self.place / "run")


@dataclass(frozen=True)
class ClusterFolder:
    """Of a cluster.

    Attributes:
        place: the folder.
    """

    place: Path

    @staticmethod
    def of(given: str | Path | None) -> "ClusterFolder":
        """The one that was named, or that CJAX_CLUSTER names; the user's own, if neither does."""
        if given is None and not (given := os.environ.get(VARIABLE)):
            given = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cjax" / "cluster"
        return ClusterFolder(Path(given).absolute())

    @property
    def settings(self) -> Path:
        """How it was started, and by which process."""
        return self.place / "cluster.json"

    @property
    def status(self) -> Path:
        """What all jobs do, written once a second."""
        return self.place / "status.json"

    @property
    def history(self) -> Path:
        """A line for each start of a job on devices, its first step there, when it is told to leave, and its end."""
        return self.place / "history.jsonl"

    @property
    def log(self) -> Path:
        """What the service prints."""
        return self.place / "service.log"

    @property
    def jobs(self) -> Path:
        return self.place / "jobs"

    def job(self, name: str) -> ClusterJobFolder:
        return ClusterJobFolder(self.jobs / name)

    @property
    def is_alive(self) -> bool:
        """Whether its service runs."""
        return is_locked(self.place)

    def alive(self) -> dict[str, Any]:
        """Its settings.

        Raises:
            RuntimeError: its service does not run.
        """
        found = read_object(self.settings)
        if found is None or not self.is_alive:
            gone = "the cluster of" if found else "no cluster was started in"
            ended = " is gone" if found else ""
            raise RuntimeError(
                f"{gone} {self.place}{ended}: type cjax cluster start --cluster {self.place}"
                + (", and its jobs go on where they were" if found else "")
            )
        return found

    def known(self, name: str) -> ClusterJobFolder:
        """The folder of a job that was submitted.

        Raises:
            ValueError: there is none of this name.
        """
        job = self.job(name)
        if not _NAME.fullmatch(name) or not job.submitted.exists():
            names = sorted(each.parent.name for each in self.jobs.glob("*/submitted.json"))
            there = f"there are {', '.join(names)}" if names else "none was submitted"
            raise ValueError(f"the cluster in {self.place} has no job {name!r}; {there}")
        return job


def check_name(name: str) -> None:
    """Raises ValueError for a name that no folder should have."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--name {name!r}: it is of letters, digits, '.', '-' and '_', begins with a letter or a digit, and is of "
            "64 at most"
        )
