"""Files that processes of a run give to each other for keeping, over sockets of their own, beside what devices do.

Each process listens where the run's coordinator is reached: on loopback where that is there, as with all processes on
one machine; otherwise on its address in the network of the hosts that the launcher named. Who connects has to know a
secret that is told to the processes of the run alone.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from cjax.checkpoint.part import unfinished
from cjax.jax_compat.backends import coordinator_address

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "")
_NAME = re.compile(r"\d+-\d+-\d+")
_TIMEOUT = 30.0  # seconds in which a process answers
_LINE = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # which tells hosts apart


class Peers:
    """The other processes, as places for files.

    With several processes each makes the same calls, but `put` and `get`, which are of one.

    Args:
        place: where files of this process are, by names such as `12-7-0`; those of others are in `peers` below it.
        keep: how many of one other process.
        said: of this process, to be known to all, in JSON's types.

    Attributes:
        told: what each process said.
        source: the process whose files this one keeps.
        keeper: the process that keeps those of this one.
    """

    def __init__(self, place: Path, keep: int, said: dict[str, Any]) -> None:
        address = _address([])
        if address.startswith("127.") and coordinator_address().rpartition(":")[0].strip("[]") not in _LOOPBACK:
            # The name of this host is its loopback's to itself; the way to the others starts at what they can reach.
            address = _address(tell_all(address))
        else:
            tell_all(address)
        self._server = _Server(address, place, keep)
        facts = {"address": self._server.server_address[:2], "secret": self._server.secret, "host": _BOOT.read_text()}
        self.told = tell_all({**said, **facts})
        rank, count = jax.process_index(), jax.process_count()
        stride = _stride([each["host"] for each in self.told])
        self.source, self.keeper = (rank - stride) % count, (rank + stride) % count
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="peers").start()

    def put(self, file: Path) -> None:
        """Gives a file to who keeps those of this process.

        Raises:
            OSError: it has not got it.
        """
        size = file.stat().st_size
        with (
            self._asked(self.keeper, {"do": "put", "name": file.name, "bytes": size}) as there,
            open(file, "rb") as own,
        ):
            there.sendfile(own)
            if there.recv(3) != b"ok\n":
                raise OSError("it has not kept the file")

    def get(self, process: int, file: Path) -> None:
        """Gets a file from a process that has it.

        Raises:
            OSError: it has it no more, or can't be reached.
        """
        with self._asked(process, {"do": "get", "name": file.name}) as there, there.makefile("rb") as answer:
            size = answer.readline(_LINE)
            if not size.strip().isdigit():
                raise OSError(f"it has no {file.name}")
            _receive(answer, file, int(size))

    @contextlib.contextmanager
    def _asked(self, process: int, what: dict[str, Any]) -> Iterator[socket.socket]:
        address = self.told[process]["address"]
        try:
            with socket.create_connection(tuple(address), _TIMEOUT) as there:
                there.sendall(json.dumps({**what, "secret": self.told[process]["secret"]}).encode() + b"\n")
                yield there
        except OSError as error:
            raise OSError(error.errno, f"process {process}, at {address[0]}, is no help: {error}") from error

    def close(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, address: str, place: Path, keep: int) -> None:
        self.place, self.keep, self.secret = place, keep, secrets.token_hex(16)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Asked)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked sees that it got no answer, and says so."""


class _Asked(socketserver.StreamRequestHandler):
    timeout = _TIMEOUT

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        asked = json.loads(self.rfile.readline(_LINE))
        name, place = asked["name"], server.place
        if not hmac.compare_digest(asked["secret"], server.secret) or not _NAME.fullmatch(name):
            return
        if asked["do"] == "get":
            file = local(place, name)
            size = file.stat().st_size if file is not None else "none"
            self.wfile.write(f"{size}\n".encode())
            if file is not None:
                with open(file, "rb") as kept:
                    shutil.copyfileobj(kept, self.wfile, 2**20)
            return
        whose = name.rpartition("-")[2]
        kept = sorted((place / "peers").glob(f"[0-9]*-*-{whose}"), key=lambda file: int(file.name.split("-")[0]))
        for older in kept[: -server.keep]:
            older.unlink(missing_ok=True)
        (place / "peers").mkdir(mode=0o700, exist_ok=True)
        _receive(self.rfile, place / "peers" / name, int(asked["bytes"]))
        self.wfile.write(b"ok\n")


def local(place: Path, name: str) -> Path | None:
    """The file of this name on this host, its own or one that is kept for another; None if there is none."""
    return next((file for file in (place / name, place / "peers" / name) if file.exists()), None)


def _receive(stream: BinaryIO | socket.SocketIO | Any, path: Path, size: int) -> None:
    """A file that is there whole, or not at all."""
    part = unfinished(path)
    try:
        with open(part, "wb") as file:
            while size:
                if not (chunk := stream.read(min(size, 2**20))):
                    raise OSError(f"{path.name} ended before all of it had come")
                file.write(chunk)
                size -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def tell_all(said: Any) -> list[Any]:
    """What each process says, in JSON's types; all of them call it."""
    mine = np.frombuffer(json.dumps(said).encode(), np.uint8)
    sizes = np.reshape(multihost_utils.process_allgather(np.array([mine.size], np.int32)), -1)
    padded = np.pad(mine, (0, int(sizes.max()) - mine.size))
    rows = np.reshape(multihost_utils.process_allgather(padded), (sizes.size, -1))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _stride(hosts: Sequence[str]) -> int:
    """How far away the process is that keeps another's files: on another host, for all of them, where that can be."""
    far = range(1, len(hosts))
    is_elsewhere = (all(host != hosts[(i + by) % len(hosts)] for i, host in enumerate(hosts)) for by in far)
    return next((by for by, is_fine in zip(far, is_elsewhere, strict=True) if is_fine), 1)


def _address(others: Sequence[str]) -> str:
    """Where this process is reached by those who reach the coordinator, or these others."""
    host, _, port = coordinator_address().rpartition(":")
    if host.strip("[]") in _LOOPBACK:
        return "127.0.0.1"
    reached = next((each for each in others if not each.startswith("127.")), host.strip("[]"))
    family, kind, _, _, to = socket.getaddrinfo(reached, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:  # nothing is sent
        way.connect(to)
        return way.getsockname()[0]
