"""Pictures of `large_batch.py`, as SVG, made of the rows on disk."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from large_batch_tables import grouped, mean_of, series
from tensor_parallel_measure import Results, Row

COLORS = ("#d62728", "#2ca02c", "#1f77b4", "#9467bd", "#555555", "#ff7f0e")
WIDTH, HEIGHT, LEFT, TOP = 480, 260, 60, 56
MOST_MARKS = 30  # of a line; more run into one another
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over a scale. `low` and `high` are the ends of the vertical scale: what is beyond is drawn at its edge."""

    title: str
    unit: str
    across: str
    low: float
    high: float
    doubling: bool = False  # each mark of the horizontal scale is a multiple of the one before

    def svg(self, series: dict[str, Points]) -> str:
        places = sorted({x for points in series.values() for x, _ in points})
        drawn = [_text(LEFT, 20, self.title, 13, "start"), _text(LEFT, 38, self.unit, 11, "start"), *self._axes(places)]
        for i, (name, points) in enumerate(series.items()):
            color = COLORS[i % len(COLORS)]
            corners = [self._at(x, y, places) for x, y in points]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
            drawn.append(f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"/>')
            if len(points) <= MOST_MARKS:
                drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in corners]
            y = TOP + 10 + 18 * i
            drawn.append(f'<path d="M{LEFT + WIDTH + 12} {y}h18" stroke="{color}" stroke-width="3"/>')
            drawn.append(_text(LEFT + WIDTH + 36, y + 4, name, 11, "start"))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 140}" height="{TOP + HEIGHT + 44}" '
                'font-family="sans-serif">',
                '<rect width="100%" height="100%" fill="white"/>',
                *drawn,
                "</svg>\n",
            ]
        )

    def _at(self, x: float, y: float, places: Sequence[float]) -> tuple[float, float]:
        first, last = (math.log(p) if self.doubling else p for p in (places[0], places[-1]))
        share = ((math.log(x) if self.doubling else x) - first) / ((last - first) or 1.0)
        up = (min(max(y, self.low), self.high) - self.low) / (self.high - self.low)
        return LEFT + 15 + (WIDTH - 30) * share, TOP + HEIGHT * (1 - up)

    def _axes(self, places: Sequence[float]) -> list[str]:
        drawn = [f'<path d="M{LEFT} {TOP}V{TOP + HEIGHT}h{WIDTH}" stroke="black" fill="none"/>']
        for x in places if self.doubling else places[:: max(1, len(places) // 6)]:
            drawn.append(_text(self._at(x, 0, places)[0], TOP + HEIGHT + 16, f"{x:,.0f}", 10))
        drawn.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, self.across, 11))
        for quarter in range(5):
            y = self.low + (self.high - self.low) * quarter / 4
            drawn.append(_text(LEFT - 6, self._at(places[0], y, places)[1] + 4, f"{y:.4g}", 10, "end"))
        return drawn


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


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
