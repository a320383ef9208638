"""`cjax status` and `cjax resize`."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from cjax.job.files import read_object
from cjax.job.folder import JobFolder
from cjax.job.status import ask_for, status_of

_PICKED_UP = 30.0  # seconds in which a supervisor that lives has read what it is asked


@dataclasses.dataclass(frozen=True)
class StatusCommand:
    """Shows how a job of `cjax run --workers` goes: step, rate, loss, restarts, what was lost, goodput.

    Attributes:
        run_folder: the folder of the run.
    """

    run_folder: tyro.conf.Positional[str]

    @staticmethod
    def parse(arguments: Sequence[str]) -> "StatusCommand":
        return tyro.cli(StatusCommand, args=arguments, prog="cjax status")

    def run(self) -> int:
        print(status_of(Path(self.run_folder)))
        return 0


@dataclasses.dataclass(frozen=True)
class Resize:
    """Gives a job of `cjax run --workers` another number of workers, who get ready before the present ones stop.

    Attributes:
        run_folder: the folder of the run.
        workers: how many from now on.
        stop_first: the present ones stop before the others start: where there is no room for both.
    """

    run_folder: tyro.conf.Positional[str]
    workers: tyro.conf.Positional[int]
    stop_first: bool = False

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Resize":
        return tyro.cli(Resize, args=arguments, prog="cjax resize")

    def run(self) -> int:
        folder = JobFolder(Path(self.run_folder))
        ask_for(folder.run, self.workers, self.stop_first)
        until = time.monotonic() + _PICKED_UP
        while read_object(folder.asked) is not None:
            if time.monotonic() > until:
                try:
                    folder.asked.unlink()
                except FileNotFoundError:
                    break  # it has been read just now
                raise RuntimeError(
                    f"the supervisor of {folder.run} has not read in {_PICKED_UP:g} s what it is asked, and is asked "
                    f"no more: type it again, cjax resize {folder.run} {self.workers}"
                )
            time.sleep(0.1)
        print(f"{folder.run} is to have {self.workers} workers; cjax status {folder.run} says how far it is")
        return 0
