"""Who starts the workers of a cluster's jobs: a node's devices are held, and processes started on them."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cjax.job.processes import LocalProcess, WorkerProcess
from cjax.scheduler.policy.job import Placement


class NodeGone(OSError):
    """A node that a job was to run on is not there any more."""


class HeldDevices(Protocol):
    """Devices that a job holds. Its processes, one on each node, are started here; each is polled, stopped and
    killed."""

    def start(
        self, rank: int, line: Sequence[str], environment: Mapping[str, str], log: Path, folder: str
    ) -> WorkerProcess:
        """A process on the `rank`th node.

        Raises:
            NodeGone: that is not there any more.
        """
        ...

    def meeting(self) -> tuple[str, int]:
        """Where the processes of one start meet: an address and a free port of the first node."""
        ...

    def release(self) -> None:
        """Gives the devices back."""
        ...


class ProcessExecutor(Protocol):
    """Of a cluster."""

    def nodes(self) -> dict[str, int]:
        """Devices of each node that is there now."""
        ...

    def hold(self, name: str, placement: Placement) -> HeldDevices:
        """Takes devices for a job.

        Raises:
            NodeGone: a node is not there any more.
        """
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...


class LocalExecutor:
    """All on this machine, as plain processes.

    Args:
        nodes: devices of each. Several are but names here, for jobs of several processes.
    """

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._nodes = dict(nodes)

    def nodes(self) -> dict[str, int]:
        return dict(self._nodes)

    def hold(self, name: str, placement: Placement) -> "LocalHeld":
        del name, placement
        return LocalHeld()

    def close(self) -> None:
        """There is nothing but the jobs' processes, which whoever started them ends."""


class LocalHeld:
    """Devices of this machine."""

    def start(
        self, rank: int, line: Sequence[str], environment: Mapping[str, str], log: Path, folder: str
    ) -> LocalProcess:
        del rank
        return LocalProcess(line, environment, log, folder)

    def meeting(self) -> tuple[str, int]:
        return "127.0.0.1", free_port("127.0.0.1")

    def release(self) -> None:
        """Nothing to do."""


def free_port(address: str) -> int:
    """One that nobody listens on now."""
    with socket.socket() as free:
        free.bind((address, 0))
        return free.getsockname()[1]
