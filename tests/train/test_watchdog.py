"""Runs that hang, with nobody who watches from outside."""

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forked import MODULES, Forks

from cjax.job.beat import COMPILING, TRAINING, Doing
from cjax.train import fit
from cjax.train.watchdog import SILENCE, STEPS, Watchdog

from .conftest import SmallData, SmallProgram

# Steps of a hundredth of a second, and then none.
HANGS = """
import hashlib, sys, time
from train.conftest import SmallData, SmallProgram
from cjax.train import fit

class Hanging(SmallData):
    def batches(self, start=0):
        for number, batch in enumerate(super().batches(start)):
            if number == 8 and sys.argv[2] == "python":
                time.sleep(60)
            if number == 8 and sys.argv[2] == "native":
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # in C for minutes
            yield batch

fit(SmallProgram(), Hanging(), steps=20, folder=sys.argv[1], resume="auto", checkpoint_every=3, watchdog=1.5)
"""


@pytest.mark.parametrize("where", ["python", "native"])
def test_a_run_that_hangs_says_where_and_ends_with_again(tmp_path: Path, forks: Forks, where: str) -> None:
    begin = time.monotonic()
    done = forks.run(["-c", HANGS, str(tmp_path), where], os.environ)
    assert done.returncode == 75 and time.monotonic() - begin < 40, done.stderr
    assert "nothing new for" in done.stderr and "(training, after step 7)" in done.stderr
    assert "in batches\n" in done.stderr, "the stack of the thread that hangs"
    data = SmallData()
    assert fit(SmallProgram(), data, steps=20, folder=tmp_path, resume="auto", watchdog="auto").step == 20
    assert data.read[0] == 4 * 6, "behind the last checkpoint"


# Two processes of a launcher that watches nothing; the second is stopped, and the first waits for it in a collective.
STOPS = """
import functools, os, signal
import job.train as train

train.fit, whole = functools.partial(train.fit, watchdog=3.0), train.Samples.batches

def batches(self, start=0):
    for number, batch in enumerate(whole(self, start)):
        if number == 8 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        yield batch

train.Samples.batches = batches
train.main(40, 0.02, "data=2", 20, "0")
"""


@pytest.mark.full
def test_who_waits_for_a_process_that_is_stopped_ends(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
    said |= {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": MODULES, "FOLDER": str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", STOPS], env=said | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        _, err = both[0].communicate(timeout=120)
        assert both[0].returncode == 75 and "this process hangs" in err and "(training, after step" in err
    finally:
        for each in both:
            each.kill()
            each.communicate()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a watchdog would have ended this process."""
    times: list[float] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, still: (times.append(still), self._over.set()))
    return times


def test_five_steps_are_waited_for_and_what_is_no_step_for_longer(ended: list[float]) -> None:
    doing = Doing()
    dog = Watchdog(doing, 0.2)
    assert dog._limit(0.2) == SILENCE, "starting"
    doing.turn(TRAINING)
    assert dog._limit(0.2) == 0.2
    doing.step(1)
    time.sleep(0.3)
    doing.step(2)
    assert 0.3 * STEPS <= dog._limit(0.2) < 1.0 * STEPS
    with doing.during("saving"):
        assert dog._limit(0.2) == SILENCE
    doing.turn(COMPILING)
    with dog:
        time.sleep(0.6)
    assert ended == [] and dog._limit(0.2) == SILENCE


def test_steps_that_go_on_are_no_hang(ended: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    doing, seconds = Doing(), itertools.count()
    doing.turn(TRAINING)
    dog = Watchdog(doing, 5.0)
    monkeypatch.setattr("cjax.train.watchdog.time.monotonic", lambda: next(seconds) / 2)

    def wait(_: float) -> bool:
        if next(seconds) < 200:
            doing.step(1)
        return dog._over.is_set()

    monkeypatch.setattr(dog._over, "wait", wait)
    dog._watch(5.0)
    assert len(ended) == 1 and next(seconds) > 200


def test_only_silence_of_its_own_time_counts(ended: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    doing, looks = Doing(), iter([0.0, *(1000.0 + number for number in range(99))])  # asleep for a thousand seconds
    doing.turn(TRAINING)
    dog = Watchdog(doing, 5.0)
    monkeypatch.setattr("cjax.train.watchdog.time.monotonic", lambda: next(looks))
    monkeypatch.setattr(dog._over, "wait", lambda seconds: dog._over.is_set())
    dog._watch(5.0)
    assert ended == [6.0]


def test_compiling_in_a_step_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    doing = Doing()
    doing.turn(TRAINING)
    dog, me = Watchdog(doing, 0.5), threading.get_ident()
    monkeypatch.setattr("cjax.train.watchdog.is_compiling", lambda thread: thread == me)
    assert dog._limit(0.5) == SILENCE, "of the thread that trains"


@pytest.mark.parametrize("wrong", [0, -1.0, True, "always", float("inf"), float("nan")])
def test_what_is_no_patience_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match='it needs watchdog="auto", or seconds above 0'):
        fit(SmallProgram(), SmallData(), steps=1, watchdog=wrong)
    assert not [each for each in threading.enumerate() if each.name == "watchdog"]
