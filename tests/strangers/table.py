"""docs/strangers.md, from what was kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def summary(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for line in results.values():
        counts[line["outcome"]] = counts.get(line["outcome"], 0) + 1
    return f"{len(results)} pairs: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))


def write(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    raise NotImplementedError
