"""The full product, part by part: what has passed is not run again, and what fails is told in full."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import full
import parts
import pytest


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "room" / "test_deep.py").write_text("def test_it():\n    assert True\n")
    (tmp_path / "tests" / "test_top.py").write_text("def test_it():\n    assert 1 + 1 == 3, 'planted'\n")
    (tmp_path / ".gitignore").write_text("log\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_goes_on_where_it_stopped(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def pretend(part: str, root: Path, options: Sequence[str]) -> tuple[int, str]:
        ran.append(part)
        planted = part.endswith("test_top.py") and "planted" in (root / part).read_text()
        return (1, "planted\n1 failed in 0.1s") if planted else (0, "1 passed in 0.1s")

    monkeypatch.setattr(parts, "run", pretend)
    log = house / "log"

    def status(*more: str) -> tuple[int, list[str]]:
        ran.clear()
        return parts.main(["--log", str(log), *more], house), list(ran)

    assert parts.parts(house) == ["cjax", "tests/room", "tests/test_top.py"]
    assert status("--only", "room") == (1, ["tests/room"])  # the others are missing
    assert status() == (1, ["cjax", "tests/test_top.py"])
    assert "FAILED  tests/test_top.py" in log.read_text() and "planted" in log.read_text()
    assert status() == (1, ["tests/test_top.py"])  # what failed runs again
    (house / "tests" / "test_top.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    assert status() == (0, ["tests/test_top.py"])  # no other part depends on it
    assert status() == (0, [])
    (house / "tests" / "room" / "test_deep.py").write_text("READ = __file__\ndef test_it():\n    assert True\n")
    assert status() == (0, ["tests/room"])
    (house / "tests" / "test_top.py").write_text("def test_it():\n    assert 1 + 2 == 3\n")
    assert status() == (0, ["tests/room", "tests/test_top.py"])  # a part that reads files may read these
    (house / "tests" / "room" / "kept.json").write_text("{}\n")
    assert status() == (0, ["tests/room"])  # a folder's data are its own
    (house / "tests" / "helper.py").write_text("HELP = 1\n")
    assert status() == (0, ["cjax", "tests/room", "tests/test_top.py"])
    (house / "tests" / "test_top.py").write_text("from helper import HELP\n")
    assert status() == (0, ["tests/room", "tests/test_top.py"])
    (house / "README.md").write_text("docs\n")
    assert status() == (0, ["tests/room"])  # who only imports does not see docs
    (house / "tests" / "helper.py").write_text("HELP = __file__\n")
    assert status() == (0, ["cjax", "tests/room", "tests/test_top.py"])
    (house / "README.md").write_text("more docs\n")
    assert status() == (0, ["tests/room", "tests/test_top.py"])  # whose helper reads files
    assert status() == (0, [])
    assert log.read_text().count("1 passed") == 3 and parts.versions() in log.read_text()
    assert status("--again", "--only", "room") == (0, ["tests/room"])


def test_goes_on_where_the_log_of_another_day_or_checkout_ends(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "run", lambda part, root, options: (0, "1 passed in 0.1s"))
    logs = house / "docs" / "results"
    assert parts.main(["--only", "room"], house) == 1
    (written,) = logs.iterdir()
    earlier = logs / re.sub(r"\d{4}-\d\d-\d\d", "2001-02-03", written.name)
    earlier.write_text(re.sub(r"\d{4}-\d\d-\d\d 1 passed", "2001-02-03 1 passed", written.read_text()))
    written.unlink()
    ran: list[str] = []

    def count(part: str, root: Path, options: Sequence[str]) -> tuple[int, str]:
        ran.append(part)
        return 0, "2 passed in 0.1s"

    monkeypatch.setattr(parts, "run", count)
    assert (parts.main([], house), ran) == (0, ["cjax", "tests/test_top.py"])
    assert "2001-02-03 1 passed" in written.read_text(), "which day it was"
    monkeypatch.setattr(parts, "versions", lambda: "JAX of another day")
    assert (parts.main([], house), len(ran)) == (0, 5), "of other versions nothing is known"


def test_a_long_file_goes_on_where_a_stretch_ended(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STRETCHES", {"tests/test_top.py": 2})
    stretches = ["tests/test_top.py:1/2", "tests/test_top.py:2/2"]
    assert parts.parts(house) == ["cjax", "tests/room", *stretches]
    assert len({parts.sources(house, name) for name in (*stretches, "tests/test_top.py")}) == 1
    ran: list[str] = []

    def run(part: str, root: Path, options: Sequence[str]) -> tuple[int, str]:
        ran.append(part)
        return int(ran.count(part) == 1 and "2/2" in part), "1 passed in 0.1s"

    monkeypatch.setattr(parts, "run", run)
    log = ["--log", str(house / "log"), "--only", "top"]
    assert [parts.main(log, house), parts.main(log, house)] == [1, 1], "the others are missing"
    assert ran == [*stretches, stretches[1]]


def test_stretches_are_all_of_a_file(house: Path) -> None:
    (house / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (house / "tests" / "conftest.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(full.__file__).parent)!r})\nimport full\n"
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = full.stretch(items, os.environ['CJAX_TEST_STRETCH'])\n"
    )
    (house / "tests" / "test_top.py").write_text("".join(f"def test_{i}():\n    assert True\n" for i in range(5)))
    said = [parts.line_of(parts.run(f"tests/test_top.py:{at}/2", house, [])[1]) for at in (1, 2)]
    assert [line.partition(" in ")[0] for line in said] == ["2 passed", "3 passed"]


def test_a_part_is_run_by_pytest(house: Path) -> None:
    (house / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    status, output = parts.run("tests", house, [])
    assert status == 1 and "planted" in output and parts.line_of(output).startswith("1 failed, 1 passed")
