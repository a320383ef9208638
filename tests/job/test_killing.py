"""Jobs that are killed with -9 at random moments: nothing that was committed is lost, nothing is done twice."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cjax.job import AGAIN
from cjax.job.files import read_lines, read_object
from cjax.job.folder import JobFolder
from cjax.job.status import ask_for, status_of

from .killing import PHASES, SCRIPT, Killing, seen_otherwise


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody kills."""
    job = Killing(tmp_path_factory.mktemp("whole"), workers=1, steps=60, pause=0.0, every=20)
    assert job.run(0) == 0
    return job.folder


@pytest.mark.full
def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, whole: Path) -> None:
    """Of the worker in a step and while a checkpoint gets its name, and of whoever watches."""
    job = Killing(tmp_path, seed=864, workers=1, phases=("training", "renaming", "saving"))
    assert job.run(2) == 0
    assert [(kill["who"], kill["in"]) for kill in job.kills] == [
        ("first worker", "renaming"),
        ("supervisor", "training"),
    ]
    assert not job.check(whole)


@pytest.mark.full
def test_a_job_that_is_told_to_stop_at_any_moment_does_nothing_twice(tmp_path: Path, whole: Path) -> None:
    job = Killing(tmp_path)
    phases = ("importing", "starting", "compiling", "training", "evaluating", "saving", "restoring", "evaluating")
    assert [job.stop(phase) for phase in phases] == [AGAIN] * len(phases)
    assert job.run(0) == 0 and not job.check(whole)
    assert status_of(tmp_path).repeated == 0
    # And every step and evaluation is in the metrics once, as if nobody had stopped it.
    lines, wanted = ([of_step(line) for line in read_lines(folder / "metrics.jsonl")] for folder in (tmp_path, whole))
    assert [line for line in lines if "loss" in line] == [line for line in wanted if "loss" in line]
    assert len([line for line in lines if "validation_loss" in line]) == 12


def of_step(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name in ("step", "loss", "validation_loss")}


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=-1", "auto"])
def test_a_resize_keeps_the_batch_the_order_and_the_random_numbers(tmp_path: Path, whole: Path, plan: str) -> None:
    job = Killing(tmp_path, plan=plan, pause=0.3)
    job._start()
    for size in (1, 2):
        assert job._await("training", 0)
        ask_for(tmp_path, size)
        while JobFolder(tmp_path).asked.exists() or len(status_of(tmp_path).incarnations) < size + 1:
            time.sleep(0.02)
    assert job._supervisor.wait() == 0
    status = status_of(tmp_path)
    assert [each.workers for each in status.incarnations] == [2, 1, 2] and status.repeated == 0
    final, wanted = (np.load(folder / "final.npz") for folder in (tmp_path, whole))
    assert not seen_otherwise(final["['seen']"], 60)
    for name in wanted:
        np.testing.assert_allclose(final[name], wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("workers", "spare"), [(1, False), (2, False), (2, True)])
def test_kills_in_every_phase(tmp_path: Path, whole: Path, workers: int, spare: bool) -> None:
    """The same for 200 kills: tests/job/killing.py, whose log is in docs/results."""
    job = Killing(tmp_path, seed=workers, workers=workers, steps=60, spare=spare)
    assert job.run(20) == 0
    assert not job.check(whole) and len({kill["in"] for kill in job.kills}) > len(PHASES) // 2


@pytest.mark.full
def test_kills_between_sizes_and_plans_change_nothing_but_rounding(tmp_path: Path) -> None:
    """The same for 80: tests/job/killing.py --double, whose log is in docs/results."""
    plans, more = "data=-1 zero=1|data=-1 tensor=2|data=-1 zero=3", {"devices": 4, "is_double": True, "steps": 60}
    whole = Killing(tmp_path / "whole", pause=0.0, every=100, plan="data=-1 zero=1", **more)
    assert whole.run(0) == 0
    job = Killing(tmp_path / "killed", seed=3, plan=plans, resizes=0.5, **more)
    assert job.run(8) == 0 and not job.check(whole.folder)
    assert {each.workers for each in status_of(job.folder).incarnations} == {1, 2} and job.farthest < 1e-9


@pytest.mark.full
def test_kills_cost_no_more_than_snapshots_allow(tmp_path: Path, whole: Path) -> None:
    phases = ("training", "training", "snapshotting", "evaluating", "restoring")
    job = Killing(tmp_path, seed=4, steps=60, pause=0.05, every=25, snapshots=2, phases=phases)
    assert job.run(8) == 0
    assert not job.check(whole) and any(kill["in"] == "snapshotting" for kill in job.kills)
    logs = "".join(each.read_text() for each in (tmp_path / "job" / "logs").iterdir())
    place = Path((read_object(tmp_path / "snapshots.json") or {})["place"])
    assert "from a snapshot" in logs and not place.exists()


@pytest.mark.full
def test_a_host_that_is_lost_with_its_memory_costs_no_more_than_its_peer_has(tmp_path: Path) -> None:
    more: dict[str, Any] = {"steps": 60, "plan": "zero=3"}  # each part lives once
    whole = Killing(tmp_path / "whole", pause=0.0, every=100, **more)
    assert whole.run(0) == 0
    phases = ("training", "restoring", "snapshotting")
    job = Killing(
        tmp_path / "lost", seed=2, pause=0.05, every=40, snapshots=2, phases=phases, hosts_are_lost=True, **more
    )
    assert job.run(4) == 0 and not job.check(whole.folder)
    logs = "".join(each.read_text() for each in (job.folder / "job" / "logs").iterdir())
    assert "from a snapshot" in logs and {kill["who"] for kill in job.kills} > {"worker"}


def test_a_sample_that_is_lost_or_seen_twice_is_told() -> None:
    order = np.random.default_rng(0).permutation(100)
    seen = np.zeros(100)
    seen[order[:40]] = -1
    assert not seen_otherwise(seen, 5)
    seen[order[3]], seen[order[4]] = -2, 0
    assert len(seen_otherwise(seen, 5)) == 2
    assert SCRIPT.is_file() and os.access(SCRIPT, os.R_OK)
