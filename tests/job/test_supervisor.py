"""Supervisors of real processes: workers that beat and count steps, and need no JAX for it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cjax.job.supervisor
from cjax.job.files import read_lines, write_whole
from cjax.job.folder import JobFolder
from cjax.job.lock import is_locked
from cjax.job.spec import JobSpec, start_line
from cjax.job.state import JobState
from cjax.job.status import ask_for, status_of
from cjax.job.workers import Workers, started

from .counting import ends, nothing_twice, state, until


def test_a_death_is_noticed_within_a_second_and_all_go_on_from_what_was_saved(job: Any) -> None:
    supervisor, folder = job("if (number, rank, step) == (1, 1, 25): os.kill(os.getpid(), signal.SIGKILL)")
    out, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0, err
    assert "worker 1 ended by SIGKILL after step 24, training; starting again (1 of 100)" in err
    died, done = ends(folder)
    assert (died["kind"], died["first"], done["kind"], done["first"], done["step"]) == ("died", 0, "done", 20, 40)
    begin = [line["time"] for line in read_lines(folder.history) if line["event"] == "start"][1]
    assert begin - died["time"] < 1 and died["seconds"]["training"] < 25 * 0.02 + 2
    said = status_of(folder.run)
    assert (said.status, said.step, said.steps, said.repeated) == ("done", 40, 40, died["step"] - 20)
    assert 0 < said.goodput < 1 and "worker 1 ended by SIGKILL" in str(said)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("if (number, rank, step) == (1, 1, 25): os.kill(os.getpid(), signal.SIGSTOP)", "worker 1 is stopped"),
        ("if (number, rank, step) == (1, 0, 25): time.sleep(60)", "worker 0 hangs after step 24, training"),
    ],
)
def test_a_worker_that_stands_still_is_noticed(job: Any, at: str, said: str) -> None:
    supervisor, folder = job(at)
    _, err = supervisor.communicate(timeout=40)
    assert supervisor.returncode == 0 and said in err, err
    assert 'File "<string>", line' in folder.log(1, 0).read_text(), "the stack of who hangs, or waits"
    assert [(line["kind"], line["first"]) for line in ends(folder)] == [("hung", 0), ("done", 20)]


def test_a_worker_that_is_stopped_outside_of_steps_is_noticed(job: Any) -> None:
    at = "if (number, step) == (1, 25): beat.turn('saving'); os.kill(os.getpid(), signal.SIGSTOP)"
    supervisor, folder = job(at, workers=1)
    _, err = supervisor.communicate(timeout=40)
    assert supervisor.returncode == 0 and "worker 0 is stopped: no sign of life" in err, err
    assert [(line["kind"], line["first"]) for line in ends(folder)] == [("hung", 0), ("done", 20)]


@pytest.mark.full
def test_a_machine_that_slept_is_no_hang(job: Any) -> None:
    supervisor, folder = job("time.sleep(0.1)", workers=1)
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > 3)
    ((worker, _),) = state(folder)["pids"]
    # The supervisor is the last to fall asleep, when it has read the worker's last beat, and the first to wake.
    sequence = ((worker, signal.SIGSTOP, 0.3), (supervisor.pid, signal.SIGSTOP, 2.5),
                (supervisor.pid, signal.SIGCONT, 0.5), (worker, signal.SIGCONT, 0.0))  # fmt: skip
    for pid, number, seconds in sequence:
        os.kill(pid, number)
        time.sleep(seconds)
    _, err = supervisor.communicate(timeout=40)
    assert supervisor.returncode == 0 and [line["kind"] for line in ends(folder)] == ["done"], err


def test_slow_steps_are_no_hang(job: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("33")
    supervisor, folder = job("time.sleep(0.5 if step < 38 else 2.0)", workers=1)
    _, err = supervisor.communicate(timeout=40)
    assert supervisor.returncode == 0 and len(ends(folder)) == 1, err


def test_a_job_that_does_not_get_on_is_given_up_with_its_last_lines(job: Any) -> None:
    supervisor, folder = job("if step > 12: raise ZeroDivisionError('of the user')", fruitless=2)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 1 and "ZeroDivisionError: of the user" in err
    assert "2 starts in a row have not brought a new step" in err and len(ends(folder)) == 3
    assert state(folder)["status"] == "failed"
    # Typed again it begins to count anew.
    supervisor, folder = job("", fruitless=2)
    assert supervisor.wait(30) == 0


def test_no_more_restarts_than_are_allowed(job: Any) -> None:
    supervisor, folder = job("if step > 10 * number: sys.exit(3)", restarts=1)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 1 and "started again 1 times" in err and len(ends(folder)) == 2


@pytest.mark.full("2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_supervisor_that_is_told_to_stop_has_its_workers_save(job: Any, number: signal.Signals, code: int) -> None:
    supervisor, folder = job("time.sleep(0.05)")
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > 12)
    supervisor.send_signal(number)
    assert supervisor.wait(20) == code
    (stopped,) = ends(folder)
    assert stopped["kind"] == "stopped" and state(folder)["status"] == "stopped"
    supervisor, folder = job()
    assert supervisor.wait(20) == 0 and nothing_twice(stopped, ends(folder)[-1])


def test_workers_of_a_killed_supervisor_save_and_leave_and_another_goes_on(job: Any) -> None:
    supervisor, folder = job("time.sleep(0.05)")
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > 12)
    other, _ = job()
    _, err = other.communicate(timeout=20)
    assert other.returncode == 1 and "another run trains in" in err
    supervisor.kill()
    supervisor.wait()
    assert status_of(folder.run).status.startswith("unwatched")
    pids = state(folder)["pids"]
    until(lambda: all(started(pid) != since for pid, since in pids))
    saved = int((folder.run / "saved").read_text())
    assert saved > 12
    supervisor, folder = job()
    assert supervisor.wait(20) == 0
    assert [line["kind"] for line in ends(folder)] == ["orphaned", "done"]
    assert nothing_twice(*ends(folder)) and ends(folder)[1]["first"] == saved
    assert state(folder)["incarnation"] == 2


@pytest.mark.full
def test_a_resize_saves_stops_and_goes_on(job: Any) -> None:
    supervisor, folder = job("time.sleep(0.05)")
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > 5)
    with pytest.raises(ValueError, match="at least 1"):
        ask_for(folder.run, 0)
    ask_for(folder.run, 3)
    assert supervisor.wait(30) == 0
    resized, done = ends(folder)
    assert resized["kind"] == "resized" and nothing_twice(resized, done)
    assert [each.workers for each in status_of(folder.run).incarnations] == [2, 3]
    with pytest.raises(RuntimeError, match="is done. For more steps"):
        ask_for(folder.run, 2)


def test_a_second_signal_ends_at_once_what_a_killed_supervisor_has_left(job: Any) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); told.clear(); time.sleep(0.5)"
    supervisor, folder = job(stubborn, workers=1)
    until(lambda: read_lines(folder.history) and status_of(folder.run).step)
    supervisor.kill()
    supervisor.wait()
    ((pid, since),) = state(folder)["pids"]
    other, _ = job(stubborn, workers=1, grace=60.0)
    until(lambda: is_locked(folder.run))
    time.sleep(0.5)
    other.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert other.poll() is None and started(pid) == since, "the first waits for what is being saved"
    other.send_signal(signal.SIGTERM)
    assert other.wait(5) == 75 and started(pid) != since
    assert [line["kind"] for line in ends(folder)] == ["orphaned"] and state(folder)["status"] == "stopped"


@pytest.mark.full("2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_second_signal_ends_a_job_at_once(job: Any, number: signal.Signals, code: int) -> None:
    supervisor, folder = job("signal.signal(signal.SIGTERM, signal.SIG_IGN); told.clear(); time.sleep(0.2)", grace=60.0)
    until(lambda: read_lines(folder.history) and status_of(folder.run).step)
    pids = state(folder)["pids"]
    supervisor.send_signal(number)
    time.sleep(0.5)
    assert supervisor.poll() is None and all(started(pid) == since for pid, since in pids), (
        "what is saved is waited for"
    )
    begin = time.monotonic()
    supervisor.send_signal(number)
    assert supervisor.wait(5) == code and time.monotonic() - begin < 1
    assert all(started(pid) != since for pid, since in pids) and state(folder)["status"] == "stopped"


def test_nobody_elses_processes_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(JobSpec(("false",), str(tmp_path)), 1, ("0",))
    ending = until(workers.look)
    assert (ending.kind, ending.why[:28]) == ("died", "worker 0 ended with status 1")
    (process,) = workers.processes
    assert Path(f"/proc/{process.pid}").exists(), "its number is not given away before its group is ended"
    ended: list[int] = []
    monkeypatch.setattr("cjax.job.processes.os.killpg", lambda group, number: ended.append(group))
    workers.kill()
    workers.kill()
    assert ended == [process.pid] and process.poll() == 1


def test_starts_are_counted_since_the_job_was_typed(tmp_path: Path) -> None:
    spec = JobSpec(("true",), str(tmp_path), 2)
    folder = JobFolder(tmp_path)
    folder.place.mkdir()
    known = JobState.of(folder, spec)
    known.restarts, known.fruitless, known.incarnation = 7, 3, 8
    folder.state.write_text(known.text())
    again = JobState.of(folder, spec)
    assert (again.restarts, again.fruitless, again.incarnation) == (0, 0, 8)


@pytest.mark.full("2")
@pytest.mark.parametrize("least", [1, 2])
def test_a_place_where_no_worker_comes_to_life_is_given_up(job: Any, tmp_path: Path, least: int) -> None:
    launch = tmp_path / "launch.sh"
    launch.write_text('test "$1" = bad && sleep 0.7 && exit 255\nshift\nexec "$@"\n')
    more = {"hosts": ("good", "bad"), "launch": f"sh {launch} {{host}}", "min_workers": least, "fruitless": 3}
    supervisor, folder = job("time.sleep(60 if world > 1 else 0)", **more)
    _, err = supervisor.communicate(timeout=40)
    assert "worker 1 ended with status 255, before it had given any sign of life" in err
    sizes = [each.workers for each in status_of(folder.run).incarnations]
    if least == 1:
        assert supervisor.returncode == 0 and "at bad: going on with 1" in err and sizes == [2, 2, 1]
    else:
        assert supervisor.returncode == 1 and sizes == [2, 2, 2]


def test_whoever_leaves_because_it_was_told_to_is_started_again(job: Any) -> None:
    supervisor, folder = job("if (number, step) == (1, 15): os.kill(os.getpid(), signal.SIGTERM)")
    assert supervisor.wait(30) == 0
    again, done = ends(folder)
    assert again["kind"] == "again" and done["first"] == 15 and state(folder)["restarts"] == 0


def test_each_worker_is_told_its_place_and_no_other_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    spec = JobSpec(("python", "train.py"), str(tmp_path), workers=2, devices=3)
    first, second = (spec.said(4, rank, 2, ("127.0.0.1", 9)) for rank in range(2))
    assert first["JAX_COMPILATION_CACHE_DIR"] != second["JAX_COMPILATION_CACHE_DIR"], "each rank has its own"
    assert (second["RANK"], second["WORLD_SIZE"], second["CJAX_INCARNATION"]) == ("1", "2", "4")
    assert second["JAX_NUM_CPU_DEVICES"] == "3" and spec.address(1, ("0", "1"))[0] == "127.0.0.1"
    remote = JobSpec(("a b",), str(tmp_path), workers=2, hosts=("x", "y"), launch="ssh {host}")
    assert remote.line("y", {"RANK": "1"})[:3] == ["ssh", "y", "env"] and remote.line("y", {})[-1] == "'a b'"
    assert remote.address(1, ("x", "y")) != remote.address(2, ("x", "y")), "late ones find nobody there"
    assert JobSpec.of_text(remote.text()) == remote


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_launcher_has_its_environment_and_no_worker_has_a_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    launch = tmp_path / "launch.sh"  # as srun does: its step has variables of its own
    launch.write_text('test "$SLURM_JOB_ID" = 7 || exit 9\nshift\nexport SLURM_PROCID=0\nexec "$@"\n')
    theirs = {"SLURM_JOB_ID": "7", "JAX_COORDINATOR_ADDRESS": "n1:80", "ROLE_RANK": "3", "RANK": "5"}
    for name, value in {**theirs, "ROLE_ARN": "arn:of-the-user"}.items():
        monkeypatch.setenv(name, value)
    hosts = {"hosts": ("here",), "launch": f"sh {launch} {{host}}"} if is_remote else {}
    spec = JobSpec((sys.executable, "-c", "import json, os; print(json.dumps({**os.environ}))"), str(tmp_path), **hosts)
    subprocess.run(start_line(spec), stdout=subprocess.DEVNULL, timeout=20, check=True)
    told = json.loads(JobFolder(tmp_path).log(1, 0).read_text())
    assert not told.keys() & {"SLURM_JOB_ID", "SLURM_PROCID", "JAX_COORDINATOR_ADDRESS", "ROLE_RANK"}
    assert (told["ROLE_ARN"], told["RANK"]) == ("arn:of-the-user", "0")


def test_whoever_reads_what_workers_print_may_end(job: Any, tmp_path: Path) -> None:
    code = "import time, sys\nfor i in range(20): print(i, flush=True); time.sleep(0.05)\nsys.exit(i != 19)"
    spec = JobSpec((sys.executable, "-c", code), str(tmp_path), restarts=0)
    both = subprocess.Popen(start_line(spec), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert both.stdout is not None and both.stdout.readline() == b"0\n"
    both.stdout.close()
    assert both.wait(20) == 0 and ends(JobFolder(tmp_path))[0]["kind"] == "done"


def test_who_asks_whether_a_supervisor_runs_keeps_none_from_it_and_writes_nothing(job: Any, tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    assert not is_locked(folder.run) and not folder.lock.exists()
    folder.lock.touch(0o444)
    with open(folder.lock) as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not is_locked(folder.run), "others who ask are no supervisor"
        folder.lock.chmod(0o644)
        supervisor, _ = job()
        time.sleep(0.4)
    until(lambda: folder.state.exists() and is_locked(folder.run))
    assert supervisor.wait(20) == 0


def test_what_was_asked_while_nobody_supervised_is_forgotten(job: Any, tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.place.mkdir()
    folder.asked.write_text('{"workers": 3}')
    supervisor, _ = job()
    assert supervisor.wait(20) == 0 and not folder.asked.exists()
    assert [each.workers for each in status_of(folder.run).incarnations] == [2]


def test_the_batch_script_of_the_docs_is_put_back_into_the_queue_when_its_time_is_over(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
    script = next(part for part in page.split("```bash\n") if part.startswith("#!/bin/bash")).split("```")[0]
    stubs = {  # the job has begun when the script knows its number as well
        "cjax": "trap 'sleep 0.3; exit 75' TERM; sleep 0.5; touch begun; while :; do sleep 0.05; done",
        "scontrol": 'echo "$@" >> queued',
    }
    for name, code in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    said = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    batch = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=said)
    until((tmp_path / "begun").exists)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(20) == 0 and (tmp_path / "queued").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"workers": 2, "min_workers": 3}, "--min-workers 3"),
        ({"workers": 2, "hosts": ("a",), "launch": "ssh {host}"}, "1 hosts"),
        ({"hosts": ("a",), "launch": "ssh"}, "where {host} goes"),
        ({"grace": 0}, "--grace 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        JobSpec(("true",), "folder", **given)


def test_the_supervisor_imports_no_jax(tmp_path: Path) -> None:
    line = start_line(JobSpec(("true",), str(tmp_path)))
    line[2] = line[2].replace("sys.exit(", "print([m for m in sys.modules if 'jax' in m and 'cjax' not in m]); (")
    done = subprocess.run(line, capture_output=True, text=True, timeout=20)
    assert done.stdout.strip() == "[]" and not done.stderr
    assert json.loads(JobFolder(tmp_path).state.read_text())["status"] == "done"


@pytest.mark.parametrize("room", [True, False])
def test_a_job_whose_disk_is_full_waits_for_room_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], room: bool
) -> None:
    module = cjax.job.supervisor
    written, tries = write_whole, []

    def full(path: Path, text: str) -> None:
        state = json.loads(text)
        if state["incarnation"] == 2 and len(tries) < (3 if room else 10**6):
            tries.append(text)
            if not room and len(tries) == 3:
                supervisor.tell(signal.SIGTERM)
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, text)

    def no_line(path: Path, values: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    monkeypatch.setattr(module, "append_line", no_line)
    monkeypatch.setattr(module, "_ROOM", 0.2)
    count = f"echo x >> {tmp_path}/starts; test $(wc -l < {tmp_path}/starts) = 2"  # fails once
    supervisor = module.Supervisor(JobSpec(("sh", "-c", count), str(tmp_path)))
    assert supervisor.run() == (0 if room else 75)
    said = capfd.readouterr().err
    assert said.count("Workers start when that can be written") == 1 and "will not know of this start" in said
    assert (tmp_path / "starts").read_text() == "x\n" * (2 if room else 1) and len(tries) >= 3


def test_a_folder_that_can_not_be_written_ends_a_job_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "state.json").mkdir()  # which no file can replace
    ran = subprocess.run(start_line(JobSpec(("true",), str(tmp_path))), capture_output=True, text=True, timeout=20)
    assert ran.returncode == 1 and "state.json" in ran.stderr and "Traceback" not in ran.stderr
