"""What a job has done and has left, without any process."""

from pathlib import Path
from typing import Any

import pytest

from cjax.cluster.folder import ClusterJobFolder
from cjax.cluster.rates import corrected
from cjax.cluster.submitted import Submitted, range_of, rate_factor, sizes_of
from cjax.cluster.tracked import TrackedJob
from cjax.scheduler.policy.job import Speed

SPEEDS = tuple(Speed(devices, 100.0 * devices, batch) for devices in (1, 2, 4) for batch in (8, 32))


def job(place: Path, **more: Any) -> TrackedJob:
    place.mkdir(exist_ok=True)
    told = {"steps": 100, "least": 1, "most": 4, "speeds": SPEEDS, "batch": 8.0, "rule": None, "time": 0.0} | more
    return TrackedJob(Submitted("job", ("true",), "/", {}, **told), ClusterJobFolder(place))


def test_what_was_measured_corrects_what_was_predicted() -> None:
    speeds = tuple(Speed(devices, 100.0 * devices) for devices in (1, 2, 4, 8))
    table = corrected(speeds, {(2, 1.0): 100.0, (8, 1.0): 1600.0})
    assert table.rates.tolist() == [50.0, 100.0, pytest.approx(200.0), 1600.0]
    assert corrected(speeds, {}).rates.tolist() == [100.0, 200.0, 400.0, 800.0]


def test_a_fixed_batch_ends_at_its_steps(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert found.begin(8.0) == 100
    found.step = 40
    told = found.told(5.0)
    assert (told.work_left, told.work_done, told.restart) == (60 * 8, 40 * 8, 5.0)


def test_larger_batches_take_fewer_steps_by_the_noise_scale(tmp_path: Path) -> None:
    found = job(tmp_path, rule="sqrt")
    assert found.begin(8.0) == 100
    checkpoint = found.folder.run.run / "checkpoints" / "40"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    found.noise = 24.0
    # A step of 32 rows is worth 32 (8 + 24) / (32 + 24) = 18.3 samples of the base batch, and 480 are left.
    assert found.begin(32.0) == 40 + 27
    assert found.done(40) == 40 * 8 and found.done(67) == pytest.approx(320 + 27 * 32 * 32 / 56)
    # It died before it saved anything: the same steps again, at what is known by now.
    found.noise = 1e12
    assert found.begin(32.0) == 40 + 15 and len(found.segments) == 2


def test_what_is_known_is_kept(tmp_path: Path) -> None:
    found = job(tmp_path, rule="sqrt")
    found.begin(8.0)
    found.step, found.least, found.measured = 17, 2, {(2, 8.0): 123.0}
    found.keep()
    again = job(tmp_path, rule="sqrt")
    assert (again.step, again.least, again.measured, again.segments) == (17, 2, found.measured, found.segments)


def test_ranges_and_sizes() -> None:
    assert [range_of(given) for given in ("1:8", "4", 3, (2, 4))] == [(1, 8), (4, 4), (3, 3), (2, 4)]
    for wrong in ("0:4", "8:1", "a", "1:2:3", None, 0):
        with pytest.raises(ValueError, match="is no range: write the least and the most, as 1:8"):
            range_of(wrong)
    assert sizes_of({"a": 8}) == [1, 2, 3, 4, 6, 8] and sizes_of({"a": 2, "b": 2, "c": 1}) == [1, 2, 4]
    assert (rate_factor(None, 32, 8), rate_factor("linear", 32, 8), rate_factor("sqrt", 32, 8)) == (1.0, 4.0, 2.0)
