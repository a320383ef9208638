"""What Ray runs on a node: plain processes, which end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cjax.cluster.agent import Agent

from .conftest import until

SAYS = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['WHO'], flush=True)"
# One whose own parent dies at once, once it has started a process and said which.
ORPHAN = """
import subprocess, sys
inner = '''
import os, sys, time
from cjax.cluster.agent import Agent
print(Agent().start([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), "WHO", {log!r}, "."))
sys.stdout.flush()
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
"""


def ended(agent: Agent, pid: int) -> int | None:
    status = until(lambda: [found] if (found := agent.wait(pid)) is not None else [])
    agent.kill(pid)  # it is waited for
    return status[0]


@pytest.mark.parametrize(("asked", "seen"), [({"CUDA_VISIBLE_DEVICES": "0,1"}, "4,5"), ({}, "None")])
def test_a_process_has_the_cards_that_its_job_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    agent, log = Agent(), tmp_path / "logs" / "0.log"
    pid = agent.start([sys.executable, "-c", SAYS], asked, "WHO", str(log), str(tmp_path))
    assert ended(agent, pid) == 0
    assert log.read_text().split() == [seen, str(os.getpid())]


def test_it_is_stopped_or_killed_with_what_it_has_started(tmp_path: Path) -> None:
    agent, line = Agent(), [sys.executable, "-c", "import time; time.sleep(600)"]
    stopped, killed = (agent.start(line, {}, "WHO", str(tmp_path / f"{i}.log"), ".") for i in range(2))
    agent.stop(stopped)
    assert ended(agent, stopped) == -signal.SIGTERM
    agent.kill(killed)
    assert agent.wait(killed) == -signal.SIGKILL
    address, port = agent.meeting("127.0.0.1")
    assert address == "127.0.0.1" and 0 < port < 65536


def test_processes_end_with_who_started_the_agent(tmp_path: Path) -> None:
    script = ORPHAN.format(log=str(tmp_path / "log"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    stop = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < stop:
        time.sleep(0.05)
    assert [is_running(pid) for pid in pids] == [False, False]


def is_running(pid: int) -> bool:
    """Not so of one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
