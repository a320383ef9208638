"""Which worker of which job this process is, as its supervisor told it in the environment."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cjax.job.files import read_object
from cjax.job.folder import JobFolder

AGAIN = 75  # EX_TEMPFAIL: nothing is wrong; what was stopped goes on when it is started again
JOB, INCARNATION, SUPERVISOR, AHEAD = "CJAX_JOB", "CJAX_INCARNATION", "CJAX_SUPERVISOR", "CJAX_AHEAD"
BEFORE_DEVICES, BEFORE_STATE = "initialize", "fit"  # where a worker that is started ahead waits for its turn


class SupersededError(Exception):
    """The job has gone on without this process."""


@dataclass(frozen=True)
class Member:
    """A worker.

    Attributes:
        folder: of the run.
        incarnation: how often the job's workers had been started by then, this start included.
        rank: which worker it is.
        supervisor: the process that started it; 0 where that is on another host.
        waits: where it waits for its turn, if it was started while the workers before it train; else empty.
    """

    folder: Path
    incarnation: int
    rank: int
    supervisor: int
    waits: str = ""

    @staticmethod
    def of(environment: Mapping[str, str]) -> "Member | None":
        """The worker that an environment is of; None if it is of no job."""
        if JOB not in environment:
            return None
        incarnation, rank, supervisor = (int(environment.get(name, 0)) for name in (INCARNATION, "RANK", SUPERVISOR))
        return Member(Path(environment[JOB]), incarnation, rank, supervisor, environment.get(AHEAD, ""))

    @property
    def is_current(self) -> bool:
        """Whether the job's workers are those of this incarnation: they alone train, and name what they keep."""
        return self.incarnation == self.told()[0]

    @property
    def is_next(self) -> bool:
        """Whether they are to be."""
        return self.incarnation == self.told()[1]

    @property
    def is_known(self) -> bool:
        """Whether they are, are to be, or were just now, and have kept what they had."""
        return self.incarnation in self.told()

    def told(self) -> tuple[int, int, int]:
        """The incarnation that it is, the one that is to follow, and the one that leaves; 0 where there is none."""
        state = read_object(JobFolder(self.folder).state) or {}
        return state.get("incarnation", self.incarnation), state.get("next", 0), state.get("leaving", 0)


@functools.cache
def member() -> Member | None:
    """This process as a worker; None outside of a job."""
    return Member.of(os.environ)


def check_current() -> None:
    """Asked before anything is given a name that others read.

    Raises:
        SupersededError: the job has gone on without this process, which is to leave nothing behind.
    """
    mine = member()
    if mine is not None and not mine.is_current:
        if mine.is_next:
            raise SupersededError(
                f"the workers of the job in {mine.folder} that this process is to follow train still, and it writes "
                f"nothing before it is its turn, which it waits for in cjax.train.fit: keep nothing before that, or "
                f"type cjax resize {mine.folder} N --stop-first"
            )
        raise SupersededError(
            f"the job in {mine.folder} has started its workers anew since incarnation {mine.incarnation}, and this "
            "process is late: it writes nothing more. cjax status says which incarnation runs"
        )
