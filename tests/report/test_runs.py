import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from cjax.cli import main
from cjax.report.runs import MOST_POINTS, read_run, write_page


def make(folder: Path, losses: dict[int, Any], readings: list[dict[str, Any]], **summary: Any) -> Path:
    folder.mkdir()
    (folder / "plan.txt").write_text("data=2\n")
    metrics = [{"step": step, "loss": loss, "tokens/s": 1000.0 * step} for step, loss in losses.items()]
    metrics.append({"step": max(losses), "validation_loss": 1.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + '{"step": 9')
    lines = [{"time": 50.0, "host": "here", "unknown": {"cpu_energy_joules": "no counter <here>"}}, *readings]
    lines.append({"time": 500.0, "summary": summary})
    (folder / "system.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def first(tmp_path: Path) -> Path:
    readings = [
        {"time": 60.0 * minute, "step": minute, "cpu_percent": 10.0 * minute, "gpu0/power_watts": 300.0 + minute,
         "gpu1/power_watts": None if minute == 2 else 200.0}
        for minute in (1, 2, 4)
    ]  # fmt: skip
    return make(
        tmp_path / "<first>", {1: 4.0, 2: "nan", 3: 2.0}, readings, gpu_joules_per_step=12.5, cpu_joules_per_step=None
    )


def test_a_run_is_read_as_it_was_written(first: Path):
    run = read_run(first)
    assert run.steps("loss") == [(1, 4.0), (3, 2.0)] and run.not_finite == [2]
    assert run.lines("power_watts") == {
        "gpu0": [(0.0, 301.0), (1.0, 302.0), (3.0, 304.0)],
        "gpu1": [(0.0, 200.0), (3.0, 200.0)],
    }
    assert run.lines("cpu_percent") == {"host": [(0.0, 10.0), (1.0, 20.0), (3.0, 40.0)]}


def test_the_page_holds_all_of_it_and_fetches_nothing(first: Path, capsys):
    assert main(["report", str(first)]) == 0
    place = first / "report.html"
    assert capsys.readouterr().out.strip() == str(place)
    page = place.read_text()
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    titles = [ET.fromstring(picture).findall("{*}text")[0].text for picture in pictures]
    assert titles == ["Loss of training", "Loss of validation", "Throughput", "GPUs' power", "CPUs at work"]
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", page)
    assert set(re.findall(r'https?://[^"\s<]+', page)) == {"http://www.w3.org/2000/svg"}, "a name, which is not fetched"
    assert "<first>" not in page and "&lt;first&gt;" in page and "no counter &lt;here&gt;" in page
    for cell in ("data=2", "2.0000", "1.2500", "2,000", "12.5", "unknown"):
        assert f"<td>{cell}</td>" in page
    assert "1 steps were not finite, and are not drawn: 2." in page


def test_several_runs_share_their_charts(first: Path, tmp_path: Path):
    other = make(tmp_path / "second", {step: 1.0 / step for step in range(1, 1000)}, [])
    write_page([first, other], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    loss = ET.fromstring(re.findall(r"<svg.*?</svg>", page, re.S)[0])
    texts = [text.text for text in loss.findall("{*}text")]
    assert texts[-2:] == ["1 <first>", "2 second"]
    lines = [path.get("d") for path in loss.findall("{*}path") if path.get("stroke-width") == "2"]
    assert [line.count("L") + 1 for line in lines if line] == [2, 250] and 250 <= MOST_POINTS
    assert "1 &lt;first&gt; gpu0" in page


def test_other_folders_and_lines_are_named(tmp_path: Path, first: Path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err
    (first / "metrics.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 1, is none that a run writes"):
        read_run(first)


def test_processes_have_lines_of_their_own(first: Path):
    (first / "system-1.jsonl").write_text('{"time": 60.0, "step": 1, "cpu_percent": 7.0}\n')
    assert set(read_run(first).lines("cpu_percent")) == {"process 0 host", "process 1 host"}


def test_energy_of_several_processes_is_not_that_of_the_first(first: Path):
    assert read_run(first).summary["gpu_joules_per_step"] == 12.5
    (first / "system-1.jsonl").write_text((first / "system.jsonl").read_text())
    run = read_run(first)
    assert "gpu_joules_per_step" not in run.summary and "several processes" in run.unknown["joules"]
