"""Runs what a Markdown page shows, in order: `python tests/snippets.py README.md`.

Python blocks run in one namespace. A `console` block of one line that begins with `cjax` runs as a process of its own
if a `text` block is right behind it. Such a `text` block is what is printed, or the error that is raised; `...` stands
for anything. A block below `<!-- needs aot -->` compiles for GPUs that are not here: it runs with `--with aot` alone.
Where it says `<!-- needs aot, numbers of JAX 0.10 -->`, another JAX may print numbers that are a little different. One
below `<!-- needs hosts -->` is never run: `misfits` holds its calls against the functions that they name.
"""

import argparse
import ast
import contextlib
import doctest
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import traceback
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r"^(?:<!-- needs (?P<needs>\w+)(?:, numbers of JAX (?P<jax>[\d.]+))? -->\n)?"
    r"```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.M | re.S,
)
ERROR = re.compile(r"(\w*(?:Error|OutOfMemory)): ")
EXTRAS = ("aot",)
NEVER = "hosts"
NUMBER = r"(<?\d[\d,]*(?:\.\d+)?)"
TOKEN = re.compile(rf"{NUMBER}|(\.\.\.|[^\s\d<.]+|[<.])|(\s+)")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      language: what stands behind the fence.
      body: the text.
      line: the line it begins on.
      needs: the extra it needs, if any.
      jax: the version of JAX whose numbers the text behind it has, if that matters.
      start, stop: its place in the page.
    """

    language: str
    body: str
    line: int
    needs: str | None
    jax: str | None
    start: int
    stop: int


def fenced(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text.

    >>> [(b.language, b.body, b.line) for b in fenced("Type\\n```python\\nprint(1)\\n```\\n")]
    [('python', 'print(1)\\n', 3)]
    """
    return [
        Block(m["language"], m["body"], 1 + text.count("\n", 0, m.start("body")), m["needs"], m["jax"], *m.span())
        for m in FENCE.finditer(text)
    ]


def snippets(text: str) -> list[tuple[Block, str | None]]:
    """Each block that is run, with what is expected of it, if anything is."""
    blocks = fenced(text)
    found = []
    for i, block in enumerate(blocks):
        after = blocks[i + 1] if i + 1 < len(blocks) else None
        follows = after is not None and after.language == "text" and not text[block.stop : after.start].strip()
        wanted = after.body if after is not None and follows else None
        if block.language == "python" or (block.language == "console" and wanted is not None):
            found.append((block, wanted))
    return found


def run(block: Block, wanted: str | None, namespace: dict[str, Any], name: str) -> str:
    """Runs one snippet; what is wrong with it, or nothing."""
    where = f"{name}:{block.line}"
    if block.language == "console":
        given, failure = _command(block)
        if failure:
            return f"{where} fails\n{failure}"
    else:
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
    if wanted is None or is_as_wanted(wanted, given, exact=block.jax is None or _is_jax(block.jax)):
        return ""
    return f"{where} should give\n{wanted}\nand gives\n{given}"


def is_as_wanted(wanted: str, given: str, exact: bool = True) -> bool:
    """Whether `given` is what a page says, white space aside; its numbers about the same if not exactly.

    >>> is_as_wanted("moves ... GiB\\n", "moves   2.7 GiB\\n"), is_as_wanted("2 rows\\n", "3 rows\\n")
    (True, False)
    >>> [is_as_wanted("step ... 9.29 ms\\n", f"step at least {time} ms\\n", exact=False) for time in ("9.43", "41")]
    [True, False]
    """
    if exact:
        return doctest.OutputChecker().check_output(wanted, given, OPTIONS)
    pattern, numbers = "", []
    for number, rest, space in TOKEN.findall(wanted.strip()):
        pattern += re.escape(rest) if rest != "..." else ".*?"
        pattern += (NUMBER if number else "") + (r"\s+" if space else "")
        numbers += [number] if number else []
    match = re.fullmatch(pattern, given.strip(), re.S)
    return match is not None and all(map(_is_near, numbers, match.groups()))


def misfits(code: str) -> list[str]:
    """What is wrong in a script by its imports, the signatures of what it calls, and the fields of what these return.

    >>> misfits("import cjax\\nprogram = cjax.parallelize(1, 2, 3, pln=4)\\nprogram.stepp()")
    ["cjax.parallelize(1, 2, 3, pln=4): missing a required argument: 'batch'", 'program.stepp: there is no stepp']
    """
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "imports", "exec"), names)
    # What a name holds that is assigned the result of a call: its class stands for it.
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(AttributeError, KeyError):
                names[node.targets[0].id] = typing.get_type_hints(_named(node.value.func, names))["return"]
    return [problem for node in ast.walk(tree) if (problem := _misfit(node, names))]


def _misfit(node: ast.AST, names: dict[str, Any]) -> str:
    try:
        if isinstance(node, ast.Attribute):
            _named(node, names)
        elif isinstance(node, ast.Call):
            with contextlib.suppress(AttributeError):  # which the attribute below it tells
                given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(_named(node.func, names)).bind(*node.args, **given)
    except (AttributeError, TypeError) as error:
        return f"{ast.unparse(node)}: {error}"
    except KeyError:
        pass  # a name that the script takes from elsewhere, such as its model
    return ""


def _named(node: ast.expr, names: dict[str, Any]) -> Any:
    """What an expression such as `cjax.train.fit` names; a field that a class declares alone is its name."""
    if isinstance(node, ast.Name):
        return names[node.id]
    if not isinstance(node, ast.Attribute):
        raise KeyError(ast.unparse(node))
    owner = _named(node.value, names)
    if node.attr in getattr(owner, "__annotations__", {}):
        return node.attr
    if not hasattr(owner, node.attr):
        raise AttributeError(f"there is no {node.attr}")
    return getattr(owner, node.attr)


def _is_near(wanted: str, given: str) -> bool:
    """Whether two numbers of a report are of one size; `<0.1` is nearly nothing. Of what is hidden, one XLA may leave
    half of what another does."""
    a, b = (float(text.lstrip("<").replace(",", "")) for text in (wanted, given))
    return abs(a - b) <= 0.75 or a / 2.5 <= b <= 2.5 * a


def _is_jax(version: str) -> bool:
    import jax  # here, since most pages ask for no version

    return jax.__version__.startswith(f"{version}.")


def _command(block: Block) -> tuple[str, str]:
    """What the command of a block prints, and how it failed if it did."""
    (line,) = block.body.splitlines()
    program, *arguments = shlex.split(line)
    assert program == "cjax", f"a console block with output runs cjax, not {program}"
    code = "import sys; from cjax.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True)
    return done.stdout, f"{done.stdout}{done.stderr}" if done.returncode else ""


def main(path: Path, extras: list[str]) -> int:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    problems = []
    for block, wanted in snippets(path.read_text()):
        if block.needs is None or block.needs in extras:
            problems.append(run(block, wanted, namespace, path.name))
    print("\n".join(filter(None, problems)))
    return 1 if any(problems) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--with", dest="extras", action="append", default=[], choices=EXTRAS)
    given = parser.parse_args()
    sys.exit(main(given.page, given.extras))
