import pytest

from cjax.cli import main
from cjax.cli.cluster import Submit, shown, span

JOB = {
    "name": "first", "status": "running", "devices": 4, "least": 1, "most": 8, "plan": "data=4", "step": 30,
    "steps": 90, "rate": 1234.5, "end": 1100.0, "why": "",
}  # fmt: skip


def test_the_table_of_jobs() -> None:
    waits = JOB | {"name": "second", "status": "failed", "devices": 2, "plan": "", "rate": None, "end": None}
    text = shown({"nodes": {"a": 4, "b": 4}, "jobs": [JOB, waits | {"why": "it died\nand more"}]}, now=1000.0)
    head, names, *rows = text.splitlines()
    assert head == "6 of 8 devices on 2 nodes are held"
    assert names.split("  ")[0] == "job" and len(rows) == 2
    assert rows[0].split() == ["first", "running", "4", "(1:8)", "30/90", "1,234", "1", "min", "data=4"]
    assert rows[1].endswith("it died")
    assert [span(seconds) for seconds in (-3, 59, 61, 3700)] == ["0 s", "59 s", "1 min", "1 h 1 min"]


def test_what_a_cluster_does_is_said(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cluster", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {verb} " in said for verb in ("start", "status", "resize", "stop", "logs"))
    assert main(["cluster", "strat"]) == 1
    assert "'strat' is nothing that a cluster does; type cjax cluster start |" in capsys.readouterr().err
    assert main(["cluster", "status", "--cluster", str(tmp_path)]) == 1
    assert f"no cluster was started in {tmp_path}: type cjax cluster start" in capsys.readouterr().err
    assert main(["cluster", "start", "--nodes", "8", "--cluster", str(tmp_path)]) == 1
    assert "--nodes 8: write how many, and the devices of each" in capsys.readouterr().err


def test_what_stands_behind_dashes_is_the_scripts() -> None:
    given = Submit.parse(["train.py:make", "--steps", "5", "--devices", "1:8", "--", "--steps", "7"])
    assert (given.script, given.steps, given.devices, given.arguments) == ("train.py:make", 5, "1:8", ("--steps", "7"))
