"""Jobs of workers that count."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cjax
from cjax.job.files import read_object
from cjax.job.folder import JobFolder
from cjax.job.spec import JobSpec, start_line
from cjax.job.workers import started

from .counting import WORKER


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], JobFolder]]]:
    running: list[subprocess.Popen[str]] = []

    def start(
        at: str = "", early: str = "", ready: str = "", late: str = "", **more: Any
    ) -> tuple[subprocess.Popen[str], JobFolder]:
        command = (sys.executable, "-c", WORKER, str(Path(cjax.__file__).parent), at, early, ready, late)
        spec = JobSpec(command, str(tmp_path), **{"workers": 2, "hang_after": 1.5, "grace": 5.0, **more})
        running.append(subprocess.Popen(start_line(spec), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        return running[-1], JobFolder(tmp_path)

    yield start
    for each in running:
        each.kill()
        each.communicate()
    for pid, since in (read_object(JobFolder(tmp_path).state) or {}).get("pids", []):
        if started(pid) == since:
            os.killpg(pid, signal.SIGKILL)
