"""Runs as one HTML page: what their folders hold of loss, speed and hardware, drawn; nothing is fetched."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from cjax.job.files import write_whole
from cjax.report.charts import Chart, Points

MOST_POINTS = 300  # of a line; more are drawn as means of equal stretches
MOST_NAMED = 20  # of steps that were not finite
GIB = 2**30

# Of metrics and of readings: the name, how the chart is headed, its unit, and what a number is divided by.
STEPS = (
    ("loss", "Loss of training", "", 1.0),
    ("validation_loss", "Loss of validation", "", 1.0),
    ("tokens/s", "Throughput", "tokens a second", 1.0),
    ("samples/s", "Throughput", "samples a second", 1.0),
    ("mfu", "Model FLOP utilisation", "% of the datasheet's peak", 0.01),
    ("learning_rate", "Learning rate", "", 1.0),
    ("grad_norm", "Norm of the gradients", "", 1.0),
    ("memory", "Memory of a device, at most", "GiB", GIB),
)
READINGS = (
    ("utilization_percent", "GPUs at work", "% of the time", 1.0),
    ("memory_bandwidth_percent", "GPUs' memory bandwidth", "% used", 1.0),
    ("memory_busy_percent", "GPUs' memory at work", "% of the time", 1.0),
    ("memory_used_bytes", "Memory used, of the host and of GPUs", "GiB", GIB),
    ("power_watts", "GPUs' power", "W", 1.0),
    ("temperature_celsius", "GPUs' temperature", "degrees Celsius", 1.0),
    ("cpu_percent", "CPUs at work", "% of all cores", 1.0),
    ("process_memory_bytes", "Memory of the process", "GiB", GIB),
    ("network_received_bytes_per_second", "Network, received", "MiB/s", 2**20),
    ("network_sent_bytes_per_second", "Network, sent", "MiB/s", 2**20),
    ("disk_read_bytes_per_second", "Disk, read", "MiB/s", 2**20),
    ("disk_written_bytes_per_second", "Disk, written", "MiB/s", 2**20),
)
STYLE = (
    "body{font-family:sans-serif;margin:2em;max-width:1500px}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ccc}"
    "td:first-child,th:first-child{text-align:left}"
    ".charts{display:flex;flex-wrap:wrap;gap:1em}"
)


@dataclass(frozen=True)
class RunLog:
    """What the folder of a run holds.

    Attributes:
        name: of the folder.
        plan: as text.
        metrics: lines of `metrics.jsonl`.
        readings: lines of `system.jsonl`, and of other processes', that are readings, by process.
        unknown: what of the hardware could not be read, and why.
        summary: of the hardware, at the end of the run's last start.
    """

    name: str
    plan: str
    metrics: tuple[Mapping[str, Any], ...]
    readings: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)

    def steps(self, name: str) -> Points:
        """A number by step, where it is known and finite."""
        found = ((line["step"], line.get(name)) for line in self.metrics)
        return [(step, value) for step, value in found if isinstance(value, int | float) and _is_finite(value)]

    @property
    def not_finite(self) -> list[int]:
        return [line["step"] for line in self.metrics if "loss" in line and not _is_finite(line["loss"])]

    def lines(self, name: str) -> dict[str, Points]:
        """A reading by minutes since the first, for each card or host that has it."""
        start = min((line["time"] for lines in self.readings.values() for line in lines), default=0.0)
        found: dict[str, Points] = {}
        for process, lines in self.readings.items():
            for line in lines:
                for key, value in line.items():
                    if key.split("/")[-1] == name and _is_finite(value):
                        who = f"{process} {key.rpartition('/')[0] or 'host'}".strip()
                        found.setdefault(who, []).append(((line["time"] - start) / 60, value))
        return found


def read_run(folder: str | Path) -> RunLog:
    """What the folder of a run holds.

    Raises:
        FileNotFoundError: it is not the folder of a run.
        ValueError: a line in it that is none of a run's.
    """
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: there is no {folder / 'metrics.jsonl'}")
    plan = (folder / "plan.txt").read_text().strip() if (folder / "plan.txt").is_file() else ""
    readings: dict[str, tuple[Mapping[str, Any], ...]] = {}
    unknown: dict[str, str] = {}
    summary: Mapping[str, Any] = {}
    files = sorted(folder.glob("system*.jsonl"))
    for file in files:
        lines = _lines(file, "time")
        process = file.stem.removeprefix("system").replace("-", "process ") if len(files) > 1 else ""
        readings[process or ("process 0" if len(files) > 1 else "")] = tuple(line for line in lines if "step" in line)
        for line in lines:
            unknown |= line.get("unknown", {})
            summary = line.get("summary", summary) if not process else summary
    if len(files) > 1:  # each has its own cards' energy, and of one host the same CPUs': no sum of them is the run's
        summary = {key: value for key, value in summary.items() if "joules" not in key}
        unknown |= {"joules": "a run of several processes: each file's summary has those of its own cards and host"}
    return RunLog(folder.resolve().name, plan, _lines(folder / "metrics.jsonl", "step"), readings, unknown, summary)


def write_page(folders: Sequence[str | Path], to: str | Path) -> None:
    """Draws the runs of these folders, beside one another, into a file.

    Raises:
        FileNotFoundError: one is not the folder of a run.
    """
    page = render([read_run(folder) for folder in folders])
    place = Path(to).resolve()  # a link stays one
    if place.is_file() or not place.exists():
        write_whole(place, page)
    else:
        place.write_text(page, encoding="utf-8")  # what is no regular file, such as a pipe, is not replaced


def render(runs: Sequence[RunLog]) -> str:
    """The page."""
    names = [run.name if len(runs) == 1 else f"{i} {run.name}" for i, run in enumerate(runs, 1)]
    named = dict(zip(names, runs, strict=True))
    title = escape(", ".join(run.name for run in runs))
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>",
        _table(named),
        *_remarks(named),
        "<h2>Training</h2>",
        _charts([_by_step(named, *each) for each in STEPS]),
    ]
    if any(run.readings for run in runs):
        parts += ["<h2>Hardware</h2>", _charts([_by_minute(named, *each) for each in READINGS])]
    parts.append(
        f"<p>Lines of more than {MOST_POINTS} points are drawn as means of equal stretches.</p></body></html>\n"
    )
    return "\n".join(part for part in parts if part)


def _table(runs: Mapping[str, RunLog]) -> str:
    head = "run|plan|steps|loss|best validation|tokens/s|samples/s|MFU|GPU J a step|GPU J a sample|CPU J a step"
    rows = []
    for name, run in runs.items():
        last = run.steps("loss")
        scores = [value for _, value in run.steps("validation_loss")]
        cells = [name, run.plan, f"{max((line['step'] for line in run.metrics), default=0):,}"]
        cells += [f"{last[-1][1]:.4f}" if last else "", f"{min(scores):.4f}" if scores else ""]
        cells += [_middle(run.steps(rate), "{:,.0f}") for rate in ("tokens/s", "samples/s")]
        cells.append(_middle([(x, 100 * y) for x, y in run.steps("mfu")], "{:.1f} %"))
        for key in ("gpu_joules_per_step", "gpu_joules_per_sample", "cpu_joules_per_step"):
            value = run.summary.get(key, "")  # none of a card, where there is none
            cells.append("unknown" if value is None else f"{value:,.4g}" if value != "" else "")
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    heads = "".join(f"<th>{escape(each)}</th>" for each in head.split("|"))
    return f"<table><tr>{heads}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _middle(points: Points, how: str) -> str:
    return how.format(statistics.median(y for _, y in points)) if points else ""


def _remarks(runs: Mapping[str, RunLog]) -> list[str]:
    said = []
    for name, run in runs.items():
        if steps := run.not_finite:
            more = ", ..." if len(steps) > MOST_NAMED else ""
            listed = ", ".join(map(str, steps[:MOST_NAMED])) + more
            said.append(f"<p>{escape(name)}: {len(steps)} steps were not finite, and are not drawn: {listed}.</p>")
        for line in run.metrics:
            if "back_from" in line:
                back = f"back from step {line['back_from']} to step {line['step']}: {line.get('why', '')}"
                said.append(f"<p>{escape(name)}: {escape(back)}.</p>")
        if run.unknown:
            listed = "; ".join(f"{what} ({why})" for what, why in run.unknown.items())
            said.append(f"<p>{escape(name)}: not known: {escape(listed)}.</p>")
    return said


def _by_step(runs: Mapping[str, RunLog], name: str, title: str, unit: str, scale: float) -> str:
    return _chart(title, unit, "step", {each: run.steps(name) for each, run in runs.items()}, scale)


def _by_minute(runs: Mapping[str, RunLog], name: str, title: str, unit: str, scale: float) -> str:
    series = {}
    for each, run in runs.items():
        for who, points in run.lines(name).items():
            series[who if len(runs) == 1 else f"{each} {who}"] = points
    return _chart(title, unit, "minutes", series, scale)


def _chart(title: str, unit: str, across: str, series: Mapping[str, Points], scale: float) -> str:
    drawn = {name: _fewer([(x, y / scale) for x, y in points]) for name, points in series.items() if points}
    if not drawn:
        return ""
    values = [y for points in drawn.values() for _, y in points]
    low, high = min(values), max(values)
    if across == "minutes":
        low = min(low, 0.0)  # of what hardware does, the share of all is what one looks for
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return Chart(title, unit, across, *round_scale(low, high)).svg(drawn)


def round_scale(low: float, high: float) -> tuple[float, float]:
    """The ends of a scale whose quarters are round numbers, around these.

    >>> round_scale(1.929, 9.905), round_scale(0, 96)
    ((0.0, 10.0), (0.0, 100.0))
    """
    least = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(least))
    for step in (times * unit for times in (1, 2, 2.5, 5, 10, 20)):
        start = math.floor(low / step) * step
        if start + 4 * step >= high * (1 - 1e-12) - 1e-12 * abs(low):
            return start, start + 4 * step
    raise AssertionError((low, high))


def _charts(pictures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(pictures)}</div>'


def _fewer(points: Points) -> Points:
    """Means of equal stretches, where there are more points than can be seen.

    >>> len(_fewer([(x, 1.0) for x in range(1000)])) <= MOST_POINTS, _fewer([(1, 2.0)])
    (True, [(1, 2.0)])
    """
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return points
    cut = [points[i : i + size] for i in range(0, len(points), size)]
    return [(statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for part in cut]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _lines(file: Path, needed: str) -> tuple[Mapping[str, Any], ...]:
    """The whole lines of a file; the last may still be written."""
    text, found = file.read_text(), []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or not _is_finite(values.get(needed)):
                raise ValueError(f"it has no {needed!r}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}, is none that a run writes ({error}): remove it") from error
        found.append(values)
    return tuple(found)
