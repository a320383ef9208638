"""Jobs that are killed with -9 at random moments: nothing that was committed is lost, nothing is done twice."""

import os
from pathlib import Path

import numpy as np
import pytest

from .killing import PHASES, SCRIPT, Killing, seen_otherwise


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody kills."""
    job = Killing(tmp_path_factory.mktemp("whole"), workers=1, steps=60, pause=0.0, every=20)
    assert job.run(0) == 0
    return job.folder


def test_three_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, whole: Path) -> None:
    """Of the worker in a step and while a checkpoint gets its name, and of whoever watches."""
    job = Killing(tmp_path, seed=4, workers=1, phases=("training", "renaming", "saving"))
    assert job.run(3) == 0
    assert len(job.kills) == 3 and len({kill["who"] for kill in job.kills}) > 1, job.kills
    assert not job.check(whole)


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_kills_in_every_phase(tmp_path: Path, whole: Path, workers: int) -> None:
    """The same for 200 kills: tests/job/killing.py, whose log is in docs/results."""
    job = Killing(tmp_path, seed=workers, workers=workers, steps=60)
    assert job.run(20) == 0
    assert not job.check(whole) and len({kill["in"] for kill in job.kills}) > len(PHASES) // 2


def test_a_sample_that_is_lost_or_seen_twice_is_told() -> None:
    order = np.random.default_rng(0).permutation(100)
    seen = np.zeros(100)
    seen[order[:40]] = -1
    assert not seen_otherwise(seen, 5)
    seen[order[3]], seen[order[4]] = -2, 0
    assert len(seen_otherwise(seen, 5)) == 2
    assert SCRIPT.is_file() and os.access(SCRIPT, os.R_OK)
