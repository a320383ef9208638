"""Rows of planted faults still apply; `tests/planted/run.py` plants them and says who notices."""

from pathlib import Path

import pytest
from planted.run import verdict
from planted.table import ROOT, Fault, faults

FAULTS = faults()


@pytest.mark.parametrize("file", dict.fromkeys(fault.file for fault in FAULTS))
def test_rows_still_apply(file: str) -> None:
    for fault in (fault for fault in FAULTS if fault.file == file):
        assert fault.planted() != (ROOT / file).read_text()
        for test in fault.tests:
            where, _, name = test.partition("::")
            assert name.partition("[")[0] in (ROOT / where).read_text()


def test_no_room_is_left_out() -> None:
    """Each folder that has code of its own, and each file that is a room."""
    files = [path.relative_to(ROOT / "cjax") for path in (ROOT / "cjax").rglob("*.py") if path.stem != "__init__"]
    rooms = {"/".join(path.parts[:-1]) or path.stem for path in files}
    assert rooms == {fault.room for fault in FAULTS}


def test_no_two_rows_are_one() -> None:
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.what) for fault in FAULTS}) == len(FAULTS)


def test_a_stale_row_is_loud(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    with pytest.raises(ValueError, match="there 0 times: z"):
        Fault("a.py", "gone", "z", "1", ()).planted(tmp_path)
    with pytest.raises(ValueError, match="there 2 times"):
        Fault("a.py", "not clear", "= 1", "= 2", ()).planted(tmp_path)
    assert Fault("a.py", "wrong", "x = 1", "x = 2", ()).planted(tmp_path) == "x = 2\ny = 1\n"


def test_what_counts_as_noticed() -> None:
    assert verdict(0, [], "1 passed") == []
    assert verdict(1, ["a.py::test_b"], "1 failed") == ["a.py::test_b"]
    assert verdict(2, ["a.py"], "1 error") == ["a.py"], "a file of tests that can't be read any more"
    assert verdict(None, [], "") and verdict(-6, [], "Aborted")
    with pytest.raises(RuntimeError, match="no tests ran"):
        verdict(5, [], "no tests ran")
