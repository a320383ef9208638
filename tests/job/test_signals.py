"""What a process does that is told to leave."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from forked import Forks

from cjax.job import LeaveAtOnce, Member, SupersededError, check_current
from cjax.job.beat import Doing, read_beat, wait_for_turn
from cjax.job.files import write_whole
from cjax.job.folder import JobFolder

# Between `initialize` and the loop: JAX takes SIGTERM for itself when processes join.
JOINED = """
import os, signal, sys, time
import cjax, jax
from job.test_signals import listening

cjax.initialize()
assert jax.device_count() == 4  # whose collectives listen too
print(listening(os.getpid()), os.environ["NCCL_SOCKET_IFNAME"])
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


def test_sigterm_behind_initialize_says_again_and_nothing_listens_to_other_machines(forks: Forks) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    said |= {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(Path(__file__).parent.parent)}
    ranks = [said | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    both = forks.together([["-c", JOINED]] * 2, ranks)
    assert [each.returncode for each in both] == [75, 75], both[0].stderr
    assert [each.stdout.strip() for each in both] == ["{'127.0.0.1'} lo"] * 2


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens."""
    sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    found = set()
    for table, width in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                number = bytes.fromhex(words[1].split(":")[0])
                found.add(".".join(map(str, number[: -5 if width == 16 else None : -1])))
    return found


def test_who_is_late_gives_nothing_a_name(tmp_path: Path, forks: Forks) -> None:
    folder = JobFolder(tmp_path)
    folder.place.mkdir()
    write_whole(folder.state, '{"incarnation": 3}')
    code = """
import numpy as np
from cjax.checkpoint import save
from cjax.job import SupersededError
try:
    save("late", {"w": np.ones(3)}, {})
except SupersededError as error:
    raise SystemExit(f"late: {error}")
"""
    late, current = (
        forks.run(["-c", code], {**os.environ, "CJAX_JOB": str(tmp_path), "CJAX_INCARNATION": number}, tmp_path)
        for number in ("2", "3")
    )
    assert late.returncode == 1 and "since incarnation 2" in late.stderr
    assert current.returncode == 0 and (tmp_path / "late").is_dir()
    check_current()  # of no job
    assert issubclass(SupersededError, Exception) and not issubclass(SupersededError, OSError), "no full disk"


@pytest.mark.parametrize(
    ("how", "status", "why"),
    [
        ("late", 75, "goes on without this process"),
        ("orphaned", 75, "goes on without this process"),
        ("a worker's", 1, "RuntimeError: this process is no worker of the job in"),
    ],
)
def test_who_is_late_or_alone_does_not_begin(tmp_path: Path, forks: Forks, how: str, status: int, why: str) -> None:
    folder = JobFolder(tmp_path)
    folder.place.mkdir()
    write_whole(folder.state, '{"incarnation": 3}')
    gone = subprocess.Popen(["true"])
    gone.wait()
    supervisor = {"late": 0, "orphaned": gone.pid, "a worker's": os.getpid()}[how]  # the parent is none of these
    said = {"CJAX_JOB": str(tmp_path), "CJAX_INCARNATION": "2" if how == "late" else "3"}
    said |= {"CJAX_SUPERVISOR": str(supervisor)}
    done = forks.run(["-c", "import cjax; cjax.initialize()"], {**os.environ, **said})
    assert done.returncode == status and why in done.stderr


WAITING = """
import sys
from cjax.job import SupersededError, check_current
from cjax.job.beat import wait_for_turn
try:
    check_current()
except SupersededError as error:
    print("train still" in str(error), flush=True)
wait_for_turn("fit")
check_current()
"""


@pytest.mark.full("then1-75")
@pytest.mark.parametrize(("then", "status"), [({"incarnation": 4}, 0), ({"incarnation": 3, "next": 5}, 75)])
def test_who_was_started_ahead_keeps_nothing_before_its_turn(tmp_path: Path, then: dict[str, int], status: int) -> None:
    folder = JobFolder(tmp_path)
    folder.place.mkdir()
    write_whole(folder.state, '{"incarnation": 3, "next": 4}')
    said = {**os.environ, "CJAX_JOB": str(tmp_path), "CJAX_INCARNATION": "4", "CJAX_AHEAD": "fit"}
    waiting = subprocess.Popen([sys.executable, "-c", WAITING], env=said, stdout=subprocess.PIPE, text=True)
    beat = folder.beat(4, 0)
    while (found := read_beat(beat)) is None or found["phase"] != "ready":
        assert waiting.poll() is None
        time.sleep(0.01)
    write_whole(folder.state, json.dumps(then))
    out, _ = waiting.communicate(timeout=10)
    assert (waiting.returncode, out) == (status, "True\n")


def test_whose_turn_comes_between_two_looks_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look of the state is the last before it changes."""
    looks = iter([{"incarnation": 3, "next": 4}] * 3 + [{"incarnation": 4, "next": 0}] * 9)
    beat, doing = sys.modules["cjax.job.beat"], Doing()
    monkeypatch.setattr(sys.modules["cjax.job.member"], "read_object", lambda _: next(looks))
    monkeypatch.setattr(beat, "member", lambda: Member(tmp_path, 4, 0, 0, "fit"))
    monkeypatch.setattr(beat, "beating", lambda: doing)
    wait_for_turn("fit")
    assert doing.phase == "starting"
    looks = iter([{"incarnation": 3, "next": 4}] * 2 + [{"incarnation": 3, "next": 5}] * 9)
    with pytest.raises(SystemExit):
        wait_for_turn("fit")


def test_a_notebooks_kernel_outlives_a_second_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_heeded() -> bool:
        with LeaveAtOnce():
            now = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(now)
            return now != -1

    assert is_heeded()
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert not is_heeded()
