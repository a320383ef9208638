"""Rows of numbers on disk, and where those of a release are kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEPT = Path(__file__).parents[2] / "docs" / "results"


class Results:
    """Rows on disk, one JSON object a line: each is kept as soon as it is known, and what is there isn't done again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def get(self, key: Row, make: Callable[[], Row]) -> Row:
        """The row with these entries; made and kept if there is none."""
        key = json.loads(json.dumps(key))
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        row = key | make()
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row

    def of(self, part: str) -> list[Row]:
        return [row for row in self.rows if row["part"] == part]
