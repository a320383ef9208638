"""The processes that workers are: here, or wherever whoever supervises them starts them."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cjax.job.beat import SHOW_STACKS


class WorkerProcess(Protocol):
    """One that was started: to be polled, stopped and killed."""

    @property
    def pid(self) -> int:
        """Its number on its own machine."""
        ...

    def poll(self) -> int | None:
        """How it has ended: its status, or a signal's number below 0; None as long as it runs."""
        ...

    def stop(self) -> None:
        """Asks it to save and leave."""
        ...

    def show_stacks(self) -> None:
        """Asks it to print where its threads are."""
        ...

    def kill(self) -> None:
        """Ends it at once, with what it has started; back when it is gone."""
        ...


# Starts what a rank runs: rank, command, what it is told in its environment, and the file for what it prints.
Start = Callable[[int, Sequence[str], Mapping[str, str], Path], WorkerProcess]


class LocalProcess:
    """A process on this machine.

    Args:
        line: the command.
        environment: all of it.
        log: the file for what it prints.
        folder: where it is started; here if None.
    """

    def __init__(
        self, line: Sequence[str], environment: Mapping[str, str], log: Path, folder: str | None = None
    ) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            opened = open(log, "wb")  # noqa: SIM115
        except OSError:  # what is printed is lost where a disk is full, and no training
            opened = open(os.devnull, "wb")  # noqa: SIM115
        with opened as file:
            # A file, and no pipe, which would break with the one who reads it. A session of its own, so that what the
            # worker starts is ended with it, and what a terminal sends goes to the supervisor alone.
            self._process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Not as `Popen.poll`, which would give its number to whoever starts next."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stop(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def show_stacks(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, SHOW_STACKS)

    def kill(self) -> None:
        if self._process.returncode is None:  # waited for it is only here, so that its number is still its own
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
