"""What a policy is told of a job: all, what it learned, less, or what is wrong."""

import math
from pathlib import Path

import numpy as np
import pytest

from cjax.scheduler.replay.knowledge import Knowledge, Seen, error_of
from cjax.scheduler.replay.simulated import SimulatedJob
from cjax.scheduler.replay.workload import read_workload

from .logs import write_log

NODES = {"a": 4}


def job_of(folder: Path, learns: bool = False) -> SimulatedJob:
    path = write_log(folder)
    return SimulatedJob(read_workload(path, path.parent / "speeds.csv")[0], True, 30.0, learns=learns)


def test_what_is_left_is_told_to_who_may_know_it(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.progress = 0.25 * job.work / job.model.base_batch
    told = Seen(Knowledge(), NODES)(job)
    assert told.work_left == pytest.approx(0.75 * job.work) and told.work_done == pytest.approx(0.25 * job.work)
    assert Seen(Knowledge(work=False), NODES)(job).work_left is None
    assert Seen(Knowledge(), NODES)(job_of(tmp_path, learns=True)).work_left is None, "it has not run yet"


def test_what_is_told_wrong_is_wrong_for_each_job_and_each_size(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    right, wrong = (Seen(Knowledge(wrong_work=w, wrong_speeds=w), NODES)(job) for w in (0.0, 0.3))
    assert right.work_left is not None and wrong.work_left is not None
    assert wrong.work_left / right.work_left == pytest.approx(math.exp(0.3 * error_of(job.submission.name)))
    ratios = np.log(wrong.speeds.rates / right.speeds.rates) / 0.3
    assert ratios == pytest.approx([error_of(f"{job.submission.name} on {n}") for n in right.speeds.sizes])
    assert len(set(np.round(ratios, 6))) == len(ratios) > 1
    assert error_of("x") == error_of("x") != error_of("y")


def test_what_a_job_has_learned_since_is_told(tmp_path: Path) -> None:
    job, seen = job_of(tmp_path, learns=True), Seen(Knowledge(speeds=False), NODES)
    before = seen(job).speeds
    assert seen(job).speeds is before, "asked once for what it knows"
    assert job.learned is not None
    for rows, seconds in ((0.25, 0.2), (0.5, 0.25)):
        job.learned.see((1,), rows, seconds, 0.0)
    after = seen(job).speeds
    assert after is not before and after.rates.tolist() != before.rates.tolist()
