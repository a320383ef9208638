"""Devices of this machine: processes are started where their job was submitted."""

import socket
import sys
from pathlib import Path

from cjax.cluster.executor import LocalExecutor

from .conftest import until


def test_nodes_are_those_that_it_was_started_with() -> None:
    given = {"a": 2}
    executor = LocalExecutor(given)
    given["b"] = 4
    executor.nodes()["c"] = 1
    assert executor.nodes() == {"a": 2}


def test_a_process_starts_in_the_folder_of_its_job_and_meets_the_others_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    held = LocalExecutor({"a": 2}).hold("job", {"a": (0, 1)})
    code = "import os; print(os.getcwd(), os.environ['WORD'])"
    process = held.start(0, [sys.executable, "-c", code], {"WORD": "x"}, tmp_path / "log", str(tmp_path / "job"))
    until(lambda: process.poll() is not None)
    assert process.poll() == 0 and (tmp_path / "log").read_text().split() == [str(tmp_path / "job"), "x"]
    process.kill()  # it is waited for
    address, port = held.meeting()
    with socket.create_server((address, port)):  # nobody listens there yet
        assert address == "127.0.0.1" and port
    held.release()
