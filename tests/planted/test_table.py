"""Rows of planted faults still apply; `tests/planted/run.py` plants them and says who notices."""

from pathlib import Path

import pytest
from planted.run import fresh_log, functions, is_known, never_failed, short, verdict
from planted.table import LEAST, ROOT, Fault, faults, left_out, logged, num_statements, unplanted

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


def test_each_module_has_a_fault() -> None:
    """All that have more than a few statements; those in `left.toml` are to become fewer."""
    found, left = unplanted({fault.file for fault in FAULTS}), left_out("unplanted")
    assert not found - left, f"plant a fault: a row in faults.toml for each of {sorted(found - left)}"
    assert not left - found, f"these have a fault, or need none: take them out of left.toml: {sorted(left - found)}"


def test_each_row_has_run() -> None:
    """And was noticed, as a log in docs/results says: a row that nobody runs is a guess."""
    done, left = logged(), left_out("unlogged")
    found = {f"{fault.file}: {fault.what}" for fault in FAULTS if fault.logged_as not in done}
    assert not found - left, f"run them: python tests/planted/run.py --unlogged: {sorted(found - left)}"
    assert not left - found, f"these are in a log, or gone: take them out of left.toml: {sorted(left - found)}"


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


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    for name in ("a.log", "a-2.log", "a-3.log"):
        assert (path := fresh_log(tmp_path, "a")) == tmp_path / name
        path.write_text("")


def test_what_counts_as_noticed() -> None:
    assert verdict(0, [], "1 passed") == []
    assert verdict(1, ["a.py::test_b"], "1 failed") == ["a.py::test_b"]
    assert verdict(2, ["a.py"], "1 error") == ["a.py"], "a file of tests that can't be read any more"
    assert verdict(None, [], "") and verdict(-6, [], "Aborted")
    with pytest.raises(RuntimeError, match="no tests ran"):
        verdict(5, [], "no tests ran")


LOG = """python tests/planted/run.py: faults planted one at a time
2 of 4 rows ran

trace/stages
  stacks.py: a loop (of 3) is none: it turns once (12 s)
    trace/stages/test_stacks.py::test_a
  stacks.py: nobody sees it (3 s)
    NOBODY of tests/trace/stages/test_stacks.py

walk
  stacks.py: another one (1 s)
    walk/test_stacks.py::test_b, walk/test_stacks.py::test_c
"""


def test_what_a_log_says_was_noticed(tmp_path: Path) -> None:
    (tmp_path / "planted-2026-01-01.log").write_text(LOG)
    (tmp_path / "programs-2026-01-01.log").write_text(LOG.replace("nobody", "somebody").replace("NOBODY", "trace"))
    rows = [("trace/stages", "stacks.py", "a loop (of 3) is none: it turns once"), ("walk", "stacks.py", "another one")]
    assert logged(tmp_path) == set(rows)
    assert Fault("cjax/trace/stages/stacks.py", "another one", "", "", ()).logged_as not in rows
    assert Fault("cjax/walk/stacks.py", "another one", "", "", ()).logged_as in rows


def test_a_module_without_a_fault_is_found(tmp_path: Path) -> None:
    large = '"""What it is."""\nimport os\n' + "x = 1\n" * (LEAST + 1)
    (tmp_path / "cjax").mkdir()
    for name, text in {"a": large, "b": large, "c": large.replace("x = 1\n", "", 1)}.items():
        (tmp_path / "cjax" / f"{name}.py").write_text(text)
    assert num_statements(large) == LEAST + 1
    assert unplanted({"cjax/b.py"}, tmp_path) == {"cjax/a.py"}


def test_tests_that_fail_beside_no_fault_are_told() -> None:
    found = [
        {
            "noticed": ["a.py::one[x]", "a.py::one[y]"],
            "passed": functions(["a.py::one[z]", "a.py::two[x]", "a.py::two"]),
        },
        {"noticed": ["(the process is aborted)"], "passed": []},
        {"noticed": ["a.py::four"], "passed": ["a.py::three"]},
        {"noticed": ["a.py::five"]},
    ]
    assert never_failed(found) == ["a.py::three", "a.py::two"]
    assert is_known(found[1], True) and is_known(found[3], False) and not is_known(found[3], True)
    assert not is_known({"noticed": [], "passed": ["a.py::one"]}, True), "who asks again has mended a test"
    assert short(["tests/a.py::one", "b", "c", "d", "e"]) == "a.py::one, b, c, and 2 more"
