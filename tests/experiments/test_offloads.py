"""Models larger than the devices: what waits, what a process takes in all, and pictures of what was compiled."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from offloads import overlap, peak, slides, steady
from shared.results import Results


def test_pictures_of_what_was_compiled(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.log")
    for model in slides.LENGTH:
        for rows in (4, 32):
            key = {"part": "slides", "model": model, "rows": rows, "name": "ZeRO-3"}
            results.get(key, lambda rows=rows: {"memory": rows * 2**30, "seconds": 0.1 * rows})
        results.get({"part": "slides", "model": model, "rows": 64, "name": "ZeRO-3"}, lambda: {"refused": "too small"})
    slides.draw(results)
    found = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert found == [f"rows-{model}-{of}.svg" for model in ("gpt2-xl", "t5-3b") for of in ("memory", "seconds")]
    for name in found:
        assert "ZeRO-3" in "".join(ElementTree.parse(tmp_path / name).getroot().itertext())


@pytest.mark.full
def test_steps_in_turn_say_what_they_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NUM_ROWS", 16), ("MEASURED", 2**16), ("Layers", functools.partial(overlap.Layers, 2))):
        monkeypatch.setattr(overlap, name, value)
    row = overlap.overlap("adamw", 1, tmp_path)
    assert row["device"]["link_in"] == row["host"]["disk_read"] == 0 < row["host"]["link_in"]
    # What the disk has is updated in the backward pass, so that gradients go nowhere.
    assert row["disk"]["disk_written"] < row["host"]["link_out"]


@pytest.mark.full
@pytest.mark.parametrize("plan", list(peak.PLANS.values())[1:])
def test_a_process_takes_no_more_than_was_said(plan: str, tmp_path: Path) -> None:
    row = peak.measured(plan, tmp_path / "rows", num_layers=32)
    # The runtime itself grows by some ten MiB, however large the model is.
    assert row["took"] <= 1.03 * (row["device"] + row["host"] + row["moving"]) + 32 * 2**20


@pytest.mark.full
def test_steps_leave_as_much_as_they_found(tmp_path: Path) -> None:
    row = peak.apart("offloads.steady", steady.PLANS["disk"], tmp_path / "rows", 100)
    assert len(set(row["arrays"])) == 1 and row["grown"] < 2**20


@pytest.mark.full
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """In a process of its own: its children are forked before it has a backend."""
    run = "from offloads.kills import killed; print(killed(Path(sys.argv[1]), 'clipped adamw', 3)['same'])"
    command = [sys.executable, "-c", f"import sys; from pathlib import Path; {run}", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
