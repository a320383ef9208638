"""Faults to plant, as rows of `faults.toml`: a text of a file, what stands there instead, and the tests to notice."""

import ast
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LEAST = 25  # statements of a module: what has no more may do without a fault of its own


@dataclass(frozen=True)
class Fault:
    """One row.

    Args:
      file: where it is planted, from the root.
      what: what goes wrong, in words.
      old, new: the text, and what stands in its place.
      tests: files that are to notice, or ids of tests in them, from the root.
    """

    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The room and its folder: `trace/stages` of `cjax/trace/stages/stacks.py`."""
        return "/".join(Path(self.file).parts[1:-1]) or Path(self.file).stem

    @property
    def logged_as(self) -> tuple[str, str, str]:
        """What `logged` calls it."""
        return self.room, Path(self.file).name, self.what

    def planted(self, root: Path = ROOT) -> str:
        """The whole file with the fault in it.

        Raises:
          ValueError: when the text is not there exactly once: the row is stale.
        """
        text = (root / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.file}: the row '{self.what}' replaces a text that is there {found} times: {self.old}"
            )
        text = text.replace(self.old, self.new)
        ast.parse(text)  # a fault that can't be read is noticed by whatever imports it
        return text

    def examples(self, root: Path = ROOT) -> tuple[str, ...]:
        """The file itself, if it has examples in its docstrings: they are tests as well."""
        return (self.file,) if re.search(r"^\s*>>> ", (root / self.file).read_text(), re.M) else ()


def logged(folder: Path = ROOT / "docs/results") -> set[tuple[str, str, str]]:
    """Rows that a kept log says were noticed, by room, name of the file and what goes wrong."""
    found = set()
    for log in folder.glob("planted-*.log"):
        room, row = "", None
        for line in log.read_text().splitlines():
            if row is not None and not line.lstrip().startswith("NOBODY"):
                found.add((room, *row))
            match = re.fullmatch(r"  (\S+\.py): (.*) \(\d+ s\)", line)
            row = (match[1], match[2]) if match else None
            room = line if line and not line.startswith(" ") else room
    return found


def num_statements(text: str) -> int:
    """Of a module, but for its imports and docstrings."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    words = (ast.Import, ast.ImportFrom)
    return sum(
        not isinstance(n, words) and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes
    )


def unplanted(planted: Collection[str], root: Path = ROOT) -> set[str]:
    """Modules of the house that are more than a few lines, and have no fault."""
    found = {path: (root / path).read_text() for path in modules(root) if path not in planted}
    return {path for path, text in found.items() if text.count("\n") > LEAST and num_statements(text) > LEAST}


def modules(root: Path = ROOT) -> list[str]:
    """Files of the house, from the root."""
    return [path.relative_to(root).as_posix() for path in sorted((root / "cjax").rglob("*.py"))]


def left_out(what: str, path: Path = Path(__file__).parent / "left.toml") -> set[str]:
    """What a rule of `test_table.py` does not hold of yet."""
    return set(tomllib.loads(path.read_text())[what])


def faults(path: Path = Path(__file__).parent / "faults.toml") -> list[Fault]:
    """All rows, in order. A row may name tests of its own in place of those of its file."""
    found = []
    for file, of in tomllib.loads(path.read_text()).items():
        for what, old, new, *tests in of["faults"]:
            found.append(Fault(file, what, old, new, tuple(tests or of["tests"])))
    return found
