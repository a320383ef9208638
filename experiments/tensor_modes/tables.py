"""Tables of `tensor_parallel.py`, made of the rows on disk, as Markdown."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from shared.markdown import table
from shared.results import Results, Row

from cjax import Plan

from .models import elements_received

GIB = 2**30
LARGE = 2**20  # bytes in a step; what is less are sums of statistics


def write_tables(results: Results, folder: Path) -> str:
    """All tables as one text, also kept as `tables.md`."""
    makers = (_layers, _copies, _crossover, _by_kind, _gspmd, _largest, _timed)
    text = "\n\n".join(part for maker in makers if (part := maker(results)))
    (folder / "tables.md").write_text(text + "\n")
    return text


def by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by model, in the order in which they were made."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found


def about(row: Row) -> str:
    tokens = row["batch"] * row["length"]
    return (
        f"{row['name']}: {row['layers']} layers, width {row['width']}, {row['heads']} heads, {tokens} tokens "
        f"({row['batch']} x {row['length']}), bfloat16, Adam; H100s, 8 a host; a device and step"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _layers(results: Results) -> str:
    head = ["plan", "GiB received", "elements / formula", "partners", "of large", "peak GiB", "compute ms",
            "transfer ms", "exposed ms", "exposed share", "floor ms"]  # fmt: skip
    texts = []
    for rows in by_case(results.of("a")).values():
        lines = []
        for row in rows:
            if "peak" not in row:
                (why,) = (f"{name}: {row[name].splitlines()[0]}" for name in ("refused", "failed") if name in row)
                lines.append([row["plan"], why, *[""] * (len(head) - 2)])
                continue
            lines.append(
                [
                    row["plan"],
                    f"{row['received'] / GIB:.3f}",
                    f"{row['elements'] / row['formula']:.3f}",
                    str(row["partners"]),
                    str(large_partners(row)),
                    f"{row['peak'] / GIB:.2f}",
                    _ms(row["compute_s"]),
                    _ms(row["transfer_s"]),
                    _ms(row["exposed_s"]),
                    f"{row['exposed_s'] / row['transfer_s']:.0%}",
                    _ms(row["compute_s"] + row["exposed_s"]),
                ]
            )
        texts.append(f"**{about(rows[0])}**\n\n{table(head, lines)}")
    return "\n\n".join(texts)


def _copies(results: Results) -> str:
    head = ["tokens", "plan", "GiB received", "peak GiB", "compute ms", "transfer ms", "exposed ms", "floor ms"]
    lines = []
    for row in (row for row in results.of("a: copies") if "peak" in row):
        gib = (f"{row[name] / GIB:.2f}" for name in ("received", "peak"))
        seconds = (row["compute_s"], row["transfer_s"], row["exposed_s"], row["compute_s"] + row["exposed_s"])
        lines.append([str(row["batch"] * row["length"]), row["plan"], *gib, *map(_ms, seconds)])
    title = "**GPT-3-like on 64 devices: one grid, or copies of 8**"
    return f"{title}\n\n{table(head, lines)}" if lines else ""


def large_partners(row: Row) -> int:
    """Distinct devices that one device exchanges more than `LARGE` bytes with: its neighbours along the axes used."""
    tensor = Plan.parse(row["plan"]).tensor
    side = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[tensor.mode]
    length = round((tensor.size / tensor.depth) ** (1 / side))
    differing: set[tuple[str, ...]] = set()
    for name, size in row["moved"].items():
        if size > LARGE:
            axes = name.split()[1].split("+")
            differing.update(itertools.chain(*(itertools.combinations(axes, n + 1) for n in range(len(axes)))))
    return sum(math.prod((tensor.depth if a == "depth" else length) - 1 for a in axes) for axes in differing)


def _crossover(results: Results) -> str:
    """Tokens of a batch, in widths, above which a mode moves fewer elements than 1D on as many devices."""
    lines = []
    for plan in dict.fromkeys(row["plan"] for row in results.of("a")):
        tensor = Plan.parse(plan).tensor
        if tensor.mode == "1d":
            continue
        by_weights = elements_received(plan, 0, 1)
        by_tokens = elements_received(plan, 1, 1) - by_weights
        spared = elements_received(f"tensor={tensor.size}", 1, 1) - by_tokens
        lines.append([plan, f"{by_weights / spared:.2f}" if spared > 0 else "never"])
    title = "**Tokens of the batch, as a multiple of the width, above which a mode moves fewer elements than 1D**"
    return f"{title}\n\n{table(['plan', 'tokens / width'], lines)}" if lines else ""


def _by_kind(results: Results) -> str:
    lines = []
    for row in results.of("a"):
        if "peak" in row:
            moved = ", ".join(f"{kind} {size / GIB:.3f}" for kind, size in row["moved"].items() if size > LARGE)
            lines.append([row["name"], row["plan"], moved])
    title = "**GiB received by kind, axis and dtype, above 1 MiB**\n\n"
    return title + table(["model", "plan", "GiB"], lines) if lines else ""


def _gspmd(results: Results) -> str:
    ours = {row["plan"]: row for row in results.of("a") if row["name"] == "GPT-3-like"}
    lines = []
    for row in results.of("a: GSPMD"):
        mine = ours[row["plan"]]
        pairs = [("received", GIB), ("peak", GIB), ("exposed_s", 1e-3)]
        lines.append([row["plan"], *(f"{mine[name] / of:.2f} : {row[name] / of:.2f}" for name, of in pairs)])
    if not lines:
        return ""
    head = ["plan", "GiB received", "peak GiB", "exposed ms"]
    return "**cjax : the same layers by GSPMD's constraints alone** (GPT-3-like)\n\n" + table(head, lines)


def _largest(results: Results) -> str:
    texts = []
    for part, title in (("b", "Largest batch that fits"), ("c", "BERT, sequence parallelism")):
        lines = []
        for row in results.of(f"{part}: largest"):
            fails = "-" if row["fails"] is None else str(row["fails"])
            why = row.get("refused", "").splitlines()
            lines.append([row["name"], row["plan"], row["field"], str(row["fits"]), fails, why[0] if why else ""])
        if lines:
            head = ["model", "plan", "what", "compiled and fits", "compiled and does not", "refused"]
            texts.append(f"**{title}** (80 GB H100, 1.5 GiB of it reserved)\n\n{table(head, lines)}")
    return "\n\n".join(texts)


def _timed(results: Results) -> str:
    rows = results.of("d")
    if not rows:
        return ""
    size = rows[0]
    lines = [
        [row["plan"], f"{row['cjax_ms']:.1f}", f"{row['gspmd_ms']:.1f}", f"{row['cjax_ms'] / row['gspmd_ms']:.3f}"]
        for row in rows
    ]
    return (
        f"**Step time on virtual CPU devices**, ms, medians of {size['rounds']} interleaved steps: "
        f"{size['layers']} layers, width {size['width']}, batch {size['batch']} x {size['length']}, float32\n\n"
        + table(["plan", "cjax", "GSPMD alone", "ratio"], lines)
    )
