"""Runs the Python snippets of a Markdown file, in order, in one namespace: `python tests/snippets.py README.md`.

A `text` block right behind a `python` block is what it prints, or the error that it raises; `...` stands for anything.
A snippet below `<!-- needs aot -->` runs where that extra is installed.
"""

import contextlib
import doctest
import importlib.util
import io
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^(?:<!-- needs (?P<needs>\w+) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
ERROR = re.compile(r"(\w*(?:Error|OutOfMemory)): ")
MODULES = {"aot": "jax_plugins.xla_cuda13"}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and text, the line it begins on, the extra it needs, and its place in the page."""

    language: str
    body: str
    line: int
    needs: str | None
    start: int
    stop: int


def fenced(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text.

    >>> [(b.language, b.body, b.line) for b in fenced("Type\\n```python\\nprint(1)\\n```\\n")]
    [('python', 'print(1)\\n', 3)]
    """
    return [
        Block(m["language"], m["body"], 1 + text.count("\n", 0, m.start("body")), m["needs"], m.start(), m.end())
        for m in FENCE.finditer(text)
    ]


def snippets(text: str) -> list[tuple[Block, str | None]]:
    """Each Python block, with what is expected of it, if anything is."""
    blocks = fenced(text)
    found = []
    for i, block in enumerate(blocks):
        if block.language == "python":
            after = blocks[i + 1] if i + 1 < len(blocks) else None
            follows = after is not None and after.language == "text" and not text[block.stop : after.start].strip()
            found.append((block, after.body if after is not None and follows else None))
    return found


def run(block: Block, wanted: str | None, namespace: dict[str, Any], name: str) -> str:
    """Runs one snippet; what is wrong with it, or nothing."""
    where = f"{name}:{block.line}"
    error = ERROR.match(wanted or "")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            # Empty lines first, so that tracebacks name the line of the file.
            exec(compile("\n" * (block.line - 1) + block.body, name, "exec"), namespace)
    except Exception as raised:
        if error is None:
            return f"{where} raises\n{traceback.format_exc()}"
        given = f"{type(raised).__name__}: {raised}\n"
    else:
        if error is not None:
            return f"{where} raises nothing, and should raise {error[1]}"
        given = printed.getvalue()
    if wanted is None or doctest.OutputChecker().check_output(wanted, given, OPTIONS):
        return ""
    return f"{where} should give\n{wanted}\nand gives\n{given}"


def is_here(module: str) -> bool:
    """Whether a module can be imported.

    >>> is_here("json.decoder"), is_here("no_such_package.module")
    (True, False)
    """
    package = module.rpartition(".")[0]
    return (not package or is_here(package)) and importlib.util.find_spec(module) is not None


def main(path: Path) -> int:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    problems = []
    for block, wanted in snippets(path.read_text()):
        if block.needs is None or is_here(MODULES[block.needs]):
            problems.append(run(block, wanted, namespace, path.name))
    print("\n".join(filter(None, problems)))
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
