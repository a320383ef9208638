"""Writes cjax/trace/jaxpr/covered.py: which primitives the suite has run, under this JAX: `python tests/covered.py`.

Under each JAX that is supported in turn, since each has primitives of its own. What the list says is what a report
leaves out under `watch`, so that nothing may stand in it which no test has compared with one device.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from contract import UNDER_ALL, trace_of

from cjax.trace.jaxpr.covered import PRIMITIVES
from cjax.trace.reading import primitives

FILE = Path(__file__).parent.parent / "cjax" / "trace" / "jaxpr" / "covered.py"
VERSION = ".".join(jax.__version__.split(".")[:2])
WIDTH = 120


def in_the_zoo(names: Any = UNDER_ALL) -> set[str]:
    """Primitives in the losses of the models that the contract trains under every plan."""
    return {name for model in names for name in primitives(trace_of(model))}


def in_the_search() -> set[str]:
    """And in those of the random models, where there are any."""
    if not (Path(__file__).parent / "search" / "reach.py").exists():
        return set()
    from search.reach import reached

    return reached()


def lines(names: list[str]) -> Iterator[str]:
    line = ""
    for name in names:
        if len(line) + len(name) + 9 > WIDTH:
            yield line
            line = ""
        line += f" {name}" if line else name
    yield line


def rewritten(text: str, names: set[str]) -> str:
    """The file with the entry of this version replaced."""
    head, _, tail = text.partition("PRIMITIVES: ")
    entries = {**PRIMITIVES, VERSION: frozenset(names)}
    body = "".join(
        f'    "{version}": frozenset(\n        """\n'
        + "".join(f"        {line}\n" for line in lines(sorted(entries[version])))
        + '        """.split()\n    ),\n'
        for version in sorted(entries, key=lambda version: tuple(map(int, version.split("."))))
    )
    return f"{head}PRIMITIVES: {tail.partition('= {')[0]}= {{\n{body}}}\n"


if __name__ == "__main__":
    found = in_the_zoo() | in_the_search()
    FILE.write_text(rewritten(FILE.read_text(), found))
    print(f"{len(found)} primitives under JAX {VERSION}", file=sys.stderr)
