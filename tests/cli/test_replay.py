"""`cjax replay`."""

from pathlib import Path

import pytest
from scheduler.replay.logs import write_log

from cjax.cli.main import main
from cjax.cli.replay import summary
from cjax.scheduler.replay.simulate import Replayed


def test_a_log_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, jobs = tmp_path / "chart.svg", tmp_path / "seconds.csv"
    arguments = [
        str(write_log(tmp_path)),
        "--nodes",
        "1x4",
        "--policy",
        "fifo",
        "--gantt",
        str(chart),
        "--jobs",
        str(jobs),
    ]
    assert main(["replay", *arguments]) == 0
    said = capsys.readouterr().out
    assert "jobs                                         4" in said and "first submission to last end" in said
    assert chart.read_text().startswith("<svg") and "a,423,0" in jobs.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "64"], "write how many, and the devices of each, as 16x4"),
        (["--policy", "best"], "there are goodput, fifo, tiresias, optimus"),
        (["--told", "some"], "it is one of all, work, speeds, nothing"),
        (["--told", "work", "--policy", "fifo"], "--told goes with --policy goodput"),
        (["--period", "0"], "the first above 0"),
    ],
)
def test_what_is_typed_wrong_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["replay", str(write_log(tmp_path)), *options]) == 1
    assert said in capsys.readouterr().err


def test_a_summary_is_of_the_mean_job() -> None:
    text = summary(Replayed({"a": 100.0, "b": 300.0}, 400.0, 0.5, 0.25, {"a": 1, "b": 0}, ()))
    found = {line[:36].strip(): line[36:].strip() for line in text.splitlines()}
    assert found["jobs"] == "2" and found["restarts a job"] == "0.50"
    assert found["mean seconds from submission to end"] == found["half of the jobs within"] == "200"
    assert found["devices held, share of that time"] == "50.0%"


def test_tables_that_are_nowhere_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "jobs" / "of" / "monday"
    folder.mkdir(parents=True)
    path = write_log(folder)
    (path.parent / "speeds.csv").unlink()
    assert main(["replay", str(path)]) == 1
    assert "say --tables where they are" in capsys.readouterr().err
    assert main(["replay", str(folder / "none.csv")]) == 1
    assert "there is no file" in capsys.readouterr().err
