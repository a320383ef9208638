"""Schedules are measured and shown."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from pipelines.plots import SCHEDULES, write_plots
from pipelines.schedules import SizeOfStep, schedule_row
from pipelines.tables import write_tables
from shared.results import Results


@pytest.mark.full
def test_pipelines_are_measured_and_shown(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    size = SizeOfStep(num_layers=2, vocab_size=16, length=4, rows=1)
    row = schedule_row(results, "1f1b", 1, 2, 4, size)
    assert row["bubble"] == pytest.approx(1 / 5) and row["held"] == 3 and row["temporary"] > 0
    assert schedule_row(Results(results.path), "1f1b", 1, 2, 4, size) == row
    results.get(row | {"microbatches": 8}, dict)

    key = {"part": "c", "model": "gpt2", "batch": 32, "length": 1024}
    found = {"received": 2**30, "peak": 2**32, "even_s": 0.02, "compute_s": 0.025, "exposed_s": 0.005}
    results.get(key | {"plan": "data=4"}, lambda: found | {"floor_s": 0.03})
    pipe = found | {"layers": [3, 3, 3, 3], "bubble": 3 / 19, "bubble_as_cut": 0.5, "floor_s": 0.04}
    results.get(key | {"plan": "pipeline=1f1b:4 microbatches=16"}, lambda: pipe)

    text = write_tables(results, tmp_path)
    assert "| 1f1b:2   | 4" in text and "| 20.0%" in text
    assert "| pipeline=1f1b:4 microbatches=16 | 3 3 3 3 | 4.00" in text
    assert "| 15.8%  | 50.0%" in text and "| 800" in text
    write_plots(results, tmp_path)
    pictures = {path.name: ElementTree.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert len(pictures) == 1 + len(SCHEDULES)
    assert len(pictures["memory-2.svg"].findall("{*}circle")) == 2
    assert len(pictures["gantt-zero_bubble-2.svg"].findall("{*}rect")) == 4 * 8 * 2 * 3
