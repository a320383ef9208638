"""What a run keeps wherever it is told to stop, killed, or out of disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cjax.checkpoint import inspect
from cjax.job.lock import is_locked
from cjax.job.member import Member
from cjax.train import Callback, fit
from cjax.train.signals import StopRequest

from .conftest import SmallData, SmallProgram


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote, without its speed."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "loss", "validation_loss") if name in line} for line in found]


def test_auto_begins_anew_where_nothing_was_kept_and_goes_on_where_something_was(tmp_path: Path) -> None:
    class Killed(BaseException): ...

    class Dying(SmallData):
        def batches(self, start: int = 0) -> Any:
            for batch in super().batches(start):
                if len(self.read) > 7:
                    raise Killed
                yield batch

    for first in (0, 4 * 5):
        data = Dying()
        with pytest.raises(Killed):
            fit(SmallProgram(), data, steps=30, folder=tmp_path, resume="auto", checkpoint_every=5 if first else 10)
        assert data.read[0] == 0, "of the first there is no checkpoint"
    data = SmallData()
    result = fit(SmallProgram(), data, steps=30, folder=tmp_path, resume="auto", log_every=1)
    assert data.read[0] == 4 * 5
    np.testing.assert_array_equal(result.state.w, fit(SmallProgram(), SmallData(), steps=30).state.w)
    assert [line["step"] for line in lines(tmp_path)] == list(range(6, 31)), "a killed run's lines are dropped"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_an_evaluation_that_a_signal_cuts_short_is_made_when_the_run_goes_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    class Interrupted(SmallData):
        asked = 0

        def validation(self) -> Any:
            for index in range(4):
                self.asked += 1
                if self.asked == 6:  # in the second evaluation
                    os.kill(os.getpid(), number)
                yield self.make(np.arange(1000 + index * 8, 1008 + index * 8))

    every = {"evaluate_every": 5, "checkpoint_every": 100, "log_every": 1}
    data = Interrupted()
    result = fit(SmallProgram(), data, steps=30, folder=tmp_path / "cut", **every)
    assert (result.ended, result.step, result.exit_code, data.asked) == (number.name, 10, code, 6)
    assert inspect(tmp_path / "cut").step == 10
    data.asked = 10
    assert fit(SmallProgram(), data, steps=30, folder=tmp_path / "cut", resume=True, **every).exit_code == 0
    data.asked = 10
    fit(SmallProgram(), data, steps=30, folder=tmp_path / "whole", **every)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_a_signal_before_the_first_step_is_heeded(tmp_path: Path) -> None:
    class Late(SmallProgram):
        def init(self, seed: int = 0) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().init(seed)

    program = Late()
    result = fit(program, SmallData(), steps=30, folder=tmp_path)
    assert (result.ended, result.step, result.exit_code, program.num_steps) == ("SIGTERM", 0, 75, 0)
    assert result.checkpoint is None, "there is nothing that would not be made again"
    assert fit(SmallProgram(), SmallData(), steps=3, folder=tmp_path, resume="auto").step == 3


def test_a_full_disk_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import cjax.checkpoint.storage as storage

    written, settled, full = storage.put_in_place, storage.settle, [10]

    def put_in_place(unfinished: Path, path: Path) -> None:
        if int(path.name) in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(unfinished, path)

    def settle(path: Path) -> None:
        if path.name == "15":  # before anything of it is written
            raise OSError(errno.ENOSPC, "No space left on device")
        settled(path)

    monkeypatch.setattr(storage, "put_in_place", put_in_place)
    monkeypatch.setattr(storage, "settle", settle)
    result = fit(SmallProgram(), SmallData(), steps=20, folder=tmp_path, checkpoint_every=5, keep=1)
    assert result.step == 20 and inspect(tmp_path).step == 20
    said = capfd.readouterr().err
    for step, last in ((10, 5), (15, 5)):
        assert f"checkpoints/{step} could not be written" in said and f"the last whole one is {tmp_path}" in said, last
    full.append(30)
    with pytest.raises(OSError, match="the last whole one is"):
        fit(SmallProgram(), SmallData(), steps=30, folder=tmp_path, checkpoint_every=50, keep=1, resume=True)
    assert inspect(tmp_path).step == 20, "at the end there is nothing to go on to"


FILLED = """
import contextlib, os, sys, time
from pathlib import Path
from train.conftest import SmallData, SmallProgram
from cjax.checkpoint import inspect
from cjax.train import fit

run, filler = Path(sys.argv[1]) / "run", Path(sys.argv[1]) / "filler"


class Data(SmallData):
    def batches(self, start=0):
        for number, batch in enumerate(super().batches(start)):
            if number == 12:
                time.sleep(1.0)  # until what was begun at step 10 is on the disk
                file = os.open(filler, os.O_WRONLY | os.O_CREAT)
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file, bytes(512))
                os.close(file)
            if number == 24:
                print("full:", inspect(run).step, flush=True)
                filler.unlink()
            yield batch


result = fit(SmallProgram(), Data(), steps=30, folder=run, checkpoint_every=5, keep=1, log_every=1)
kept = SmallProgram().restore(result.checkpoint)
print("then:", result.step, inspect(run).step, float(kept.w[0] - result.state.w[0]))
"""


@pytest.mark.full
def test_a_disk_that_is_really_full_costs_no_step_and_not_the_last_checkpoint(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("a small disk of its own takes the right to mount one")
    code = f'mount -t tmpfs -o size=2m tmpfs "$1" && exec "{sys.executable}" -c "$2" "$1"'
    places = [str(Path(__file__).parents[up]) for up in (2, 1)]
    said = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    line = ["unshare", "-m", "sh", "-c", code, "sh", tmp_path, FILLED]
    ran = subprocess.run(line, env=said, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["full: 10", "then: 30 30 0.0"]
    for step in (15, 20):
        assert f"checkpoints/{step} could not be written" in ran.stderr and "checkpoints/10" in ran.stderr
    assert "No space left on device" in ran.stderr


TWICE = """
import hashlib, sys, time
import cjax.train.signals as signals

with signals.StopRequest():
    print("there", flush=True)
    if sys.argv[1] == "native":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # in C for minutes: no handler is run
    else:
        time.sleep(60)
"""


@pytest.mark.parametrize("where", ["native", pytest.param("python", marks=pytest.mark.full)])
def test_two_interrupts_end_the_process_at_once(where: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TWICE, where], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as ran:
        assert ran.stdout is not None and ran.stdout.readline() == b"there\n"
        try:
            ran.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert ran.poll() is None, "the first is a request"
            ran.send_signal(signal.SIGINT)
            assert ran.wait(5) in (130, -signal.SIGINT)
        finally:
            ran.kill()


def test_several_processes_ask_each_other_about_every_second() -> None:
    stop = StopRequest()
    assert all(stop.is_asked(step, 1, 10) for step in range(20)), "alone it costs nothing"
    assert stop.is_asked(3, 2, 10), "not asked yet"
    for seconds, every in ((0.0, 10), (0.3, 3), (5.0, 1)):
        stop._every = max(1, int(1e3 / max(int(seconds * 1e3), 1)))
        assert [step for step in range(1, 13) if stop.is_asked(step, 2, 10)] == list(range(every, 13, every))


def test_two_runs_at_once_in_a_folder_are_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    class Second(Callback):
        def on_step(self, training: Any, step: int, values: Any) -> None:
            if step == 2:
                for resume in (False, "auto"):
                    with pytest.raises(BlockingIOError) as error:
                        fit(SmallProgram(), SmallData(), steps=2, folder=tmp_path, resume=resume)
                    refused.append(str(error.value))

    fit(SmallProgram(), SmallData(), steps=4, folder=tmp_path, callbacks=[Second()])
    assert len(refused) == 2 and all(f"another run trains in {tmp_path} now" in each for each in refused)
    assert not is_locked(tmp_path)
    assert fit(SmallProgram(), SmallData(), steps=6, folder=tmp_path, resume=True).step == 6


def test_where_a_disk_has_no_locks_a_run_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("cjax.job.lock.fcntl.flock", flock)
    assert fit(SmallProgram(), SmallData(), steps=2, folder=tmp_path).step == 2 and not is_locked(tmp_path)
    assert "has no locks" in caplog.text


def test_of_a_job_a_run_from_a_state_goes_on_and_the_folder_is_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["cjax.train.fit"]
    whole = fit(SmallProgram(), SmallData(), steps=20)
    monkeypatch.setattr(module, "member", lambda: Member(tmp_path, 1, 0, 0))

    def incarnation(data: SmallData) -> Any:
        before = fit(SmallProgram(), SmallData(), steps=5, folder=tmp_path / "before", resume="auto")
        monkeypatch.setattr(module, "_taken", set())  # a process of its own
        return fit(
            SmallProgram(), data, steps=20, state=before.state, samples=before.samples, checkpoint_every=5, log_every=1
        )

    class Dying(SmallData):
        after = 0

        def batches(self, start: int = 0) -> Any:
            for number, batch in enumerate(super().batches(start)):
                if number == self.after:
                    raise KeyboardInterrupt
                yield batch

    for after in (2, 8):  # killed before the first checkpoint, and behind it
        data = Dying()
        data.after = after
        with pytest.raises(KeyboardInterrupt):
            incarnation(data)
        assert data.read[0] == 4 * 5, "from the state that was given"
    data = SmallData()
    result = incarnation(data)
    assert data.read[0] == 4 * 10, "behind the checkpoint"
    np.testing.assert_array_equal(result.state.w, whole.state.w)
    with pytest.raises(ValueError, match="give folder=... to each fit"):
        fit(SmallProgram(), SmallData(), steps=30)
    assert fit(SmallProgram(), SmallData(), steps=2, folder=tmp_path / "second").step == 2
    with pytest.raises(ValueError, match='no state but with resume="auto"'):
        fit(SmallProgram(), SmallData(), steps=2, folder=tmp_path, resume=True, state=result.state)
