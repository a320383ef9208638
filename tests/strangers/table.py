"""docs/strangers.md, from what was kept."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strangers.plans import NUM_DEVICES, PLANS
from strangers.rows import ROWS

PAGE = Path(__file__).parent.parent.parent / "docs" / "strangers.md"
MARKS = {"equal": "="}  # what is neither that nor refused is written out: WRONG, CRASH, HANG
Results = Mapping[tuple[str, str], Mapping[str, Any]]

HEAD = """# Strangers

Models that nobody here wrote, at tiny sizes with random weights, each under {number} plans on {devices} virtual \
devices. `make test-strangers` installs them into an environment of its own, runs each pair in a process of its own, \
so that a hang or an abort does no harm, and writes this page. {said}

- **=**: in float64, one step gives the loss and every gradient that plain Flax and JAX give on one device, to 1e-9 of \
each gradient's norm. Where the author fixed a precision below float64 somewhere in the model it is 1e-5 \
([design.md](design.md), numerical contracts). Where examples interact inside the model (BatchNorm, experts with a \
capacity), the comparison is with the author's micro-batches as batches of their own.
- **no**: cjax refuses and says why. The number is that of a reason below.
- Empty: nothing was run.

No code of cjax knows any of these models by name.

"""


def summary(results: Results) -> str:
    counts: dict[str, int] = {}
    for line in results.values():
        counts[line["outcome"]] = counts.get(line["outcome"], 0) + 1
    return f"{len(results)} pairs: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))


def when(results: Results) -> str:
    """The days on which pairs were run, and the JAX under which."""
    days = sorted({line["date"] for line in results.values()})
    jaxes = sorted({line["version"].partition(" jax ")[2] for line in results.values()})
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))} under JAX {' and '.join(jaxes)}"


def write(results: Results) -> None:
    PAGE.write_text(page(results))


def page(results: Results) -> str:
    reasons = _reasons(results)
    said = f"This one is of {when(results)}, and has {summary(results)}."
    lines = [HEAD.format(number=len(PLANS), devices=NUM_DEVICES, said=said)]
    lines += [f"{number}. `{plan}`\n" for number, plan in enumerate(PLANS, 1)]
    numbers = " | ".join(str(number) for number, _ in enumerate(PLANS, 1))
    lines.append(f"\n| model | from | what it has | {numbers} |\n")
    lines.append("| --- " * (3 + len(PLANS)) + "|\n")
    for row in ROWS:
        cells = " | ".join(_cell(results.get((row.name, plan)), reasons) for plan in PLANS)
        lines.append(f"| {row.name} | {row.source} | {row.what} | {cells} |\n")
    if reasons:
        lines.append("\n## Why plans were refused\n\n")
        lines += [f"{number}. {reason}\n" for reason, number in reasons.items()]
    return "".join(lines)


def _reasons(results: Results) -> dict[str, int]:
    """The reasons of refusals in the order of the table, each once."""
    ordered = [results.get((row.name, plan)) for row in ROWS for plan in PLANS]
    said = dict.fromkeys(_reason(line) for line in ordered if line and line["outcome"] == "refused")
    return {reason: number for number, reason in enumerate(said, 1)}


def _reason(line: Mapping[str, Any]) -> str:
    """The first sentence on one line, its numbers left out: what follows are suggestions, and differ by model."""
    sentence = re.split(r"(?<=[.:!?])\s*\n|(?<=\.)\s", line["why"], maxsplit=1)[0]
    return re.sub(r"(?<![\w.])\d+(?!\w|\.\d)", "N", " ".join(sentence.split()).rstrip(".:")).replace("|", "\\|")


def _cell(line: Mapping[str, Any] | None, reasons: Mapping[str, int]) -> str:
    if line is None:
        return ""
    if line["outcome"] == "refused":
        return f"no ({reasons[_reason(line)]})"
    return MARKS.get(line["outcome"], line["outcome"])
