"""What Ray runs on a node for a job: starts plain processes there, and hands on what is asked of them.

Ray gets this file's class as it is here, and that of `cjax.job.processes`: its workers import neither cjax nor JAX.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cjax.job.processes import LocalProcess

_LOOK = 0.5  # seconds between two looks at who started it


class Agent:
    """On one node, of one job."""

    def __init__(self) -> None:
        self._processes: dict[int, LocalProcess] = {}
        self._parent = os.getppid()
        threading.Thread(target=self._leave_with_parent, daemon=True, name="parent").start()

    def _leave_with_parent(self) -> None:
        """Ray leaves an actor where it is that waits, when the node's own process has died: what it has started would
        go on."""
        while os.getppid() == self._parent:
            time.sleep(_LOOK)
        for process in list(self._processes.values()):
            process.kill()
        os._exit(1)

    def start(self, line: Sequence[str], environment: Mapping[str, str], supervisor: str, log: str, folder: str) -> int:
        """Starts a process that is this one's child; its number. Cards are those that Ray gave to this job."""
        cards = os.environ.get("CUDA_VISIBLE_DEVICES")
        given = {"CUDA_VISIBLE_DEVICES": cards} if "CUDA_VISIBLE_DEVICES" in environment and cards else {}
        own = {**environment, supervisor: str(os.getpid()), **given}
        process = LocalProcess(line, own, Path(log), folder)
        self._processes[process.pid] = process
        return process.pid

    def wait(self, pid: int) -> int | None:
        """How it has ended, once it has."""
        with contextlib.suppress(ChildProcessError):  # it was killed, and waited for
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return self._processes[pid].poll()

    def stop(self, pid: int) -> None:
        self._processes[pid].stop()

    def show_stacks(self, pid: int) -> None:
        self._processes[pid].show_stacks()

    def kill(self, pid: int) -> None:
        self._processes[pid].kill()

    def meeting(self, address: str) -> tuple[str, int]:
        """An address and a free port of this node."""
        with socket.socket() as free:
            free.bind((address, 0))
            return address, free.getsockname()[1]
