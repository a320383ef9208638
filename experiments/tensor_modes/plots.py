"""Pictures of `tensor_parallel.py`, made of the rows on disk: bars as SVG, written out."""

from collections.abc import Callable
from pathlib import Path

from shared.results import Results, Row

from cjax.report.charts import picture, text

from .tables import about, by_case

COLORS = {"1D": "#555555", "2D": "#1f77b4", "2.5D": "#2ca02c", "3D": "#d62728", "ring": "#9467bd", "other": "#bbbbbb"}
ITEMS = 2**29  # elements of bfloat16 in a GiB
BAR, GAP, HEIGHT, LEFT, TOP = 48, 26, 220, 60, 56


def mode_of(plan: str) -> str:
    """1D, 2D, 2.5D or 3D, z3 with ZeRO-3; the mode of a sequence plan."""
    if "sequence=" in plan:
        return plan.split("sequence=")[1].split(":")[0].split()[0]
    name = plan.removeprefix("tensor=")
    mode = name.split(":")[0].upper() if ":" in name else "1D"
    return f"{mode} z3" if "zero=3" in plan else mode


def devices_of(plan: str) -> int:
    digits = plan.split()[0].split("=")[1].split(":")[-1].split("/")[0]
    return int(digits)


def bars(title: str, groups: dict[str, dict[str, tuple[float, float | None]]], unit: str) -> str:
    """Bars in groups as an SVG.

    Args:
      title: above the picture.
      groups: label of each group: name of each bar: its height, and where a line across it goes (None: nowhere).
      unit: of the heights.
    """
    tallest = max(max(a, b or 0.0) for group in groups.values() for a, b in group.values())
    scale, x, drawn = HEIGHT / tallest, float(LEFT), []
    for label, group in groups.items():
        start = x
        for name, (height, line) in group.items():
            top, size = TOP + HEIGHT - height * scale, f'width="{BAR - 4}" height="{height * scale:.1f}"'
            drawn.append(f'<rect x="{x}" y="{top:.1f}" {size} fill="{COLORS.get(name, COLORS["other"])}"/>')
            drawn.append(text(x + BAR / 2 - 2, top - 4, f"{height:,.0f}" if height >= 100 else f"{height:.3g}", 10))
            drawn.append(text(x + BAR / 2 - 2, TOP + HEIGHT + 13, name, 10))
            if line is not None:
                y = TOP + HEIGHT - line * scale
                drawn.append(f'<path d="M{x - 1} {y:.1f}h{BAR - 2}" stroke="black" stroke-dasharray="3 2"/>')
            x += BAR
        drawn.append(text((start + x) / 2 - 2, TOP + HEIGHT + 30, label, 12))
        x += GAP
    width = max(x, LEFT + 7 * max(len(title), len(unit)))
    axis = f'<path d="M{LEFT - 6} {TOP}V{TOP + HEIGHT}H{x - GAP}" stroke="black" fill="none"/>'
    head = [text(LEFT - 6, 20, title, 13, "start"), text(LEFT - 6, 38, unit, 11, "start")]
    return picture(width, TOP + HEIGHT + 42, [*head, axis, *drawn])


def write_plots(results: Results, folder: Path) -> None:
    """One picture a quantity and model; none where there is no row."""
    for name, rows in by_case([row for row in results.of("a") if "peak" in row]).items():
        stem, of = name.lower(), about(rows[0])
        quantities: dict[str, tuple[str, Callable[[Row], tuple[float, float | None]]]] = {
            "received": ("GiB received; dashed: the formula", lambda r: (r["received"] / 2**30, r["formula"] / ITEMS)),
            "peak": ("peak memory, GiB", lambda r: (r["peak"] / 2**30, None)),
            "floor": (
                "lower bound of a step, ms: compute and exposed transfers; dashed: compute",
                lambda r: (1e3 * (r["compute_s"] + r["exposed_s"]), 1e3 * r["compute_s"]),
            ),
        }
        for quantity, (unit, value) in quantities.items():
            bar_chart = bars(of, _grouped(rows, value), unit)
            (folder / f"{quantity}-{stem}.svg").write_text(bar_chart)
    for part, stem in (("b", "largest-batch"), ("c", "bert")):
        found: dict[str, list[Row]] = {}
        for row in results.of(f"{part}: largest"):
            found.setdefault(f"{row['name']}-{row['field']}", []).append(row)
        for name, rows in found.items():
            title = f"{rows[0]['name']}: largest {rows[0]['field']} that fits an 80 GB H100"
            bar_chart = bars(title, _grouped(rows, lambda r: (r["fits"], None)), rows[0]["field"])
            (folder / f"{stem}-{name.lower()}.svg").write_text(bar_chart)


def _grouped(
    rows: list[Row], value: Callable[[Row], tuple[float, float | None]]
) -> dict[str, dict[str, tuple[float, float | None]]]:
    groups: dict[str, dict[str, tuple[float, float | None]]] = {}
    for row in rows:
        groups.setdefault(f"{devices_of(row['plan'])} devices", {})[mode_of(row["plan"])] = value(row)
    return groups
