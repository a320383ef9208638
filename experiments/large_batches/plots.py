"""Pictures of `large_batch.py`, as SVG, made of the rows on disk."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from shared.results import Results, Row

from cjax.report.charts import Chart, Points

from .tables import grouped, mean_of, series


def write_plots(results: Results, folder: Path) -> None:
    """Accuracy by batch and curves of each batch for part a, loss by batch and its curves for part b."""
    for rows in series(results.of("a")):
        _images(rows, folder)
    for rows in series(results.of("b")):
        _masked(rows, folder)


def _images(rows: Sequence[Row], folder: Path) -> None:
    data = rows[0]["data"]
    unit, low = "%; lower ones are drawn at the lower edge", 90.0
    num_epochs = round(rows[0]["epochs"][-1])
    epochs = f"{num_epochs} epochs"
    chart = Chart(f"ViT on {data}, {epochs}: test accuracy by batch size", unit, "batch", low, 100, doubling=True)
    series = {
        name: [(batch, 100 * mean_of(runs, "accuracy")) for batch, runs in grouped(some, "batch").items()]
        for name, some in grouped(rows, "optimizer").items()
    }
    (folder / f"accuracy-{data}-{num_epochs}.svg").write_text(chart.svg(series))
    for batch, some in grouped(rows, "batch").items():
        chart = Chart(f"ViT on {data}, batch {batch:,}, {epochs}: test accuracy", unit, "epochs", low, 100)
        curves = {name: _curve(runs, "accuracy", 100) for name, runs in grouped(some, "optimizer").items()}
        (folder / f"curves-{data}-{num_epochs}-{batch}.svg").write_text(chart.svg(curves))


def _masked(rows: Sequence[Row], folder: Path) -> None:
    optimizer = rows[0]["optimizer"].upper()
    about = f"Masked bytes, {optimizer}, {rows[0]['samples']:,} samples"
    losses = [row["test_loss"] for row in rows]
    low, high = math.floor(10 * min(map(min, losses))) / 10, math.ceil(10 * max(loss[-1] for loss in losses)) / 10
    chart = Chart(f"{about}: test loss by batch size", "nats a byte", "batch", low, high, doubling=True)
    points = [(batch, mean_of(runs, "test_loss")) for batch, runs in grouped(rows, "batch").items()]
    name = f"{rows[0]['data'].replace(' ', '-')}-{rows[0]['samples']}"
    (folder / f"masked-{name}.svg").write_text(chart.svg({optimizer: points}))
    high = math.ceil(max(loss[0] for loss in losses))
    chart = Chart(f"{about}: test loss", "nats a byte", "epochs", low, high)
    curves = {f"batch {batch:,}": _curve(runs, "test_loss", 1) for batch, runs in grouped(rows, "batch").items()}
    (folder / f"masked-curves-{name}.svg").write_text(chart.svg(curves))


def _curve(runs: Sequence[Row], name: str, factor: float) -> Points:
    """Means over the runs that have scores at the same epochs, which all of one batch size have."""
    values = zip(*(run[name] for run in runs), strict=True)
    return [(x, factor * statistics.mean(ys)) for x, ys in zip(runs[0]["epochs"], values, strict=True)]
