"""`cjax status` and `cjax resize`, typed; what they do is tested in `tests/job`."""

from pathlib import Path

import pytest

import cjax.cli.job
from cjax.cli import main
from cjax.job.files import append_line, read_lines, write_whole
from cjax.job.folder import JobFolder
from cjax.job.lock import locked
from cjax.job.spec import JobSpec
from cjax.job.state import JobState


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """Of a job that ended after a death."""
    folder = JobFolder(tmp_path)
    folder.place.mkdir()
    state = JobState.of(folder, JobSpec(("true",), str(tmp_path), workers=2))
    state.status, state.incarnation = "done", 2
    write_whole(folder.state, state.text())
    for number, first, step, why in ((1, 0, 25, "worker 1 ended by SIGKILL"), (2, 20, 40, "all is done")):
        begin = {"event": "start", "time": 10.0 * number, "incarnation": number, "workers": 2, "places": ["0", "1"]}
        append_line(folder.history, begin)
        facts = {"first": first, "step": step, "seconds": {"importing": 1.0, "training": 9.0}, "why": why}
        append_line(folder.history, {"event": "end", "time": 10.0 * number + 10, "incarnation": number, **facts})
    append_line(tmp_path / "metrics.jsonl", {"step": 40, "loss": 0.5, "samples/s": 320.0})
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    (tmp_path / "checkpoints" / "40" / "checkpoint.json").write_text("{}")
    return folder


def test_status_says_what_was_done_and_what_was_lost(folder: JobFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder.run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["job", "done,", "2", "workers,", "incarnation", "2"]
    assert lines[1] == "step        40, loss 0.5, samples/s 320"
    assert lines[2] == "checkpoint  after step 40"
    assert lines[3] == "lost        5 steps were done twice"
    # 18 s of training for 45 steps, of which 40 count, in 20 s.
    assert lines[4] == "goodput     80 % of 20 s: importing 2.0 s, training 18.0 s"
    assert lines[5:] == [
        "    1  2 workers, step 0 to 25: worker 1 ended by SIGKILL",
        "    2  2 workers, step 20 to 40: all is done",
    ]


def test_what_is_no_job_or_has_nobody_to_ask_is_refused(
    folder: JobFolder, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    for typed in (["status", elsewhere], ["resize", elsewhere, "4"]):
        assert main(typed) == 1
        assert "is no folder of a job" in capsys.readouterr().err
    for status, said in (("done", "is done. For more steps"), ("failed", "nobody supervises")):
        folder.state.write_text(folder.state.read_text().replace('"done"', f'"{status}"'))
        assert main(["resize", str(folder.run), "4"]) == 1 and not folder.asked.exists()
        error = capsys.readouterr().err
        assert said in error and "type its cjax run again, with --workers 4" in error


@pytest.mark.parametrize("torn", [b'{"event": "end", "seconds": {"a": 1.0}', b'{"ev', b"\0\0\xff"])
def test_what_a_power_cut_left_of_a_line_is_skipped(folder: JobFolder, torn: bytes) -> None:
    before = read_lines(folder.history)
    with open(folder.history, "ab") as file:
        file.write(torn)
    append_line(folder.history, {"event": "start", "incarnation": 3, "time": 50.0, "workers": 2})
    found = read_lines(folder.history)
    assert found[:-1] == before and found[-1]["incarnation"] == 3
    assert main(["status", str(folder.run)]) == 0


def test_a_resize_that_nobody_reads_is_asked_no_more(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cjax.cli.job, "_PICKED_UP", 0.2)
    with locked(folder.run):
        assert main(["resize", str(folder.run), "4"]) == 1
    assert "type it again" in capsys.readouterr().err and not folder.asked.exists()
