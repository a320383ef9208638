"""Faults to plant, as rows of `faults.toml`: a text of a file, what stands there instead, and the tests to notice."""

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


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


def faults(path: Path = Path(__file__).parent / "faults.toml") -> list[Fault]:
    """All rows, in order. A row may name tests of its own in place of those of its file."""
    found = []
    for file, of in tomllib.loads(path.read_text()).items():
        for what, old, new, *tests in of["faults"]:
            found.append(Fault(file, what, old, new, tuple(tests or of["tests"])))
    return found
