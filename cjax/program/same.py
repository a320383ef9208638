"""When two functions are the same for a compiled program: the same code over the same things."""

import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

PLAIN = (int, float, complex, str, bytes, bool, type(None))  # whose values are all there is to them
DEPTH = 8  # of functions within functions


@dataclass(frozen=True, eq=False)
class _Itself:
    """A thing that is the same as itself alone. Held, so that no other can take its place in memory."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def function_key(function: Any, depth: int = DEPTH) -> Hashable:
    """A key that two functions share if they are made of one piece of code and close over the same things: a lambda
    that is written in a loop is another object each time round. Numbers and texts are the same by value, all else by
    identity.

    >>> first, second = (lambda x, n=n: x + n for n in (1, 1))
    >>> first == second, function_key(first) == function_key(second)
    (False, True)
    >>> function_key(lambda x: x + 1) == function_key(lambda x: x + 2)
    False
    """
    if depth and isinstance(function, types.FunctionType) and not vars(function):
        inside = [_content(cell) for cell in function.__closure__ or ()]
        parts = [*inside, *(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
        keys = tuple(_thing_key(part, depth - 1) for part in parts)
        return function.__code__, len(inside), _Itself(function.__globals__), keys
    if depth and isinstance(function, types.MethodType):
        return function_key(function.__func__, depth - 1), _Itself(function.__self__)
    if depth and type(function) is functools.partial:
        parts = [*function.args, *sorted(function.keywords.items())]
        keys = tuple(_thing_key(part, depth - 1) for part in parts)
        return functools.partial, function_key(function.func, depth - 1), len(function.args), keys
    return _Itself(function)


def _thing_key(thing: Any, depth: int) -> Hashable:
    if isinstance(thing, PLAIN):
        # By text too: -0.0 equals 0.0, and a NaN nothing.
        return type(thing), repr(thing)
    if depth and type(thing) is tuple:
        return tuple, tuple(_thing_key(part, depth - 1) for part in thing)
    return function_key(thing, depth)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return cell
