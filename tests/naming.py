"""One word for one thing: rules of names, as in `architecture.py`. docs/glossary.md has the words."""

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Mapping

from architecture import Tree, dotted, house, nodes, parsed

# What things were called before the glossary had one word for each: folders, and names that nothing is given there.
RETIRED_NAMES: Mapping[str, set[str]] = {
    "cjax/trace/stages cjax/pipeline": {"beside", "travels", "together"},
    "cjax/gradients": {"together"},
    "cjax/gradients cjax/sharding cjax/trace cjax/pipeline cjax/planner/reading cjax/program": {"carried"},
    "cjax/program": {"Parts", "_parts"},
}
# And words that comments, docstrings and messages do not use there. Words of plain English are no such, as "beside".
RETIRED_WORDS: Mapping[str, str] = {
    "cjax/trace cjax/pipeline cjax/planner cjax/gradients tests/trace tests/pipeline": r"travel(s|l?ed)?",
    # Layers that repeat, once called so.
    "cjax/trace cjax/pipeline cjax/sharding cjax/gradients cjax/planner": r"(a|the|each|of) Runs?",
    "cjax/program/check.py cjax/program/verify.py": "carried",
}
# Names of types for one file's own use that are those of classes elsewhere. May only shrink.
DOUBLES = frozenset(
    """
    Body Bytes Decoder Dims Env Given Index Joint Memory Node Numbers Operand Operands Outcome Part Piece Places Read
    Row Rows Schedule Shape Source Span Split State Step Table Value Values Ways Worth
    """.split()
)


def retired_names_stay_retired(tree: Tree) -> list[str]:
    """In all folders below those that are named: variables, arguments, functions, classes and fields of its own."""
    return [
        f"{path}:{line} calls something {name}"
        for rooms, retired in RETIRED_NAMES.items()
        for path in _within(tree, rooms)
        for name, line in _given(tree[path])
        if name in retired
    ]


def retired_words_stay_retired(tree: Tree) -> list[str]:
    """In comments, docstrings and messages."""
    return [
        f"{path}:{line} says {found[0]}"
        for rooms, retired in RETIRED_WORDS.items()
        for path in _within(tree, rooms)
        for line, text in _said(tree[path])
        if (found := re.search(rf"\b({retired})\b", text))
    ]


def types_have_names_of_their_own(tree: Tree) -> list[str]:
    """A name for a type, written at a file's top, is not that of a class elsewhere in the house."""
    classes: dict[str, str] = {}
    aliases: dict[str, list[str]] = defaultdict(list)
    for path in house(tree):
        for node in parsed(tree[path]).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = path
            elif (alias := _alias(node)) is not None:
                aliases[alias].append(path)
    doubles = {name: paths for name, paths in aliases.items() if name in classes}
    new = [f"{name}: a type in {path}, a class in {classes[name]}" for name, paths in doubles.items()
           if name not in DOUBLES for path in paths]  # fmt: skip
    return new + [f"{name}: in DOUBLES, and no double" for name in sorted(DOUBLES - doubles.keys())]


def _within(tree: Tree, rooms: str) -> list[str]:
    return [path for path in tree if any(path == room or path.startswith(f"{room}/") for room in rooms.split())]


@functools.cache
def _given(text: str) -> tuple[tuple[str, int], ...]:
    """Names that a file gives, and their lines."""
    found: list[tuple[str, int]] = []
    for node in nodes(text):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.append((name, node.lineno))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.append((name, node.lineno))
    return tuple(found)


@functools.cache
def _said(text: str) -> tuple[tuple[int, str], ...]:
    """Comments and strings of a file, line by line."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT" or kind == "STRING" or kind == "FSTRING_MIDDLE":
            found += [(token.start[0] + i, line) for i, line in enumerate(token.string.split("\n"))]
    return tuple(found)


def _alias(node: ast.stmt) -> str | None:
    """The name that a statement gives to a type, `Rows = Mapping[str, int]`; None for any other."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            is_type = isinstance(value, ast.Subscript | ast.Name | ast.Attribute | ast.BinOp)
        case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
            is_type = dotted(kind).split(".")[-1] == "TypeAlias"
        case _:
            return None
    return name if is_type and name[0].isupper() and not name.isupper() else None
