"""Pictures of the page: lines over a scale, and bars of what a step is spent on."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared.results import Results, Row

from cjax.report.charts import COLORS, Chart, Points, picture, text

from .flavours import PIPELINES
from .view import View, bandwidth, fits, part_of, rate

LINES: Mapping[str, tuple[str, ...]] = {
    "data": ("data",),
    "ZeRO": ("zero=1", "zero=2", "zero=3"),
    "tensor": ("tensor",),
    "tensor=2d": ("tensor=2d",),
    "sequence=ring": ("sequence=ring",),
    "best pipeline": PIPELINES,
}
KINDS: Mapping[str, tuple[str, ...]] = {
    "matmuls and attention": ("matmul", "attention"),
    "elementwise, optimizer, overhead": ("elementwise", "optimizer", "overhead", "recompute"),
    "gradients and ZeRO": ("data", "gather"),
    "tensor, sequence": ("tensor", "sequence"),
    "between stages": ("pipeline",),
    "idle stages": ("bubble",),
}
BAR, ROOM, LABEL, WIDE = 16, 8, 250, 420


def draw(results: Results, folder: Path) -> None:
    """All pictures for which there are rows."""
    folder.mkdir(parents=True, exist_ok=True)
    gpts = [row for row in results.of("size") if row["model"].startswith("gpt2")]
    for name, cluster, said in (("nvlink", "a100-40gb", "NVLink"), ("pcie", "a100-40gb-pcie", "PCIe")):
        rows = [row for row in gpts if row["cluster"] == cluster]
        chart = ("GPT-2 on four A100-40GB, " + said, "parameters, in millions", lambda row: row["params"] / 1e6)
        _speeds(folder / f"size-{name}.svg", rows, *chart)
    _speeds(
        folder / "batch.svg",
        results.of("batch"),
        "GPT-2 medium on four A100-40GB, NVLink",
        "rows",
        lambda row: row["rows"],
    )
    for part, said in (("link", "on one host"), ("node1", "on four hosts"), ("node2", "on two hosts")):
        rows = results.of(part)
        _speeds(folder / f"{part}.svg", rows, f"GPT-2 medium on four A100-40GB {said}", "GB/s", bandwidth)
    _bars(folder / "parts.svg", results)
    _weak(folder / "weak.svg", results)


def _speeds(path: Path, rows: Sequence[Row], title: str, across: str, place: Callable[[Row], float]) -> None:
    """Each flavour's speed beside the fastest plan of all."""
    places = sorted({place(row) for row in rows})
    if len(places) < 2:
        return
    series: dict[str, Points] = {}
    for x in places:
        here = [row for row in rows if place(row) == x and fits(row)]
        best = max(map(rate, here))
        for name, flavours in LINES.items():
            mine = [rate(row) for row in here if row["flavour"] in flavours]
            if mine:
                series.setdefault(name, []).append((x, 100 * max(mine) / best))
    drawn = Chart(title, "speed, in percent of the fastest plan's", across, 0, 100, doubling=True).svg(series)
    path.write_text(drawn)


def _weak(path: Path, results: Results) -> None:
    rows = [row for row in results.of("weak") if fits(row)]
    if not rows:
        return
    series: dict[str, Points] = {}
    for row in rows:
        series.setdefault(row["flavour"], []).append((row["devices"], rate(row) / row["devices"] / 1e3))
    top = max(y for points in series.values() for _, y in points)
    chart = Chart("GPT-2 large, 8 rows a card", "1,000 tokens/s a card", "cards", 0, 1.1 * top, doubling=True)
    path.write_text(chart.svg(series))


def _bars(path: Path, results: Results) -> None:
    """What a step is spent on: three flavours on three kinds of links."""
    shown: list[tuple[str, Row]] = []
    slow = View(results, "node1")
    first = slow.values("cluster")[:1]
    for said, view in (
        ("NVLink", View(results, "size", model="gpt2-medium", cluster="a100-40gb")),
        ("PCIe", View(results, "size", model="gpt2-medium", cluster="a100-40gb-pcie")),
        ("10 Gb/s", View(results, "node1", cluster=first[0]) if first else slow),
    ):
        found = [("data", view.row("data")), ("tensor", view.row("tensor")), ("pipeline", view.pipeline())]
        shown += [(f"{name}, {said}: {1e3 * row['s']:,.0f} ms", row) for name, row in found if row]
    if not shown:
        return
    drawn = [text(10, 20, "GPT-2 medium, 32 rows, four A100-40GB: what a step is spent on, in percent", 13, "start")]
    for i, (label, row) in enumerate(shown):
        y, x = 36 + i * (BAR + ROOM), float(LABEL)
        drawn.append(text(LABEL - 8, y + 12, label, 11, "end"))
        for color, parts in zip(COLORS, KINDS.values(), strict=True):
            width = WIDE * part_of(row, *parts) / 100
            drawn.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
            x += width
    foot = 36 + len(shown) * (BAR + ROOM) + 14
    for i, (color, name) in enumerate(zip(COLORS, KINDS, strict=True)):
        x, y = 20 + 230 * (i % 3), foot + 18 * (i // 3)
        drawn.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        drawn.append(text(x + 16, y, name, 11, "start"))
    path.write_text(picture(LABEL + WIDE + 30, foot + 36, drawn))
