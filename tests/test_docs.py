"""What README.md and docs/ say is true: snippets run, commands exist, links resolve, generated parts are fresh."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import snippets

import cjax.report as report
from cjax.cli import main

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "cjax"
README, DESIGN = ROOT / "README.md", ROOT / "docs" / "design.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Places of one machine, and hosts of registries: pages are read elsewhere.
PLACES = r"(?<![\w.~-])/(?:work|tmp|home|root|opt|usr|mnt|var|Users)\b"
ELSEWHERE = re.compile(PLACES + r"|\b\d+(?:\.\d+){3}\b|pypi|index-url")


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    variables |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} | environment
    variables.pop("CJAX_TEST_ALL", None)
    return subprocess.run([sys.executable, *command], cwd=cwd, env=variables, capture_output=True, text=True)


# -- snippets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_snippets_do_what_they_say(page: Path, tmp_path: Path) -> None:
    if not snippets.snippets(page.read_text()):
        return
    done = run(str(ROOT / "tests" / "snippets.py"), str(page), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "and gives\n1"),
        ("```python\nx = 1\n```\n```text\nValueError: no\n```\n", "raises nothing"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\n1 / 0\n```\n```text\nZeroDivisionError: ...else\n```\n", "division by zero"),
    ],
)
def test_a_false_snippet_is_seen(text: str, said: str) -> None:
    ((block, wanted),) = snippets.snippets(text)
    assert said in snippets.run(block, wanted, {}, "page.md")


def test_text_is_expected_only_right_behind_its_snippet() -> None:
    text = "```python\n1\n```\n\nand\n\n```text\n2\n```\n"
    assert [wanted for _, wanted in snippets.snippets(text)] == [None]


def test_needs_are_modules() -> None:
    needed = {block.needs for page in PAGES for block in snippets.fenced(page.read_text())} - {None}
    assert needed <= set(snippets.MODULES)


# -- commands ---------------------------------------------------------------------------------------------------------
def all_console_lines() -> list[list[str]]:
    blocks = [block for page in PAGES for block in snippets.fenced(page.read_text()) if block.language == "console"]
    return [line.split() for block in blocks for line in block.body.splitlines()]


def console_lines(program: str) -> list[list[str]]:
    return [words for words in all_console_lines() if words[0] == program]


def test_every_console_line_is_of_a_known_program() -> None:
    assert {words[0] for words in all_console_lines()} == {"make", "cjax", "pip"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for words in console_lines("make") for target in words[1:]}
    named |= {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text())}
    assert named and named <= targets


def test_cjax_commands_and_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for words in console_lines("cjax"):
        with pytest.raises(SystemExit) as ended:
            main([words[1], "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and words[1] in shown
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), f"cjax {words[1]} has no {option}"


def test_extras_are_those_of_the_project() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    section = README.read_text().partition("## Installing")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == extras
    for words in console_lines("pip"):
        assert set(re.findall(r"\[([\w,]+)\]", words[-1])[0].split(",")) <= extras


# -- what must not go stale -------------------------------------------------------------------------------------------
def test_the_table_of_what_works_is_fresh() -> None:
    done = run(str(ROOT / "tests" / "works.py"), "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_report_explained_is_one_that_is_printed() -> None:
    """Its labels and its tables' heads, in their order."""
    text = README.read_text()
    (block,) = [b for b in snippets.fenced(text) if text[: b.start].endswith("<!-- report -->\n")]
    row = report.ParamRow("w", (4, 4), "float32", ("in", "out"), ((), ("tensor",)), 64, 32)
    made = str(
        report.Report(
            "tensor=2",
            "2 x H100",
            report.MemoryUse(params=2**30, limit=2**31),
            params=[row],
            transfers=[report.Transfer("all-reduce", "tensor", 2**30, 1, 0)],
            flops=report.FlopCount(1e12, 1e12, 0, 1e12),
            time=report.StepTime(1.0),
        )
    )
    assert labels(block.body) == labels(made)
    explained = text[block.stop :].partition("\n## ")[0]
    assert [name for name in labels(made) if f"**{name}**" not in explained] == []


def labels(text: str) -> list[str]:
    """First words of a report's lines, of its tables the heads alone."""
    head, *tables = text.strip().split("\n\n")
    return [line.split()[0] for line in head.splitlines() if line[0] != " "] + [table.split()[0] for table in tables]


def rooms_on_disk() -> set[str]:
    folders = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    return folders | {path.stem for path in HOUSE.glob("*.py")} - {"__init__"}


def test_design_names_every_room_and_no_other() -> None:
    (house,) = [b for b in snippets.fenced(DESIGN.read_text()) if b.body.startswith("cjax/\n")]
    named = {m[1] for m in re.finditer(r"^  (\w+)(?:/|\.py) ", house.body, re.M)}
    assert named == rooms_on_disk()


def test_modules_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`((?:cjax|tests|docs)/[\w/.-]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}, which is not there"


# -- links ------------------------------------------------------------------------------------------------------------
def anchors(text: str) -> set[str]:
    """Headings as a link names them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(snippets.FENCE, "", text), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_resolve(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(snippets.FENCE, "", text)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(linked.read_text()), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").glob("*.ipynb"))], ids=lambda page: page.name)
def test_pages_name_no_place_of_one_machine(page: Path) -> None:
    found = ELSEWHERE.search(page.read_text())
    assert not found, f"{page.name} names {found[0]}" if found else ""
