"""Docstrings of public names, those of docs/api.md, say what was promised; each rule sees what it exists to refuse.

A docstring is a line, then arguments or fields, what is raised, and an example. Examples are run by pytest itself.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

API = Path(__file__).parent.parent / "docs" / "api.md"
# What no user is meant to see, or to catch.
UNSAID = {"AssertionError", "NotImplementedError", "StopIteration", "StopAsyncIteration"}
# What a rule may pass over, by its own name and the public one, with the reason. What needs none may not stand here.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("shows_an_example", "cjax.train.MLflow"): "it needs mlflow, which is not in the environment of tests",
    ("shows_an_example", "cjax.train.WandB"): "it needs wandb, which is not in the environment of tests",
}

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Public(NamedTuple):
    """A public function or class, or a method or property of one."""

    name: str
    value: Any
    node: Node
    owner: type | None = None

    @property
    def text(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


@functools.cache
def nodes_of(module: str) -> dict[str, Node]:
    """What a module defines, by qualified names; of a property, its getter."""
    found: dict[str, Node] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Node):
                found.setdefault(prefix + child.name, child)
                walk(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.expr):
                walk(child, prefix)

    walk(ast.parse(Path(inspect.getfile(importlib.import_module(module))).read_text()), "")
    return found


def node_of(value: Any) -> Node:
    value = inspect.unwrap(value)
    return nodes_of(value.__module__)[value.__qualname__]


def listed(text: str) -> Iterator[Public]:
    """The names of a page, and the methods and properties of those that are classes."""
    for name in re.findall(r"^::: ([\w.]+)$", text, re.M):
        value = resolved(name)
        if inspect.isfunction(value) or isinstance(value, type):  # and not an alias of a type
            yield from with_members(name, value)


def resolved(name: str) -> Any:
    room, _, last = name.rpartition(".")
    return getattr(importlib.import_module(room), last)


def with_members(name: str, value: Any) -> Iterator[Public]:
    yield Public(name, value, node_of(value))
    if not isinstance(value, type):
        return
    seen: set[str] = set()
    for owner in houses(value):
        for member, held in vars(owner).items():
            made = getattr(held, "fget", None) or getattr(held, "func", None) or getattr(held, "__func__", held)
            is_own = inspect.isfunction(made) and f"{owner.__qualname__}.{member}" in nodes_of(owner.__module__)
            if is_own and not member.startswith("_") and member not in seen:
                yield Public(f"{name}.{member}", made, node_of(made), value)
            seen.add(member)


def houses(value: type) -> list[type]:
    """The class and those bases that are cjax's own (or planted here)."""
    return [base for base in value.__mro__ if base.__module__.startswith("cjax.") or base.__module__ == __name__]


# -- rules: each yields what it misses in one name ---------------------------------------------------------------------
def begins_with_one_line(public: Public) -> Iterator[str]:
    """A function or class: a sentence on the first line, and nothing else before the blank line."""
    first, *rest = public.text.splitlines() or [""]
    if public.owner is None and not (first.endswith((".", ":", "?")) and not any(rest[:1])):
        yield f"begin with one line that ends the sentence, and a blank one: {first!r}"


def has_a_docstring(public: Public) -> Iterator[str]:
    """A method or property too, but for overrides of what has one."""
    if not public.text and not is_documented_override(public):
        yield "write a docstring"


def names_what_it_takes(public: Public) -> Iterator[str]:
    """Each parameter of a function, or field of a class, under Args or Attributes.

    Errors are caught and not made, and a class of which its docstring says "made by `...`" is made by that function:
    what these take is no business of users.
    """
    is_made = "made by `" in " ".join(public.text.split()) or is_error(public.value)
    if public.owner is None and not is_made:
        missing = set(taken(public)) - said(public.text, "Args") - said(public.text, "Attributes")
        if missing:
            yield f"say under Args or Attributes: {', '.join(sorted(missing))}"


def says_what_it_raises(public: Public) -> Iterator[str]:
    """What its own body raises for users, under Raises; a class, what its `__init__` and other dunders do."""
    bodies = [public.node]
    if public.is_class:
        bodies = [n for n in public.node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("__")]
    for body in bodies:
        told = said(public.text, "Raises") | said(ast.get_docstring(body) or "", "Raises")
        if missing := raised(body) - told:
            yield f"say under Raises: {', '.join(sorted(missing))}"


def shows_an_example(public: Public) -> Iterator[str]:
    """Lines of `>>>`, or where one example shows several names, which of them has it ("`cjax.fit` has an example").

    A method may have them of its class. Errors, protocols and abstract bases are exempt: nobody makes one.
    """
    if public.owner is not None or is_never_made(public.value) or examples(public.text):
        return
    told = re.search(r"`(cjax(?:\.\w+)+)` has an example", public.text)
    if told is None:
        yield "show an example that runs (>>>)"
        return
    other = node_of(resolved(told[1]))
    given = "" if isinstance(other, ast.ClassDef) or other.returns is None else ast.unparse(other.returns)
    if not re.search(rf"\b{public.node.name}\b", examples(ast.get_docstring(other) or "") + given):
        yield f"the example of {told[1]} does not show {public.node.name}"


def examples(text: str) -> str:
    return "\n".join(re.findall(r"^>>> .*(?:\n.+)*", text, re.M))


def is_documented_override(public: Public) -> bool:
    last = public.name.rpartition(".")[2]
    return public.owner is not None and any(
        getattr(vars(base).get(last), "__doc__", None) for base in public.owner.__mro__[1:]
    )


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def is_never_made(value: Any) -> bool:
    return is_error(value) or inspect.isabstract(value) or getattr(value, "_is_protocol", False)


def taken(public: Public) -> list[str]:
    """Names of parameters, or of a class: of its `__init__`, or if it has none the fields."""
    if not public.is_class:
        return parameters(public.node)
    for owner in houses(public.value):
        if inspect.isfunction(vars(owner).get("__init__")) and f"{owner.__qualname__}.__init__" in nodes_of(
            owner.__module__
        ):
            return parameters(node_of(vars(owner)["__init__"]))[1:]
    own = [node_of(owner) for owner in houses(public.value)] if is_record(public.value) else []
    return [
        line.target.id
        for node in own
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_"
        if "ClassVar" not in ast.unparse(line.annotation)
    ]


def is_record(value: type) -> bool:
    return dataclasses.is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))


def parameters(node: Node) -> list[str]:
    assert not isinstance(node, ast.ClassDef)
    given = node.args
    rest = [arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)]


def said(text: str, section: str) -> set[str]:
    """The names that a section of a docstring explains: `name: ...`, or `one, other: ...`."""
    found = re.search(rf"^{section}:\n((?:[ \n].*\n?|\n)*)", text, re.M)
    if not found:
        return set()
    indent = min(re.findall(r"^ +(?=\S)", found[1], re.M), key=len, default="")
    lines = re.findall(rf"^{indent}(\**\w[\w.]*(?:, \**\w[\w.]*)*):", found[1], re.M)
    return {name.strip("* ").rpartition(".")[2] for line in lines for name in line.split(",")}


def raised(node: ast.AST) -> set[str]:
    """Errors that a body raises itself, not the functions inside it; what it caught and raises on has no name here."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Node | ast.Lambda):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            made = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(made).rpartition(".")[2]
            if name[0].isupper() and name not in UNSAID:
                found.add(name)
        found |= raised(child)
    return found


Rule = Callable[[Public], Iterator[str]]
RULES: list[Rule] = [
    begins_with_one_line,
    has_a_docstring,
    names_what_it_takes,
    says_what_it_raises,
    shows_an_example,
]


@functools.cache
def house() -> list[Public]:
    return [*listed(API.read_text())]


# -- what is planted: for each rule, what it must see and what it must let pass ----------------------------------------
def good(size: int, *rest: int, name: str = "") -> int:
    """A number.

    Args:
        size, name: of something.
        *rest: ignored.

    Raises:
        ValueError: a size below 0.

    >>> good(1)
    1
    """

    def inner() -> None:
        raise KeyError(name)

    if size < 0:
        raise ValueError(size)
    assert inner
    return size


class Good:
    """A number, kept.

    Args:
        size: its size.

    Raises:
        ValueError, TypeError: a size that is none.

    >>> Good(1).size
    1
    """

    def __init__(self, size: int) -> None:
        if not isinstance(size, int):
            raise TypeError(size)
        if size < 0:
            raise ValueError(size)
        self._size = size

    @property
    def size(self) -> int:
        """As given."""
        return self._size


class Heir(Good):
    """The same again.

    Args:
        size: its size.

    >>> Heir(2).size
    4
    """

    @property
    def size(self) -> int:
        return self._size * 2


class Fault(ValueError):
    """What is wrong."""

    def __init__(self, what: str) -> None:
        super().__init__(what)


class Wanted(Protocol):
    """What is taken."""

    def close(self) -> None:
        """The end."""
        ...


class Parts(NamedTuple):
    """A pair, made by `parts_of`."""

    left: int
    right: int


def parts_of() -> Parts:
    """A pair.

    >>> parts_of().left
    1
    """
    return Parts(1, 2)


def no_line() -> None:
    """A sentence that goes on
    for another line."""


def no_end() -> None:
    """No sentence"""


class Silent:
    """It says nothing of its methods."""

    def method(self) -> None: ...

    @property
    def number(self) -> int:
        return 1

    @functools.cached_property
    def kept(self) -> int:
        return 1

    @classmethod
    def made(cls) -> None: ...

    @staticmethod
    def stands() -> None: ...


def no_args(size: int, *rest: int, unit: str = "s", **options: int) -> None:
    """Takes what it does not name: size.

    Args:
        unit: what it is.
    """


@dataclasses.dataclass
class NoFields:
    """Fields that are not named."""

    width: int
    _hidden: int = 0


class NoParameter:
    """A parameter that is not named.

    Attributes:
        width: something else.
    """

    def __init__(self, size: int) -> None:
        self.width = size


def no_raises(size: int) -> None:
    """Raises ValueError, and says so in passing.

    Args:
        size: ValueError: of nothing.
    """
    if size:
        raise ValueError(size)
    for _ in range(size):
        raise json.JSONDecodeError("", "", 0) from None


class NoRaises:
    """One that is never right.

    Raises:
        TypeError: never.
    """

    def __post_init__(self) -> None:
        raise ValueError

    def method(self) -> None:
        """Raises what the class has not said."""
        raise KeyError("none")


def no_example() -> None:
    """Says >>> and shows nothing."""


def false_pointer() -> None:
    """`cjax.Plan` has an example."""


BREACHES: list[tuple[Rule, Any, list[str]]] = [
    (begins_with_one_line, no_line, ["'A sentence that goes on'"]),
    (begins_with_one_line, no_end, ["'No sentence'"]),
    (has_a_docstring, Silent, ["write a docstring"] * 5),
    (names_what_it_takes, no_args, ["options, rest, size"]),
    (names_what_it_takes, NoFields, ["width"]),
    (names_what_it_takes, NoParameter, ["size"]),
    (says_what_it_raises, no_raises, ["JSONDecodeError, ValueError"]),
    (says_what_it_raises, NoRaises, ["ValueError", "KeyError"]),
    (shows_an_example, no_example, ["show an example"]),
    (shows_an_example, false_pointer, ["does not show false_pointer"]),
]


def missed(rule: Rule, named: list[Public]) -> list[str]:
    found = ((public.name, text) for public in named for text in rule(public))
    return [f"{name}: {text}" for name, text in found if (rule.__name__, name) not in EXCEPTIONS]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_public_docstrings_keep_the_rule(rule: Rule) -> None:
    assert len(house()) > 300
    assert missed(rule, house()) == []


@pytest.mark.parametrize(("rule", "value", "texts"), BREACHES, ids=lambda value: getattr(value, "__name__", ""))
def test_rules_see_what_they_refuse(rule: Rule, value: Any, texts: list[str]) -> None:
    found = missed(rule, [*with_members("planted", value)])
    assert len(found) == len(texts) and all(text in line for text, line in zip(texts, found, strict=True)), found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_let_good_ones_pass(rule: Rule) -> None:
    for value in (good, Good, Heir, Fault, Wanted, parts_of):
        assert missed(rule, [*with_members("planted", value)]) == []
    assert list(names_what_it_takes(Public("planted", Parts, node_of(Parts)))) == []


def test_exceptions_are_needed() -> None:
    rules = {rule.__name__: rule for rule in RULES}
    named = {public.name: public for public in house()}
    for rule, name in EXCEPTIONS:
        assert name in named and list(rules[rule](named[name])), f"{name} needs no exception of {rule}: take it out"
