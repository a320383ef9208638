"""Users' own logs: what is refused, and how it is said."""

from pathlib import Path

import pytest
from scheduler.replay.logs import JOBS, SPEEDS, write_log

from cjax.scheduler.policy.job import Speed
from cjax.scheduler.replay.own import OwnModel
from cjax.scheduler.replay.workload import read_workload

HEAD = "name,time,application,work,devices,least,most\n"


@pytest.mark.parametrize(
    ("jobs", "speeds", "said"),
    [
        ("name,time,work\na,0,1\n", SPEEDS, "has no column application"),
        ("name,time,application,work\n", SPEEDS, "has no job"),
        ("name,time,application,devices\na,0,text,1\n", SPEEDS, "has no column work"),
        (HEAD + "a,0,audio,1,1,,\n", SPEEDS, "a runs 'audio', of which the speeds have no line"),
        (HEAD + "a,0,text,0,1,,\n", SPEEDS, "work of a is 0 samples"),
        (HEAD + "a,0,text,many,1,,\n", SPEEDS, "work of a is 'many', not a number"),
        (HEAD + "a,0,text,1,3,,\n", SPEEDS, "asks for 3 devices, and speeds are known on 1, 2"),
        (HEAD + "a,0,text,1,1,3,8\n", SPEEDS, "may have 3 to 8 devices, of which no speed is known"),
        (HEAD + "a,0,text,1,1,,\na,1,text,1,1,,\n", SPEEDS, "jobs of one name: a; give each its own"),
        (JOBS, "application,devices\ntext,1\n", "has no column samples_per_second"),
    ],
)
def test_what_can_not_be_meant_is_refused(tmp_path: Path, jobs: str, speeds: str, said: str) -> None:
    path = write_log(tmp_path, jobs, speeds)
    with pytest.raises(ValueError, match=said):
        read_workload(path, tmp_path / "speeds.csv")


def test_what_is_left_out_is_what_the_table_allows(tmp_path: Path) -> None:
    path = write_log(tmp_path, "name,time,application,work\na,5,vision,100\n", SPEEDS)
    (job,) = read_workload(path, tmp_path / "speeds.csv")
    assert (job.devices, job.least, job.most, job.time) == (1, 1, 4, 5.0)


def test_a_larger_batch_needs_fewer_steps_as_the_noise_scale_says() -> None:
    model = OwnModel("vision", (Speed(1, 10.0, batch=8),), work=800.0, noise=8.0)
    assert model.steps_left(8, 0) == pytest.approx(100)
    assert model.steps_left(16, 0) == pytest.approx(100 * (8 + 8) / (16 + 8))
