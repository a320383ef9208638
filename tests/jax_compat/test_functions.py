"""Derivatives by hand, as JAX keeps them among the parameters of equations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from cjax.jax_compat.functions import author_function, called_within, is_machinery, is_wrapped, wrapped_parts


@jax.custom_vjp
def by_vjp(x: Any) -> Any:
    return x * 2.0


by_vjp.defvjp(lambda x: (x * 2.0, x), lambda x, g: (g * 10.0 * x,))


@jax.custom_jvp
def by_jvp(x: Any) -> Any:
    return x * 2.0


@by_jvp.defjvp
def _by_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0] * 2.0, tangents[0] * 10.0 * primals[0]


RULES = {by_vjp: ("fwd_jaxpr_thunk", "bwd"), by_jvp: ("jvp_jaxpr_fun",)}
CASES = [pytest.param(function, name, id=name) for function, names in RULES.items() for name in names]


def equation(function: Any) -> JaxprEqn:
    return jax.make_jaxpr(function)(3.0).eqns[0]


@pytest.mark.parametrize("function, name", CASES)
def test_rules_are_wrapped_functions(function: Any, name: str) -> None:
    rule = equation(function).params[name]
    assert is_wrapped(rule)
    function, transforms = wrapped_parts(rule)
    assert callable(function) and isinstance(transforms, tuple)
    assert not any(map(is_wrapped, (function, _by_jvp, jnp.ones(2), None, equation(by_jvp))))


def test_all_equations_of_a_derivative_share_its_author_s_function() -> None:
    first, second = (eqn.params["bwd"] for eqn in jax.make_jaxpr(lambda x: by_vjp(by_vjp(x)))(3.0).eqns)
    assert first is not second and author_function(first) is author_function(second)
    assert author_function(first).__code__.co_filename == __file__
    assert author_function(_by_jvp) is _by_jvp and author_function(None) is None


@pytest.mark.parametrize("function, name", CASES[::2])
def test_a_derivative_is_traced_within_a_context(function: Any, name: str) -> None:
    closed, opened = jax.make_jaxpr(function)(3.0), []

    @contextmanager
    def context() -> Iterator[None]:
        opened.append(name)
        with jax.named_scope("within"):
            yield

    (eqn,) = closed.eqns
    rule = called_within(eqn.params[name], context)
    assert is_wrapped(rule)
    new = closed.jaxpr.replace(eqns=[eqn.replace(params=eqn.params | {name: rule})])
    run = jaxpr_as_fun(jax.extend.core.ClosedJaxpr(new, closed.consts))
    assert not opened
    assert jax.grad(lambda x: run(x)[0])(3.0) == 30.0 and opened == [name]


def test_caches_and_stores_are_machinery_and_what_is_traced_is_not() -> None:
    eqn = equation(by_vjp)
    assert all(map(is_machinery, (eqn.params["bwd"], eqn.primitive, eqn.outvars[0], by_jvp)))
    for value in (eqn.params["call_jaxpr"], eqn.params["call_jaxpr"].jaxpr, np.ones(2), 3, "text", _by_jvp, object()):
        assert not is_machinery(value), value
