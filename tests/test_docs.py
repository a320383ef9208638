"""What README.md and docs/ say is true: snippets run, commands exist, links resolve, generated parts are fresh."""

import ast
import importlib
import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import snippets
from forked import Forks

import cjax
import cjax.report as report
from cjax.cli import main
from cjax.cli.cluster import VERBS
from cjax.cli.commands import COMMANDS
from cjax.plan import Plan
from cjax.plan.text import NAMES as PLAN_NAMES
from cjax.plan.text import WORDS as PLAN_WORDS

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "cjax"
DOCS = ROOT / "docs"
README, DESIGN = ROOT / "README.md", DOCS / "design.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Places of one machine, and hosts of registries: pages are read elsewhere.
PLACES = r"(?<![\w.~-])/(?:work|tmp|home|root|opt|usr|mnt|var|Users)\b"
ELSEWHERE = re.compile(PLACES + r"|\b\d+(?:\.\d+){3}\b|pypi|index-url")


def variables() -> dict[str, str]:
    given = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    given |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    given.pop("CJAX_TEST_ALL", None)
    return given


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = variables() | environment
    return subprocess.run([sys.executable, *command], cwd=cwd, env=given, capture_output=True, text=True)


# -- snippets ---------------------------------------------------------------------------------------------------------
def pages_with(kind: str) -> list[Any]:
    """Pages that show something to be run: alone, or (`aot`) with GPUs that are not here."""
    found = []
    for page in PAGES:
        needs = {block.needs for block, _ in snippets.snippets(page.read_text())}
        if (None if kind == "alone" else kind) in needs:
            found.append(pytest.param(page, id=str(page.relative_to(ROOT))))
    return found


@pytest.mark.full(
    "docs/choosing.md", "docs/larger-models.md", "docs/several-models.md", "docs/training.md", "docs/weights.md"
)
@pytest.mark.parametrize("page", pages_with("alone"))
def test_snippets_do_what_they_say(page: Path, tmp_path: Path, forks: Forks) -> None:
    done = forks.run([str(ROOT / "tests" / "snippets.py"), str(page)], variables(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.aot
@pytest.mark.parametrize("page", pages_with("aot"))
def test_snippets_for_gpus_that_are_not_here_do_what_they_say(page: Path, tmp_path: Path) -> None:
    """With all of XLA's optimizations, as a user's."""
    command = [str(ROOT / "tests" / "snippets.py"), str(page), "--with", "aot"]
    done = run(*command, cwd=tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "and gives\n1"),
        ("```python\nx = 1\n```\n```text\nValueError: no\n```\n", "raises nothing"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\n1 / 0\n```\n```text\nZeroDivisionError: ...else\n```\n", "division by zero"),
        ("```console\ncjax inspect nowhere\n```\n```text\nstep\n```\n", "there is no checkpoint"),
    ],
)
def test_a_false_snippet_is_seen(text: str, said: str) -> None:
    ((block, wanted),) = snippets.snippets(text)
    assert said in snippets.run(block, wanted, {}, "page.md")


def test_text_is_expected_only_right_behind_its_snippet() -> None:
    text = "```python\n1\n```\n\nand\n\n```text\n2\n```\n"
    assert [wanted for _, wanted in snippets.snippets(text)] == [None]


def test_needs_are_extras() -> None:
    needed = {block.needs for page in PAGES for block in snippets.fenced(page.read_text())} - {None}
    assert needed == {*snippets.EXTRAS, snippets.NEVER}


@pytest.mark.parametrize("page", pages_with(snippets.NEVER))
def test_scripts_that_are_not_run_call_what_is_there(page: Path) -> None:
    for block in snippets.fenced(page.read_text()):
        if block.needs == snippets.NEVER:
            assert "cjax." in block.body and snippets.misfits(block.body) == []


# -- commands ---------------------------------------------------------------------------------------------------------
def lines_of(language: str) -> list[list[str]]:
    """The words of each line of all blocks in it."""
    blocks = [block for page in PAGES for block in snippets.fenced(page.read_text()) if block.language == language]
    return [words for block in blocks for line in block.body.splitlines() if (words := shlex.split(line))]


def lines_that_run(program: str) -> list[list[str]]:
    """Of `console` blocks, and of shell scripts without the variables before the program and what follows a `&`."""
    scripts = [list(itertools.dropwhile(lambda word: "=" in word, words)) for words in lines_of("bash")]
    scripts = [list(itertools.takewhile(lambda word: word != "&", words)) for words in scripts]
    return [words for words in [*lines_of("console"), *scripts] if words and words[0] == program]


def test_every_console_line_is_of_a_known_program() -> None:
    assert {words[0] for words in lines_of("console")} == {"make", "cjax", "pip"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {word for words in lines_that_run("make") for word in words[1:] if "=" not in word}
    named |= {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text())}
    assert named and named <= targets


def test_cjax_commands_and_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (words for words in lines_that_run("cjax") if words[1] != "--help"):
        command = words[1:3] if words[1] == "cluster" else words[1:2]
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and f"cjax {' '.join(command)}" in shown
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), f"cjax {words[1]} has no {option}"


def test_every_option_of_a_command_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Of docs/command-line.md; `--no-...` alone is what turns a switch off."""
    sections = re.split(r"^## cjax ", (DOCS / "command-line.md").read_text(), flags=re.M)[1:]
    explained = {
        section.partition("\n")[0]: set(re.findall(r"^\| `(--[\w-]+)`", section, re.M)) for section in sections
    }
    assert explained.keys() == {*COMMANDS, *(f"cluster {verb}" for verb in VERBS)} - {"cluster"}
    for command, rows in explained.items():
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        offered = set(re.findall(r"^..(--(?!no-)[a-z][\w-]*)", capsys.readouterr().out, re.M))
        assert offered == rows, f"cjax {command}"


def test_the_changelog_names_every_command_and_jax() -> None:
    said = (ROOT / "CHANGELOG.md").read_text()
    (commands,) = re.findall(r"^- \*\*Command line\*\*: (.*)$", said, re.M)
    assert set(re.findall(r"`(?:cjax )?([\w-]+)`", commands)) == COMMANDS.keys()
    (versions,) = re.findall(r"^- \*\*Runs on\*\* JAX (.*?), with", said, re.M)
    least, above = re.findall(r'"jax>=0\.(\d+),<0\.(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert re.findall(r"0\.(\d+)", versions) == [str(minor) for minor in range(int(least), int(above))]


def test_extras_are_those_of_the_project() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert set(re.findall(r"^\| `(\w+)` \|", (DOCS / "installing.md").read_text(), re.M)) == extras
    for words in lines_that_run("pip"):
        assert set(re.findall(r"\[([\w,]+)\]", words[-1])[0].split(",")) <= extras


# -- what must not go stale -------------------------------------------------------------------------------------------
def test_parts_that_are_read_off_the_code_are_fresh(tmp_path: Path, forks: Forks) -> None:
    done = forks.run([str(ROOT / "tests" / "pages.py"), "--check"], variables(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) < 7000


def test_the_report_explained_is_one_that_is_printed() -> None:
    """Its labels and its tables' heads, in their order; its numbers are a test marked aot."""
    text = (DOCS / "reports.md").read_text()
    block, shown = next((b, wanted) for b, wanted in snippets.snippets(text) if b.language == "console")
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
    assert shown is not None and labels(shown) == labels(made)
    explained = text[block.stop :].partition("\n## ")[0]
    assert [name for name in labels(made) if f"**{name}**" not in explained] == []


def test_the_readme_shows_the_head_of_the_report_explained() -> None:
    shown = [
        next(wanted for block, wanted in snippets.snippets(page.read_text()) if block.language == "console")
        for page in (README, DOCS / "reports.md")
    ]
    head = str(shown[0]).removesuffix("...\n")
    assert head.count("\n") >= 6 and str(shown[1]).startswith(head)


def plans_in(text: str) -> list[str]:
    """What stands in a page between backticks and begins as a plan does."""
    found = re.findall(rf"`((?:{'|'.join(PLAN_NAMES)})=[^`]+)`", re.sub(snippets.FENCE, "", text))
    return [plan for plan in found if not re.search(r"=N\b|:N\b|/N\b|=\.\.\.|cjax\.", plan)]


@pytest.mark.parametrize("page", ["README.md", "docs/plans.md", "docs/coming-from.md", "docs/installing.md"])
def test_plans_in_pages_are_plans(page: str) -> None:
    text = (ROOT / page).read_text().partition("<!-- elsewhere: written")[0]
    for plan in plans_in(text):
        if plan != "sequence=gather":  # which lives on the axis of a tensor=N beside it
            Plan.parse(plan)


def test_every_word_of_a_plan_is_explained() -> None:
    """Each name, and each word that a name takes, has a row of the table, or is named in one."""
    table = (DOCS / "plans.md").read_text().partition("## All words")[2].partition("\n## ")[0]
    table = table.partition("<!-- words: written")[0]
    for name in PLAN_NAMES:
        assert re.search(rf"^\| `[^`]*\b{name}=", table, re.M), f"docs/plans.md has no row for {name}"
        for word in PLAN_WORDS.get(name, ()):
            shown = {"1d": r"tensor=2`", "float32": r"`float32`"}.get(word, rf"=(?:{re.escape(word)})\b|`{word}`")
            assert re.search(shown, table), f"docs/plans.md does not say what {name}={word} is"


def test_errors_that_are_only_named_are_the_codes_own() -> None:
    """Those of the last table of docs/troubleshooting.md; the others are raised."""
    table = (DOCS / "troubleshooting.md").read_text().partition("## Also met")[2]
    named = re.findall(r"^\| `([^`]+)`", table, re.M)
    said = [text for path in HOUSE.rglob("*.py") for text in texts(ast.parse(path.read_text()))]
    assert len(named) > 5
    assert [name for name in named if not any(name in text for text in said)] == []


def texts(tree: ast.AST) -> list[str]:
    """What strings of a module say, with points for what is put into them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_every_public_name_is_in_the_reference() -> None:
    """Those of `cjax` itself, and of the rooms that come with it; what they hold is read off them."""
    listed = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.M))
    for name in dir(cjax):
        value = getattr(cjax, name)
        if isinstance(value, type(cjax)):
            assert name not in cjax._ROOMS or any(each.startswith(f"cjax.{name}.") for each in listed), name
        else:
            places = {f"cjax.{name}", f"{value.__module__}.{name}"}
            assert places & listed, f"cjax.{name} is not in docs/api.md: add it to FRONT of tests/pages.py"


def test_names_that_pages_import_are_in_the_reference() -> None:
    api = (DOCS / "api.md").read_text()
    blocks = [block for page in PAGES for block in snippets.fenced(page.read_text()) if block.language == "python"]
    taken = [node for block in blocks for node in ast.walk(ast.parse(block.body)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{name.name}" for node in taken if "cjax" in str(node.module) for name in node.names}
    assert len(names) > 20
    for name in names:
        room, _, last = name.rpartition(".")
        value = getattr(importlib.import_module(room), last)
        place = f"{getattr(value, '__module__', room)}.{last}"
        here = any(f"::: {each}" in api for each in (f"{name}\n", f"{place}\n", f"{name}."))
        assert here, f"{name} is not in docs/api.md: add it to ROOMS of tests/pages.py"


def test_what_a_program_gives_back_is_in_the_reference() -> None:
    api = (DOCS / "api.md").read_text()
    given = {typing.get_type_hints(value)["return"] for name, value in vars(cjax.Program).items()
             if inspect.isfunction(value) and not name.startswith("_")}  # fmt: skip
    classes = {each for each in given if getattr(each, "__module__", "").startswith("cjax.")}
    assert report.Report in classes and report.Comparison in classes
    for each in classes:
        assert re.search(rf"^::: cjax\..*\b{each.__name__}$", api, re.M), f"docs/api.md has no {each.__name__}"


def labels(text: str) -> list[str]:
    """First words of a report's lines, of its tables the heads alone."""
    head, *tables = text.strip().split("\n\n")
    return [line.split()[0] for line in head.splitlines() if line[0] != " "] + [table.split()[0] for table in tables]


def test_design_names_every_folder_of_experiments() -> None:
    folders = {path.name for path in (ROOT / "experiments").iterdir() if path.is_dir()} - {"__pycache__"}
    (said,) = re.findall(r"^`experiments/` .*$", DESIGN.read_text(), re.M)
    assert folders <= set(re.findall(r"`(\w+)`", said))


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


def test_recipes_name_what_is_there() -> None:
    """Of CONTRIBUTING.md: names of code, in files that the same step names."""
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2].partition("\n## ")[0]
    found = 0
    for step in recipes.splitlines():
        named = re.findall(r"`([^`]+)`", step)
        paths = [ROOT / name for name in named if re.fullmatch(r"(?:cjax|tests|docs)/[\w/.-]+", name)]
        code = "\n".join(path.read_text() for path in paths if path.suffix == ".py")
        names = [name for name in named if re.fullmatch(r"[A-Za-z_]\w*", name)] if code else []
        found += len(names)
        assert [name for name in names if not re.search(rf"\b{name}\b", code)] == [], step
    assert found > 30


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


@pytest.mark.parametrize("folder", ["cjax", "docs", "experiments", "tests"])
def test_code_and_kept_results_name_no_place_of_one_machine(folder: str) -> None:
    """Addresses may stand there: loopback's, and versions that look like one."""
    files = [path for path in (ROOT / folder).rglob("*.*") if path.is_file() and "__pycache__" not in path.parts]
    named = {path: found[0] for path in files if (found := re.search(PLACES.encode(), path.read_bytes()))}
    assert len(files) > 50 and named == {}
