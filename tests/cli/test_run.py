import os
import re
from pathlib import Path

import pytest

from cjax.cli.run import Run

from .test_main import run

SCRIPT = """
import sys
import jax
print(len(jax.devices()), jax.devices()[0].platform, sys.argv[1:])
sys.exit(5)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


@pytest.mark.full
def test_the_script_gets_its_devices_and_its_arguments(script: str):
    ran = run("run", script, "--devices", "3", "--lr", "0.1", "fast")
    assert ran.stdout.split("\n")[0] == "3 cpu ['--lr', '0.1', 'fast']"
    assert ran.returncode == 5


def test_after_two_dashes_everything_is_the_scripts(script: str):
    options = Run.parse(["--devices", "2", "--", script, "--devices", "7", "--", "x"])
    assert (options.devices, options.script, options.arguments) == (2, script, ("--devices", "7", "--", "x"))


def test_what_cannot_run_is_refused(script: str):
    with pytest.raises(FileNotFoundError, match="no script nowhere.py"):
        Run.parse(["nowhere.py"]).run()
    with pytest.raises(ValueError, match="at least one device"):
        Run.parse([script, "--devices", "0"]).run()


@pytest.mark.parametrize(
    ("typed", "error", "said"),
    [
        (["--restarts", "5"], ValueError, "--restarts: of a job, which has --workers"),
        (["--folder", "here", "--hosts", "a", "b", "--"], ValueError, "--hosts, --folder: of a job"),
        (["--workers", "0"], ValueError, "--workers 0: it is a whole number, at least 1"),
        (["--workers", "2", "--min-workers", "3"], ValueError, "--min-workers 3: there are 2"),
        (["--workers", "2", "--restarts", "-1"], ValueError, "--restarts -1: it is a whole number, at least 0"),
        (["--workers", "2", "--grace", "0"], ValueError, "--grace 0.0: it is above 0 seconds"),
        (["--workers", "2", "--hosts", "a", "--"], ValueError, "--workers 2, and 1 hosts"),
        (["--workers", "1", "--launch", "x", "--hosts", "a", "--"], ValueError, "it says where {host} goes"),
        (["--workers", "2", "--folder", __file__], NotADirectoryError, "is a file: name a folder"),
    ],
)
def test_what_makes_no_job_is_refused_before_anything_starts(
    script: str,
    no_launcher: None,
    monkeypatch: pytest.MonkeyPatch,
    typed: list[str],
    error: type[Exception],
    said: str,
) -> None:
    def starts(*_: object) -> None:
        raise AssertionError("it starts")

    monkeypatch.setattr("cjax.cli.run.os.execve", starts)
    monkeypatch.setattr("cjax.cli.run.supervise", starts)
    with pytest.raises(error, match=re.escape(said)):
        Run.parse([*typed, script]).run()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name == "WORLD_SIZE":
            monkeypatch.delenv(name)


def test_a_job_is_made_of_what_was_typed(script: str, tmp_path: Path, no_launcher: None) -> None:
    typed = ["--workers", "2", "--min-workers", "1", "--restarts", "7", "--devices", "3", "--folder", str(tmp_path)]
    options = Run.parse([*typed, "--", script, "--devices", "9"])
    job = options._job(options._command(), 2)
    assert job.command[1:] == (script, "--devices", "9")
    assert (job.workers, job.min_workers, job.restarts, job.devices, job.hosts) == (2, 1, 7, 3, ())
    assert job.folder == str(tmp_path)
    options = Run.parse(["--workers", "1", "--", "train", "x"])
    assert options._command()[-2:] == ["train", "x"], "in the place of a script"
    with pytest.raises(FileNotFoundError, match="no script trian"):
        Run.parse(["trian", "--workers", "2"]).run()


def test_jobs_that_begin_in_the_same_second_have_folders_of_their_own(
    script: str, tmp_path: Path, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    options = Run.parse([script, "--workers", "1"])
    folders = [Path(options._job(options._command(), 1).folder) for _ in range(3)]
    assert [each.name for each in folders] == [f"script-20260101-000000{more}" for more in ("", "-2", "-3")]
    assert all(each.parent == tmp_path / "runs" and each.is_dir() for each in folders)


def test_under_slurm_each_host_of_the_allocation_has_a_worker(
    script: str, tmp_path: Path, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\ntest "$1 $2" = "show hostnames" && echo n1 && echo n2\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_NNODES", "2")
    options = Run.parse([script, "--workers", "2"])
    job = options._job(options._command(), 2)
    assert job.hosts == ("n1", "n2") and job.line("n2", {"RANK": "1"})[:5] == [
        "srun", "--nodes=1", "--ntasks=1", "--overlap", "--nodelist=n2",
    ]  # fmt: skip
    assert job.said(1, 1, 2, ("n1", 9))["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_it_is_typed_once_and_not_by_each_process_of_a_launcher(
    script: str, name: str, no_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(ValueError, match="starts the workers itself"):
        Run.parse([script, "--workers", "2"]).run()
