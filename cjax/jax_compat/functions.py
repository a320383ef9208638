"""Derivatives by hand within equations: JAX wraps the author's functions, anew in every trace."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jax.extend.linear_util import WrappedFun, wrap_init


def is_wrapped(value: Any) -> bool:
    """Whether a value is a function as JAX keeps it among the parameters of an equation.

    Private: the class, which `jax.extend.linear_util` gives and says nothing of.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: derivatives by hand as jaxprs, or as the author's own functions.
    """
    return isinstance(value, WrappedFun)


def wrapped_parts(wrapped: Any) -> tuple[Any, Any]:
    """The function within and what JAX does around it: together, all that a wrapped function computes.

    Private: the fields `f` and `transforms` of the class. What else it has are caches, stores and names.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """
    assert not wrapped.params, "JAX gives a rule arguments by name, which nobody has seen it do"
    return wrapped.f, wrapped.transforms


def author_function(rule: Any) -> Any:
    """The function within, if a rule is a wrapped one. Of `bwd` it is the author's, which all equations share; of rules
    that JAX remembers results of (`jvp_jaxpr_fun`), one for each equation.

    Private: the field `f` of the class.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`.
    """
    return rule.f if is_wrapped(rule) else rule


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


def is_machinery(value: Any) -> bool:
    """Whether a value is of a class that JAX keeps to itself, and no jaxpr: a cache, a store, a description.

    Private: where JAX's modules are; jaxprs are told by their equations.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: as for `is_wrapped`: what a derivative closes over would not be looked through.
    """
    return type(value).__module__.startswith("jax._src") and not hasattr(value, "eqns")
