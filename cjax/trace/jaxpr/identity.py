"""When two equations do the same: the identity by which layers are recognised as equal."""

import functools
import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.core
import numpy as np

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from cjax.jax_compat.functions import closed_over, given_as_static, is_bookkeeping, is_wrapped, parts
from cjax.jax_compat.jaxprs import context_key
from cjax.trace.jaxpr.view import consts_of, opened

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, jax.custom_jvp, jax.custom_vjp)


class _Structure:
    """A structural identity that hashes once: bodies of layers are long, and compared often."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Hashable):
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Structure) and self._hash == other._hash and self._parts == other._parts


class _Identity:
    """Stands in keys for an object that has no value to compare. Holding it keeps its id from being used again."""

    __slots__ = ("_object",)

    def __init__(self, value: object):
        self._object = value

    def __hash__(self) -> int:
        return id(self._object)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._object is other._object


_bodies: "weakref.WeakKeyDictionary[ClosedJaxpr | Jaxpr, _Structure]" = weakref.WeakKeyDictionary()


def equation_key(eqn: Equation) -> Hashable:
    """What an equation does, apart from which values it does it to: equal for corresponding equations of equal layers.

    Primitive, parameters, and the avals of operands and results. The values of literal operands are left out (layers
    differ in drop rates and seeds); within bodies they count. Functions count by their code and what they close over,
    because every trace makes new ones.
    """
    operands = tuple((atom.aval, type(atom) is Literal) for atom in eqn.invars)
    params = tuple((name, _value_key(value)) for name, value in sorted(eqn.params.items()))
    return (eqn.primitive, params, operands, tuple(var.aval for var in eqn.outvars), context_key(eqn))


def _value_key(value: object) -> Hashable:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Jaxpr() | ClosedJaxpr():
            return _body_key(value)
        case tuple() | list():
            return tuple(_value_key(part) for part in value)
        case dict():
            return tuple((_value_key(name), _value_key(part)) for name, part in value.items())
        case np.ndarray() | np.generic():
            return (value.shape, value.dtype, value.tobytes())
    if isinstance(value, _FUNCTIONS) or is_wrapped(value):
        return _callable_key(value, set())
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


def _body_key(body: ClosedJaxpr | Jaxpr) -> _Structure:
    if body not in _bodies:
        jaxpr = opened(body)
        numbers: dict[Var, int] = {}

        def number(atom: Atom) -> Hashable:
            if type(atom) is Literal:
                return (atom.aval, np.asarray(atom.val).tobytes())
            return numbers.setdefault(atom, len(numbers))

        inputs = tuple((number(var), var.aval) for var in [*jaxpr.constvars, *jaxpr.invars])
        eqns = tuple(
            (equation_key(eqn), tuple(map(number, eqn.invars)), tuple(map(number, eqn.outvars))) for eqn in jaxpr.eqns
        )
        consts = tuple(_Identity(const) for const in consts_of(body))
        _bodies[body] = _Structure(inputs, eqns, tuple(map(number, jaxpr.outvars)), consts)
    return _bodies[body]


def _callable_key(function: Any, seen: set[int]) -> Hashable:
    """Code and closure of a function: every trace wraps a custom derivative in new ones.

    All that a derivative can read must count. Layers that differ in it alone are otherwise one loop, in which all of
    them have the derivative of the first.
    """
    if id(function) in seen:
        return "recursion"
    seen = {*seen, id(function)}
    if isinstance(function, functools.partial):
        return _closed_over((function.func, function.args, function.keywords), seen)
    if isinstance(function, types.MethodType):
        return (_closed_over(function.__func__, seen), _Identity(function.__self__))
    if not isinstance(function, types.FunctionType):
        return (type(function), _closed_over(parts(function), seen))
    defaults = (function.__defaults__, function.__kwdefaults__)
    return (
        function.__code__, _Identity(function.__globals__), _closed_over(closed_over(function), seen),
        _closed_over(defaults, seen),
    )  # fmt: skip


def _closed_over(value: object, seen: set[int]) -> Hashable:
    is_static, value = given_as_static(value)
    if is_static:
        return _closed_over(value, seen)
    match value:
        case tuple() | list():
            return tuple(_closed_over(part, seen) for part in value)
        case dict():
            return tuple((_value_key(name), _closed_over(part, seen)) for name, part in value.items())
        case bool() | int() | float() | complex():
            return (type(value), repr(value))  # by text: 1 equals True, and -0.0 equals 0.0
        case jax.core.Tracer() | jax.Array():
            return _Identity(value)
        case Equation():  # whose derivative JAX prunes
            return equation_key(value)
    if isinstance(value, _FUNCTIONS) or is_wrapped(value):
        return _callable_key(value, seen)
    return type(value) if is_bookkeeping(value) else _value_key(value)
