"""Which tests are of the full product alone: those marked `full`, or the rows of them that the mark names."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def is_full(item: pytest.Item) -> bool:
    row = getattr(getattr(item, "callspec", None), "id", None)
    return any(not mark.args or row in mark.args for mark in item.iter_markers("full"))


def is_row_left_out(test: Any, row: str) -> bool:
    """Whether a test function's mark leaves out a row; of an id that goes on behind it, as of another argument, too."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "full"]
    return any(not mark.args or any(f"{name}-".startswith(f"{row}-") for name in mark.args) for mark in marks)


def rows_that_are_gone(items: Iterable[pytest.Item]) -> list[str]:
    """Rows that a mark names and no item has: whoever renames a row would have it run by default without a word."""
    items = list(items)
    named = {
        f"{item.nodeid.partition('[')[0]}[{row}]"
        for item in items
        for mark in item.iter_markers("full")
        for row in mark.args
    }
    return sorted(named - {item.nodeid for item in items})


def by_default(items: Sequence[pytest.Item], are_some_left_out: bool) -> list[pytest.Item]:
    """Items that are not of the full product alone.

    Args:
        items: what pytest has collected.
        are_some_left_out: of tests that have rows, so that a row may be missing that is there (`pytest --lf`).

    Raises:
        pytest.UsageError: when a mark names rows that are gone.
    """
    if not are_some_left_out and (gone := rows_that_are_gone(items)):
        raise pytest.UsageError(f"marked `full`, but no rows of their tests: {', '.join(gone)}")
    return [item for item in items if not is_full(item)]


def stretch(items: Sequence[Any], which: str) -> Sequence[Any]:
    """A stretch of items, one behind the other, since neighbours share what they compile: "2/5" is the second of five.

    >>> [list(stretch(range(7), f"{at}/3")) for at in (1, 2, 3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    """
    at, _, num = which.partition("/")
    start, stop = ((int(at) - more) * len(items) // int(num) for more in (1, 0))
    return items[start:stop]
