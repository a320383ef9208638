"""What the mark `full` leaves out of the default run."""

from types import SimpleNamespace
from typing import Any

import pytest
from full import by_default, is_row_left_out


def item(name: str, mark: tuple[str, ...] | None = None) -> Any:
    """A test, or a row of one; `mark`: what its mark names, of which () is all."""
    marks = [] if mark is None else [pytest.mark.full(*mark).mark]
    row = name.partition("[")[2].removesuffix("]")
    return SimpleNamespace(
        nodeid=f"tests/test_a.py::{name}", iter_markers=lambda name: marks, callspec=SimpleNamespace(id=row)
    )


def names(items: Any) -> list[str]:
    return [each.nodeid.partition("::")[2] for each in items]


def test_what_is_marked_is_left_out_and_of_rows_those_that_are_named() -> None:
    rows = [item(f"test_rows[{row}]", ("tensor=8", "a[b]")) for row in ("tensor=8", "zero=1", "a[b]")]
    assert names(by_default([item("test_one"), item("test_slow", ()), *rows], False)) == [
        "test_one",
        "test_rows[zero=1]",
    ]


def test_a_row_that_is_gone_ends_the_run_unless_others_are_left_out_too() -> None:
    rows = [item(f"test_rows[{row}]", ("tensor=8", "zero=3")) for row in ("tensor=8", "zero=1")]
    with pytest.raises(pytest.UsageError, match=r"no rows of their tests: tests/test_a.py::test_rows\[zero=3\]$"):
        by_default(rows, False)
    assert names(by_default(rows, True)) == ["test_rows[zero=1]"]


def test_a_row_is_told_from_others_that_begin_alike() -> None:
    @pytest.mark.full("net-tensor=8", "net-zero=3 remat=block-how1")
    def test_some() -> None: ...

    @pytest.mark.full
    def test_all() -> None: ...

    def test_none() -> None: ...

    assert is_row_left_out(test_some, "net-tensor=8") and is_row_left_out(test_some, "net-zero=3 remat=block")
    assert not is_row_left_out(test_some, "net-tensor=8 zero=1") and not is_row_left_out(test_some, "net-zero=3")
    assert is_row_left_out(test_all, "net-zero=3") and not is_row_left_out(test_none, "net-zero=3")
