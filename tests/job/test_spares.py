"""Processes that wait beside the workers and take over when these end: real ones, that count."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cjax.job.ahead import is_time_for_spares, no_room
from cjax.job.beat import READY, TRAINING, read_beat
from cjax.job.files import read_lines
from cjax.job.folder import JobFolder
from cjax.job.status import ask_for, status_of
from cjax.job.workers import started

from .counting import ends, nothing_twice, state, until

SLOW = "time.sleep(0.05)"


def are_ready(folder: JobFolder, number: int, size: int = 2) -> list[list[Any]] | None:
    """The spares of an incarnation, when all wait."""
    beats = [read_beat(folder.beat(number, rank)) for rank in range(size)]
    ready = all(beat is not None and beat["phase"] == READY for beat in beats)
    return state(folder)["pids"][size:] if ready and state(folder).get("next") == number else None


def sizes(folder: JobFolder) -> list[int]:
    return [line["workers"] for line in read_lines(folder.history) if line["event"] == "start"]


def test_spares_take_over_when_a_worker_dies(job: Any) -> None:
    supervisor, folder = job(SLOW, spare=True)
    spares = until(lambda: read_lines(folder.history) and are_ready(folder, 2))
    old = state(folder)["pids"][:2]
    assert not status_of(folder.run).resize, "of the same size"
    os.kill(old[1][0], signal.SIGKILL)
    until(lambda: state(folder)["incarnation"] == 2)
    assert state(folder)["pids"][:2] == spares, "nobody was started for it"
    again = until(lambda: are_ready(folder, 3))
    assert len(spares) == len(again) == 2 and all(started(pid) != since for pid, since in old)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and "worker 1 ended by SIGKILL" in err, err
    died, done = ends(folder)
    assert (died["kind"], done["kind"]) == ("died", "done") and nothing_twice({"step": died["step"] // 10 * 10}, done)
    assert done["seconds"].get("importing") is None, "which was done beside the training"
    assert all(started(pid) != since for pid, since in [*spares, *again]), "nobody waits for a job that is done"


def test_without_the_option_nobody_waits(job: Any) -> None:
    supervisor, folder = job(SLOW)
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > 10)
    assert len(state(folder)["pids"]) == 2 and not state(folder)["next"]
    assert supervisor.wait(30) == 0


def test_where_spares_fail_the_job_goes_on_and_starts_as_without(job: Any) -> None:
    supervisor, folder = job(SLOW, early="if os.environ.get('CJAX_AHEAD'): raise ZeroDivisionError('one')", spare=True)
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > 15)
    assert len(state(folder)["pids"]) == 2 and not state(folder)["next"]
    os.kill(state(folder)["pids"][0][0], signal.SIGKILL)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and sizes(folder) == [2, 2]
    said = [line for line in err.splitlines() if "no spare workers before the next start" in line]
    assert len(said) == 2, "once for each start"
    assert "spare worker 0 ended with status 1" in said[0] or "spare worker 1 ended with status 1" in said[0]
    assert Path(said[0].partition("(")[2].partition(")")[0]).read_text().endswith("ZeroDivisionError: one\n")


def test_spares_that_end_with_the_workers_do_not_take_over(job: Any) -> None:
    """As where a machine that runs out of memory ends whoever it likes."""
    supervisor, folder = job(SLOW, spare=True)
    spares = until(lambda: read_lines(folder.history) and are_ready(folder, 2))
    for pid, _ in [*spares, state(folder)["pids"][0]]:
        os.kill(pid, signal.SIGKILL)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0, err
    starts = [line["incarnation"] for line in read_lines(folder.history) if line["event"] == "start"]
    assert starts == [1, 3] and [line["kind"] for line in ends(folder)] == ["died", "done"]


def test_a_resize_takes_the_place_of_spares_and_has_spares_of_its_size(job: Any) -> None:
    supervisor, folder = job(SLOW, spare=True)
    spares = until(lambda: read_lines(folder.history) and are_ready(folder, 2))
    ask_for(folder.run, 3)
    until(lambda: state(folder)["size"] == 3)
    assert all(started(pid) != since for pid, since in spares)
    until(lambda: are_ready(folder, 4, 3))
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and sizes(folder) == [2, 3], err
    assert nothing_twice(*ends(folder))


def test_spares_may_wait_longer_than_anything_else_may_take(job: Any) -> None:
    supervisor, folder = job("time.sleep(0.1)", spare=True, silence=1.5)
    until(lambda: read_lines(folder.history) and are_ready(folder, 2))
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and sizes(folder) == [2] and "hangs" not in err, err


@pytest.mark.parametrize("who", ["told", "killed"])
def test_spares_end_with_their_supervisor(job: Any, who: str) -> None:
    supervisor, folder = job(SLOW, spare=True)
    spares = until(lambda: read_lines(folder.history) and are_ready(folder, 2))
    supervisor.terminate() if who == "told" else supervisor.kill()
    assert supervisor.wait(10) == (75 if who == "told" else -signal.SIGKILL)
    until(lambda: all(started(pid) != since for pid, since in spares))


def test_spares_start_when_the_first_steps_are_done_and_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    beat = {"phase": TRAINING, "first": 10, "step": 11}
    assert is_time_for_spares([beat, beat])
    for other in (None, {**beat, "step": 10}, {**beat, "phase": "compiling"}, {**beat, "step": None}):
        assert not is_time_for_spares([beat, other])
    mine = [os.getpid()]
    monkeypatch.setattr("cjax.job.ahead.free_memory", lambda: 2**50)
    assert no_room(mine, 2) == ""
    monkeypatch.setattr("cjax.job.ahead.free_memory", lambda: 2**20)
    assert "2 more would take" in no_room(mine, 2) and "and 1 are free" in no_room(mine, 2)
