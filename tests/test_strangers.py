"""docs/strangers.md and the table of strangers name the same; that they run is `make test-strangers`."""

import ast
from pathlib import Path

import pytest
from strangers import table
from strangers.common import ROWS as BATCH
from strangers.plans import NUM_DEVICES, PLANS
from strangers.rows import ROWS

from cjax.plan import Plan

FOLDER = Path(__file__).parent / "strangers"
MARKS = {"", "=", "WRONG", "CRASH", "HANG"}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_page_has_a_row_for_each_stranger_and_a_column_for_each_plan() -> None:
    text = table.PAGE.read_text()
    rows = [cells(line) for line in text.splitlines() if line.startswith("| ")][2:]
    assert [(row.name, row.source, row.what) for row in ROWS] == [tuple(row[:3]) for row in rows]
    assert [f"{i}. `{plan}`" for i, plan in enumerate(PLANS, 1)] == text.split("\n\n| model")[0].split("\n")[
        -len(PLANS) :
    ]
    for row in rows:
        assert len(row) == 3 + len(PLANS)
        assert all(mark in MARKS or mark.startswith("no (") for mark in row[3:]), row


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_row_is_made_by_a_function_that_is_there(row) -> None:
    module, function = row.make.split(":")
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_are_of_these_devices_and_rows(plan: str) -> None:
    resolved = Plan.parse(plan).resolve(NUM_DEVICES)
    assert BATCH % (resolved.data * resolved.microbatches) == 0


def test_a_page_says_what_was_run() -> None:
    name, (first, second, third) = ROWS[0].name, PLANS[:3]
    ran = {"version": "0123 jax 0.12.0", "date": "2026-11-24"}
    lines = {
        (name, first): {"outcome": "equal", "why": ""},
        (name, second): {
            "outcome": "refused",
            "why": "tensor=2d:4 | 12 rows\ncannot be. Any of these works:\n  plan=...",
        },
        (name, third): {"outcome": "HANG", "why": "in step"},
        (name, PLANS[4]): {"outcome": "refused", "why": "tensor=2d:4 | 7 rows cannot be.\nTake 8"},
    }
    text = table.page({pair: {**ran, **line} for pair, line in lines.items()})
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {name} "))
    assert cells(row)[3:7] == ["=", "no (1)", "HANG", ""] and cells(row)[7] == "no (1)"
    assert text.endswith("1. tensor=2d:N \\| N rows cannot be\n")
    assert "This one is of 2026-11-24 under JAX 0.12.0, and has 4 pairs: 1 HANG, 1 equal, 2 refused." in text
