"""Pictures of `pipeline.py`, as SVG: memory over micro-batches from the rows on disk, and charts of schedules."""

import math
from html import escape
from pathlib import Path

from pipeline_schedules import SCHEDULES, text_of
from pipeline_tables import by_stages
from tensor_parallel_measure import Results

from cjax.pipeline import Times, build, gantt_svg, simulate

COLORS = ("#555555", "#1f77b4", "#2ca02c", "#d62728", "#9467bd")
WIDTH, HEIGHT, LEFT, TOP = 480, 260, 60, 56


def lines(title: str, unit: str, series: dict[str, dict[int, float]]) -> str:
    """Lines over micro-batches as an SVG; micro-batches double from one mark to the next."""
    places = sorted({x for points in series.values() for x in points})
    tallest = max(y for points in series.values() for y in points.values())
    span = math.log2(places[-1] / places[0]) or 1.0

    def at(x: int, y: float) -> tuple[float, float]:
        return LEFT + 20 + (WIDTH - 40) * math.log2(x / places[0]) / span, TOP + HEIGHT * (1 - y / tallest)

    drawn = [_text(LEFT, 20, title, 13, "start"), _text(LEFT, 38, unit, 11, "start")]
    drawn.append(f'<path d="M{LEFT} {TOP}V{TOP + HEIGHT}h{WIDTH}" stroke="black" fill="none"/>')
    for x in places:
        drawn.append(_text(at(x, 0)[0], TOP + HEIGHT + 16, str(x), 11))
    drawn.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, "micro-batches", 11))
    for quarter in range(5):
        y = tallest * quarter / 4
        drawn.append(_text(LEFT - 6, at(places[0], y)[1] + 4, f"{y:,.0f}", 10, "end"))
    for i, (name, points) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        corners = [at(x, y) for x, y in sorted(points.items())]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        drawn.append(f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in corners]
        y = TOP + 10 + 18 * i
        drawn.append(f'<path d="M{LEFT + WIDTH + 12} {y}h18" stroke="{color}" stroke-width="3"/>')
        drawn.append(_text(LEFT + WIDTH + 36, y + 4, name, 11, "start"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 160}" height="{TOP + HEIGHT + 44}" '
            'font-family="sans-serif">',
            '<rect width="100%" height="100%" fill="white"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def write_plots(results: Results, folder: Path) -> None:
    """Memory over micro-batches for each number of stages in part s, and the charts of its schedules on 4 stages."""
    for num_stages, rows in by_stages(results.of("s")).items():
        series: dict[str, dict[int, float]] = {}
        for row in rows:
            name = text_of(row["schedule"], row["chunks"], num_stages)
            series.setdefault(name, {})[row["microbatches"]] = row["temporary"] / 2**20
        title = f"{num_stages} stages: memory of a step's temporaries on a device"
        (folder / f"memory-{num_stages}.svg").write_text(lines(title, "MiB", series))
    if results.of("s"):
        for kind, num_chunks in SCHEDULES:
            found = simulate(build(kind, 4, 8, num_chunks), Times(1, 1, 1), lockstep=True)
            name = f"gantt-{kind}" + (f"-{num_chunks}" if num_chunks > 1 else "")
            (folder / f"{name}.svg").write_text(gantt_svg(found))
