"""Pictures of `pipeline.py`, as SVG: memory over micro-batches from the rows on disk, and charts of schedules."""

from pathlib import Path

from shared.results import Results

from cjax.pipeline import Times, build, gantt_svg, simulate
from cjax.report.charts import Chart, Points

from .schedules import SCHEDULES, text_of
from .tables import by_stages


def write_plots(results: Results, folder: Path) -> None:
    """Memory over micro-batches for each number of stages in part s, and the charts of its schedules on 4 stages."""
    for num_stages, rows in by_stages(results.of("s")).items():
        series: dict[str, Points] = {}
        for row in rows:
            name = text_of(row["schedule"], row["chunks"], num_stages)
            series.setdefault(name, []).append((row["microbatches"], row["temporary"] / 2**20))
        title = f"{num_stages} stages: memory of a step's temporaries on a device"
        tallest = max(y for points in series.values() for _, y in points)
        chart = Chart(title, "MiB", "micro-batches", 0, tallest, doubling=True)
        drawn = chart.svg({name: sorted(points) for name, points in series.items()})
        (folder / f"memory-{num_stages}.svg").write_text(drawn)
    if results.of("s"):
        for kind, num_chunks in SCHEDULES:
            found = simulate(build(kind, 4, 8, num_chunks), Times(1, 1, 1), lockstep=True)
            name = f"gantt-{kind}" + (f"-{num_chunks}" if num_chunks > 1 else "")
            (folder / f"{name}.svg").write_text(gantt_svg(found))
