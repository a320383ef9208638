"""Derivatives by hand, as JAX keeps them among the parameters of equations."""

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from cjax.jax_compat.functions import called_within, closed_over, given_as_static, is_bookkeeping, is_wrapped, parts


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
    inside, transforms, params = parts(rule)
    assert callable(inside) and isinstance(transforms, tuple) and params == ()
    assert not any(map(is_wrapped, (inside, _by_jvp, jnp.ones(2), None, equation(by_jvp))))


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


def test_the_context_is_open_while_the_rule_runs() -> None:
    is_open, seen = [False], []

    @contextmanager
    def context() -> Iterator[None]:
        is_open[0] = True
        yield
        is_open[0] = False

    def rule(*args: Any) -> Any:
        seen.append(is_open[0])
        return args

    known = equation(by_jvp).params["jvp_jaxpr_fun"].debug_info
    wrapped = called_within(types.SimpleNamespace(call_wrapped=rule, debug_info=known), context)
    assert wrapped.call_wrapped(1, 2) == (1, 2) and seen == [True] and not is_open[0]


def test_all_of_a_derivative_is_among_its_parts() -> None:
    assert parts(by_jvp) == (by_jvp.fun, _by_jvp, (), False)
    fun, fwd, bwd, static, zeros = parts(by_vjp)
    assert (fun, fwd, bwd) == (by_vjp.fun, by_vjp.fwd, by_vjp.bwd) and (static, zeros) == ((), False)
    assert bwd in parts(equation(by_vjp).params["bwd"])


def everything(value: Any) -> list[Any]:
    """What a rule closes over, at any depth."""
    boxed, value = given_as_static(value)
    if isinstance(value, tuple | list):
        inside = list(value)
    elif isinstance(value, types.FunctionType):
        inside = closed_over(value)
    else:
        inside = list(parts(value)) if is_wrapped(value) else []
    return [value, *(each for part in inside for each in everything(part))]


@pytest.mark.parametrize("function, name", CASES)
def test_what_jax_keeps_for_itself_is_told_from_what_decides(function: Any, name: str) -> None:
    found = everything(equation(function).params[name])
    opened = [value for value in found if not (isinstance(value, tuple) or is_wrapped(value))]
    jaxs = [value for value in opened if type(value).__module__.startswith("jax._src")]
    assert any(map(is_bookkeeping, jaxs)), "JAX keeps nothing of its own in rules any more"
    left = {type(value) for value in jaxs if not is_bookkeeping(value)}
    assert left <= {jax.core.ShapedArray}, "is it bookkeeping? Otherwise layers are equal only if it is"
    assert not any(type(value) in (dict, object) for value in found)
    for value in (np.ones(2), jnp.ones(2), 3, by_jvp, jnp.float32, jax.random.key(0), object()):
        assert not is_bookkeeping(value), value


def test_memories_of_jax_are_left_out_and_an_author_s_dicts_are_not() -> None:
    how = {"scale": 3.0}
    assert closed_over(lambda: how) == [how]
    rule = parts(equation(by_jvp).params["jvp_jaxpr_fun"])[0]
    cells = [cell.cell_contents for cell in rule.__closure__]
    assert {dict, object} <= set(map(type, cells)) and len(closed_over(rule)) == len(cells) - 2
    if how:
        empty = closed_over(lambda: late)  # noqa: F821
        assert empty == [types.CellType]
    late = how  # noqa: F841


def test_arguments_that_are_not_differentiated_are_taken_out_of_their_boxes() -> None:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x: Any, scale: Any) -> Any:
        return x

    scaled.defvjp(lambda x, scale: (x, None), lambda scale, _, g: (g * scale,))
    eqn = equation(lambda x: scaled(x, 31.0))
    for name in RULES[by_vjp]:
        assert any(type(value) is float and value == 31.0 for value in everything(eqn.params[name])), name
    assert given_as_static(31.0) == (False, 31.0)
