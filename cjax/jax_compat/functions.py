"""Derivatives by hand within equations: JAX wraps the author's functions, anew in every trace."""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax.extend.linear_util import WrappedFun, wrap_init

_JAX = str(Path(jax.__file__).parent)
_BOOKKEEPING = ("Store", "EqualStore", "InitialResultPaths", "TraceTag")


def is_wrapped(value: Any) -> bool:
    """Whether a value is a function as JAX keeps it among the parameters of an equation.

    Private: the class, which `jax.extend.linear_util` gives and says nothing of.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: derivatives by hand as jaxprs, or as the author's own functions.
    """
    return isinstance(value, WrappedFun)


def parts(function: Any) -> tuple[Any, ...]:
    """All that decides what a wrapped function computes, or a `jax.custom_jvp` or `jax.custom_vjp`: the function
    within, what JAX does around it, the author's rules.

    Private: the fields. What else they have are caches, stores and names.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """
    if is_wrapped(function):
        return function.f, function.transforms, function.params
    rules = (function.jvp,) if isinstance(function, jax.custom_jvp) else (function.fwd, function.bwd)
    return function.fun, *rules, tuple(function.nondiff_argnums), function.symbolic_zeros


def closed_over(function: types.FunctionType) -> list[Any]:
    """What the cells of a function hold, or `types.CellType` for one that nothing was stored in yet.

    JAX remembers what a rule gave in a dict of the function around it. That fills as derivatives are taken, and says
    nothing of what the function does: it is left out.

    Private: that functions of JAX's close over no other dict, nor over an object to tell an entry that is not there.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(types.CellType)
    is_jax_own = function.__code__.co_filename.startswith(_JAX)
    return [value for value in found if not (is_jax_own and type(value) in (dict, object))]


def given_as_static(value: Any) -> tuple[bool, Any]:
    """Whether a value is a box around an argument that is not differentiated (`nondiff_argnums`), and what is in it.

    Private: the two classes of boxes, by name.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """
    is_box = type(value).__module__.startswith("jax._src") and type(value).__name__ in ("Hashable", "Unhashable")
    return is_box, value.val if is_box else value


def called_within(wrapped: Any, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """A wrapped function that does what another does, within a context.

    Private: `call_wrapped`, `debug_info` and how one is made.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """

    def call(*args: Any) -> Any:
        with context():
            return wrapped.call_wrapped(*args)

    return wrap_init(call, debug_info=wrapped.debug_info)


def is_bookkeeping(value: Any) -> bool:
    """Whether a value is one that JAX makes anew in each trace and that decides nothing about results: a trace, its
    tag, a store for the structure of a result.

    Private: these classes, by name. One that is not known here has its own identity, so that a new JAX may make
    layers unequal that are equal, and none equal that are not.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """
    name = type(value).__name__
    return type(value).__module__.startswith("jax._src") and (name in _BOOKKEEPING or name.endswith("Trace"))
