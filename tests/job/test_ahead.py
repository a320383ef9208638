"""A resize whose workers get ready while the present ones train: real processes, that count."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import cjax.job.ahead
from cjax.job.ahead import how_far
from cjax.job.files import read_lines
from cjax.job.spec import JobSpec
from cjax.job.status import ask_for, status_of
from cjax.job.workers import started

from .counting import ends, nothing_twice, state, until

SLOW = "time.sleep(0.05)"


def begun(folder: Any, step: int = 3) -> None:
    until(lambda: read_lines(folder.history) and status_of(folder.run).step > step)


def steps_of(folder: Any) -> list[tuple[int, int, int]]:
    return [(each.workers, each.first or 0, each.step or 0) for each in status_of(folder.run).incarnations]


def test_present_workers_train_until_the_new_ones_are_ready(job: Any) -> None:
    supervisor, folder = job(SLOW, ready="time.sleep(0.7 * (mine.incarnation > 1))")
    begun(folder)
    asked = status_of(folder.run).step
    ask_for(folder.run, 3)
    until(lambda: state(folder).get("next") == 2)
    assert "to 3 workers, they start, import and compile" in status_of(folder.run).resize
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0, err
    resized, done = ends(folder)
    assert resized["kind"] == "resized" and nothing_twice(resized, done)
    assert resized["step"] >= asked + 5, "steps were done while the others got ready"
    assert [workers for workers, *_ in steps_of(folder)] == [2, 3] and not status_of(folder.run).resize
    assert done["seconds"].get("importing") is None, "what was done beside the training is none of the job's time"
    start = read_lines(folder.history)[2]
    assert start["event"] == "start" and start["time"] - resized["time"] < 0.5


@pytest.mark.full
def test_where_the_new_ones_fail_the_present_ones_go_on(job: Any) -> None:
    supervisor, folder = job(SLOW, ready="if mine.incarnation > 1: raise ZeroDivisionError('three do not divide it')")
    begun(folder)
    ask_for(folder.run, 3)
    until(lambda: "has failed" in status_of(folder.run).resize)
    pids = {pid for pid, _ in state(folder)["pids"]}
    assert len(pids) == 2
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and "the resize to 3 workers has failed: worker" in err
    assert "three do not divide it" in err and "--stop-first" in err
    assert [(line["kind"], line["first"], line["step"]) for line in ends(folder)] == [("done", 0, 40)]


@pytest.mark.full("present")
@pytest.mark.parametrize("who", ["present", "supervisor"])
def test_a_death_while_others_get_ready(job: Any, who: str) -> None:
    slow = f"{SLOW}; (step, mine.incarnation) == (12, 1) and time.sleep(1.5)"
    supervisor, folder = job(slow, ready="time.sleep(1.0 * (mine.incarnation > 1))")
    begun(folder, 10)
    ask_for(folder.run, 3)
    pids = until(lambda: len(state(folder)["pids"]) == 5 and state(folder)["pids"])
    if who == "present":
        os.kill(pids[1][0], signal.SIGKILL)
        _, err = supervisor.communicate(timeout=30)
        assert supervisor.returncode == 0, err
        # Who was on the way takes over; nobody of an older start is left, and no step of the last save is lost.
        assert steps_of(folder)[1:] == [(3, 10, 40)] and state(folder)["incarnation"] == 2
    else:
        supervisor.kill()
        supervisor.wait()
        other, _ = job(SLOW)
        assert other.wait(30) == 0
        assert [line["kind"] for line in ends(folder)] == ["orphaned", "done"]
        assert state(folder)["incarnation"] == 3, "no number is given twice"
    assert all(started(pid) != since for pid, since in pids)


@pytest.mark.full("2")
@pytest.mark.parametrize("number", [2, 4])
def test_the_last_word_counts(job: Any, number: int) -> None:
    supervisor, folder = job(SLOW, ready="time.sleep(0.8 * (mine.incarnation == 2))")
    begun(folder)
    ask_for(folder.run, 3)
    pids = until(lambda: len(state(folder)["pids"]) == 5 and state(folder)["pids"])
    ask_for(folder.run, number)
    assert supervisor.wait(30) == 0
    assert [workers for workers, *_ in steps_of(folder)] == ([2] if number == 2 else [2, 4])
    assert all(started(pid) != since for pid, since in pids)


def test_who_is_told_to_stop_leaves_nobody_behind(job: Any) -> None:
    supervisor, folder = job(SLOW, ready="time.sleep(20 * (mine.incarnation > 1))")
    begun(folder)
    ask_for(folder.run, 3)
    pids = until(lambda: len(state(folder)["pids"]) == 5 and state(folder)["pids"])
    supervisor.terminate()
    assert supervisor.wait(10) == 75 and state(folder)["status"] == "stopped" and not state(folder)["next"]
    assert all(started(pid) != since for pid, since in pids)


def test_devices_that_two_can_not_share_are_taken_when_the_others_have_left(job: Any, tmp_path: Path) -> None:
    ready = "if mine.incarnation > 1: (mine.folder / 'devices').write_text(str((mine.folder / 'saved').exists()))"
    supervisor, folder = job(SLOW, early="platform = 'gpu'", ready=ready)
    begun(folder)
    ask_for(folder.run, 3)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and "two processes do not share the memory of a gpu" in err
    assert (tmp_path / "devices").read_text() == "True", "when the others had saved"
    assert nothing_twice(*ends(folder)) and [workers for workers, *_ in steps_of(folder)] == [2, 3]


BEAT = {"platform": "cpu", "ended": None}


@pytest.mark.parametrize(
    ("beats", "more", "free", "where", "why"),
    [
        ([BEAT, BEAT], {}, 2**50, "fit", "start, import and compile"),
        ([BEAT, None], {}, 2**50, "", "no fit is under way"),
        ([BEAT, {**BEAT, "platform": None}], {}, 2**50, "", "no fit is under way"),
        ([BEAT, {**BEAT, "ended": "steps"}], {}, 2**50, "", "no fit is under way"),
        ([{**BEAT, "platform": "gpu"}] * 2, {}, 2**50, "initialize", "memory of a gpu"),
        ([BEAT, BEAT], {"hosts": ("a", "b", "c")}, 2**50, "initialize", "how much memory the hosts have"),
        ([BEAT, BEAT], {}, 2**10, "", "beside them 3 more would take"),
    ],
)
def test_how_far_new_workers_go_is_decided_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, beats: Any, more: Any, free: int, where: str, why: str
) -> None:
    monkeypatch.setattr(cjax.job.ahead, "free_memory", lambda: free)
    found, said = how_far(JobSpec(("true",), "folder", 2, **more), beats, [os.getpid()] * 2, 3)
    assert found == where and why in said


def test_free_memory_is_what_a_container_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    most, taken = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(cjax.job.ahead, "_LIMITED", (most, taken))
    whole = cjax.job.ahead.free_memory()
    assert whole > 2**20
    taken.write_text("1048576\n")
    most.write_text("3145728\n")
    assert cjax.job.ahead.free_memory() == 2**21
    most.write_text("max\n")
    assert cjax.job.ahead.free_memory() > 2**21
    assert cjax.job.ahead.resident(os.getpid()) > 2**20 and cjax.job.ahead.resident(2**30) == 0


@pytest.mark.full("True")
@pytest.mark.parametrize("is_over", [True, False])
def test_who_has_kept_all_is_not_waited_for_and_has_its_time(job: Any, tmp_path: Path, is_over: bool) -> None:
    then = "(mine.folder / 'left').write_text('')" if is_over else "beat.turn('training'); time.sleep(20)"
    supervisor, folder = job(SLOW, late=f"if number == 1: time.sleep(1.2); {then}")
    begun(folder)
    old = state(folder)["pids"]
    ask_for(folder.run, 3)
    until(lambda: state(folder).get("leaving") == 1)
    assert len(old) == 2 and all(started(pid) == since for pid, since in old)
    until(lambda: all(started(pid) != since for pid, since in old))
    if is_over:
        assert (tmp_path / "left").exists()
    else:
        assert state(folder)["status"] == "running", "who begins something else is ended, and not with the job"
    until(lambda: not state(folder)["leaving"])
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0, err
    assert nothing_twice(*ends(folder)) and [workers for workers, *_ in steps_of(folder)] == [2, 3]


def test_who_has_no_room_for_both_has_the_present_ones_stop_first(job: Any) -> None:
    supervisor, folder = job(SLOW, ready="time.sleep(0.7 * (mine.incarnation > 1))")
    begun(folder)
    ask_for(folder.run, 3, stop_first=True)
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0 and "from 2 to 3 workers: they stop first" in err
    resized, done = ends(folder)
    assert nothing_twice(resized, done) and done["seconds"]["importing"] > 0
    begins = [line["time"] for line in read_lines(folder.history) if line["event"] == "start"]
    assert begins[1] - resized["time"] < 0.5 and [workers for workers, *_ in steps_of(folder)] == [2, 3]
