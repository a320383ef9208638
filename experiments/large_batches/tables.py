"""Tables of `large_batch.py`, made of the rows on disk, as Markdown."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.markdown import table
from shared.results import Results, Row

from .recipes import RECIPES, TUNED_AT, warmup_share

TARGETS = {"mnist": 0.97}  # of accuracy, for the epochs that it takes
OTHER_TARGET = 0.9
CLAIM = 8192


def write_tables(results: Results, folder: Path) -> str:
    """All tables as one text, also kept as `tables.md`."""
    parts = [_images(rows) for rows in series(results.of("a"))]
    parts += [_masked(rows) for rows in series(results.of("b"))]
    parts += [_tuning(rows) for part in "ab" for rows in grouped(results.of(part), "data").values()]
    text = "\n\n".join(part for part in parts if part)
    (folder / "tables.md").write_text(text + "\n")
    return text


def series(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs on the same data and as many samples, at the recipes' own rates and more than one batch size.

    The longest come first. Other runs were for tuning.
    """
    usual = [
        row for row in rows if math.isclose(row["rate"], RECIPES[row["optimizer"]].rate_at(row["batch"]), rel_tol=1e-3)
    ]
    groups = [some for of_data in grouped(usual, "data").values() for some in grouped(of_data, "samples").values()]
    return [some for some in groups[::-1] if len(grouped(some, "batch")) > 1]


def grouped(rows: Sequence[Row], name: str) -> dict:
    """Rows by the value of one entry; optimizers in the order of the recipes, batches by size."""
    order = list(RECIPES)
    values = sorted({row[name] for row in rows}, key=lambda v: order.index(v) if v in order else v)
    return {value: [row for row in rows if row[name] == value] for value in values}


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Of the last score of each run."""
    return statistics.mean(row[name][-1] for row in rows)


def epochs_to(row: Row, target: float) -> float | None:
    """The first scored epoch at which the test accuracy is the target's or above."""
    return next((e for e, a in zip(row["epochs"], row["accuracy"], strict=True) if a >= target), None)


def _grid(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> str:
    batches = list(grouped(rows, "batch"))
    lines = []
    for name, some in grouped(rows, "optimizer").items():
        by_batch = grouped(some, "batch")
        lines.append([name, *(cell(by_batch[batch]) if batch in by_batch else "" for batch in batches)])
    return table(["optimizer", *(f"{batch:,}" for batch in batches)], lines)


def _accuracy(rows: Sequence[Row]) -> str:
    found = [100 * row["accuracy"][-1] for row in rows]
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.2f}{spread}"


def _steps(rows: Sequence[Row]) -> str:
    row = rows[0]
    warmup = round(warmup_share(row["batch"]) * row["steps"])
    return f"{row['rate']:g} ({warmup} of {row['steps']})"


def _images(rows: Sequence[Row]) -> str:
    target = TARGETS.get(rows[0]["data"], OTHER_TARGET)

    def epochs(some: Sequence[Row]) -> str:
        found = [epochs_to(row, target) for row in some]
        reached = [e for e in found if e is not None]
        return f"{statistics.mean(reached):.1f}" if len(reached) == len(found) else "not reached"

    several = len({row["seed"] for row in rows}) > 1
    about = f"ViT on {rows[0]['data']}, {rows[0]['epochs'][-1]:.0f} epochs at every batch size"
    parts = [
        f"**{about}: test accuracy at the end, %**" + ("; ± is the deviation over seeds" if several else ""),
        _grid(rows, _accuracy),
        f"**Epochs to a test accuracy of {target:.0%}**, scored once an epoch",
        _grid(rows, epochs),
        "**Peak rates (steps of warm-up, of all steps)**",
        _grid(rows, _steps),
        "Number of runs, and steps that were skipped because they were not finite: "
        f"{len(rows)}, {sum(row['skipped'] for row in rows)}.",
        _claim(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _claim(rows: Sequence[Row]) -> str:
    said = []
    for name, some in grouped(rows, "optimizer").items():
        by_batch = grouped(some, "batch")
        if {TUNED_AT, CLAIM} <= set(by_batch):
            lost = 100 * (mean_of(by_batch[TUNED_AT], "accuracy") - mean_of(by_batch[CLAIM], "accuracy"))
            said.append(f"{name} {lost:+.2f}")
    return f"Points of accuracy lost between batch {TUNED_AT} and {CLAIM:,}: {', '.join(said)}." if said else ""


def _masked(rows: Sequence[Row]) -> str:
    lines = []
    for batch, some in grouped(rows, "batch").items():
        row = some[0]
        lines.append([f"{batch:,}", _steps(some), f"{mean_of(some, 'test_loss'):.3f}",
                      f"{100 * mean_of(some, 'accuracy'):.2f}", f"{row['seconds']:.0f}"])  # fmt: skip
    title = (
        f"**Masked bytes of {rows[0]['data']}, {rows[0]['optimizer'].upper()}, {rows[0]['samples']:,} samples at every "
        "batch size**"
    )
    head = ["batch", "peak rate (warm-up of steps)", "test loss, nats a byte", "accuracy, %", "seconds"]
    return f"{title}\n\n{table(head, lines)}"


def _tuning(rows: Sequence[Row]) -> str:
    """All runs of seed 0 at a batch where more than one rate or length was tried."""
    keys = sorted(rows, key=lambda row: (row["optimizer"], row["batch"], row["samples"], row["rate"]))
    tried = [(row["optimizer"], row["batch"]) for row in keys if row["seed"] == 0]
    lines = [
        [row["optimizer"], f"{row['batch']:,}", f"{row['epochs'][-1]:.0f}", f"{row['rate']:g}",
         f"{row['test_loss'][-1]:.4f}", f"{100 * row['accuracy'][-1]:.2f}"]
        for row in keys
        if row["seed"] == 0 and tried.count((row["optimizer"], row["batch"])) > 1
    ]  # fmt: skip
    head = ["optimizer", "batch", "epochs", "peak rate", "test loss", "accuracy, %"]
    title = f"**Rates that were tried on {rows[0]['data']}**, in shorter runs too"
    return f"{title}\n\n{table(head, lines)}" if lines else ""
