"""Large batches: every size sees the same samples, rates follow the batch, runs are trained, kept and shown."""

from pathlib import Path
from xml.etree import ElementTree

import large_batch
import numpy as np
import pytest
from large_batches import data
from large_batches.plots import write_plots
from large_batches.recipes import RECIPES, schedule
from large_batches.runs import with_microbatches
from large_batches.tables import epochs_to, write_tables
from shared.results import Results


@pytest.mark.full
def test_large_batches_are_trained_and_shown(tmp_path: Path) -> None:
    large_batch.main(["--tiny", "--here", "--optimizers", "lamb", "--out", str(tmp_path)])
    results = Results(tmp_path / "results.jsonl")
    (images,), (masked,) = results.of("a"), results.of("b")
    for row, steps in ((images, 8), (masked, 8)):
        assert row["steps"] == steps and row["skipped"] == 0
        assert row["test_loss"][-1] < row["test_loss"][0]
    # A second batch size, as if it had been run: tables and pictures compare several.
    for row in (images, masked):
        results.get(row | {"batch": 128, "rate": float(f"{RECIPES['lamb'].rate_at(128):.4g}")}, dict)
    text = write_tables(results, tmp_path)
    assert "| optimizer | 64" in text and "**Masked bytes of standard library, LAMB" in text
    write_plots(results, tmp_path)
    pictures = {path.name: ElementTree.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert len(pictures) == 5  # accuracy by batch, curves of two batches, loss by batch and its curves
    assert len(pictures["accuracy-stripes-4.svg"].findall("{*}circle")) == 2


def test_every_batch_size_sees_the_same_samples() -> None:
    source = data.stripes(24)
    few, many = (
        np.concatenate([b["labels"] for b in data.stream(source, batch, 96 // batch, seed=3)]) for batch in (4, 16)
    )
    np.testing.assert_array_equal(few, many)
    np.testing.assert_array_equal(np.sort(few[:24]), np.sort(source.train["labels"]))  # an epoch has each once


def test_rates_follow_the_batch() -> None:
    assert RECIPES["sgd"].rate_at(1024) == pytest.approx(2 * RECIPES["sgd"].rate)
    assert RECIPES["adam"].rate_at(2048) == pytest.approx(2 * RECIPES["adam"].rate)
    assert RECIPES["lars"].rate_at(10**6) == RECIPES["lars"].most
    rates = np.array([schedule(1.0, 8192, 40)(step) for step in range(41)])  # a tenth of the steps is warm-up
    np.testing.assert_allclose(rates[[0, 3, 4, 40]], [0.25, 1.0, 1.0, 0.0], atol=1e-6)
    assert with_microbatches("data=2", 60_000) == "data=2 microbatches=60"


def test_masked_bytes_follow_berts_rule() -> None:
    targets = np.full((200, 100), 65, np.int32)
    found = data.hide(targets, np.random.default_rng(0))
    asked = found["hidden"] == 1
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    assert (found["inputs"][asked] == data.HIDDEN).mean() == pytest.approx(0.8, abs=0.03)
    np.testing.assert_array_equal(found["inputs"][~asked], targets[~asked])


def test_epochs_to_a_target() -> None:
    row = {"epochs": [1, 2, 3], "accuracy": [0.5, 0.9, 0.8]}
    assert epochs_to(row, 0.85) == 2 and epochs_to(row, 0.95) is None
