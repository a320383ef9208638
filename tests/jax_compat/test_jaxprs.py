"""Parts of jaxprs that JAX promises to nobody: each as cjax takes it."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun

from cjax.jax_compat.jaxprs import (
    called_from,
    codes,
    context_key,
    frames,
    in_context,
    is_of_jax,
    live,
    name_stack,
    names_its_operands,
    new_literal,
    new_var,
    place_of,
    scan_tree_counts,
    traceback_of,
)


def equation(function: Any, *args: Any) -> JaxprEqn:
    return jax.make_jaxpr(function)(*args).eqns[0]


def test_new_variables_and_literals_make_a_jaxpr_that_runs() -> None:
    closed = jax.make_jaxpr(lambda x: x * 2.0)(jnp.ones(3))
    (eqn,) = closed.eqns
    out, scalar = new_var(eqn.outvars[0].aval), jax.core.ShapedArray((), jnp.float32)
    assert type(out) is Var and out not in eqn.outvars and out != new_var(out.aval)
    five = new_literal(np.float32(5), scalar)
    assert type(five) is Literal and (five.val, five.aval) == (5, scalar)
    new = closed.jaxpr.replace(outvars=[out], eqns=[eqn.replace(invars=[eqn.invars[0], five], outvars=[out])])
    np.testing.assert_array_equal(jaxpr_as_fun(ClosedJaxpr(new, []))(jnp.ones(3))[0], [5, 5, 5])


def test_a_primitive_is_jaxs_by_what_it_is_and_not_by_its_name() -> None:
    for eqn in jax.make_jaxpr(lambda x: jnp.stack(jnp.split(jnp.sort(x), 2)))(jnp.ones(4)).eqns:
        assert is_of_jax(eqn.primitive)
        assert not is_of_jax(Primitive(eqn.primitive.name))


def test_operands_of_a_scan_are_counted_where_they_are_a_tree() -> None:
    def loop(w: Any, v: Any, a: Any, b: Any, c: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: ((carry[0] * w, carry[1] + x, carry[2] * v), x), (a, b, c), xs)

    eqn = equation(loop, 1.0, 2.0, 3.0, 4.0, 5.0, jnp.ones(6))
    if "num_consts" in eqn.params:  # JAX 0.10 says it itself
        assert (eqn.params["num_consts"], eqn.params["num_carry"]) == (2, 3) and "ft_in" not in eqn.params
    else:
        assert scan_tree_counts(eqn) == (2, 3)


def test_live_looks_into_loops() -> None:
    def loop(x: Any, key: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            x, key = carry
            return (x * 2.0, jax.random.fold_in(key, 1)), None

        return jax.lax.scan(body, (x, key), None, length=3)[0][0]

    closed, used = live(jax.make_jaxpr(loop)(1.0, jax.random.key(0)))
    assert used == [True, False]
    assert jaxpr_as_fun(closed)(jnp.float32(1.0)) == [8.0]


def test_contexts_are_told_apart_and_entered_again() -> None:
    plain, again = (equation(lambda x: x + 1, 1.0) for _ in range(2))
    with jax.threefry_partitionable(False):
        other = equation(lambda x: x + 1, 1.0)
    assert context_key(plain) == context_key(again) != context_key(other)
    assert hash(context_key(plain)) == hash(context_key(again))
    assert jax.config.jax_threefry_partitionable
    with in_context(other):
        assert not jax.config.jax_threefry_partitionable
    assert jax.config.jax_threefry_partitionable


def test_an_equation_takes_the_place_of_another() -> None:
    with jax.threefry_partitionable(False):
        there = equation(jax.named_scope("head")(lambda x: x + 1), 1.0)
    eqn = equation(lambda x: x * 2, 1.0)
    moved = eqn.replace(**place_of(there))
    assert str(name_stack(eqn)) == "" and str(name_stack(moved)) == "head"
    assert traceback_of(moved) is traceback_of(there) is not traceback_of(eqn)
    assert context_key(moved) == context_key(there) != context_key(eqn)
    assert moved.primitive is eqn.primitive


def test_what_is_called_has_its_callers_names_in_front() -> None:
    eqn = equation(jax.named_scope("inner")(lambda x: x * 2), 1.0)
    call = equation(jax.named_scope("outer")(lambda x: x + 1), 1.0)
    new = eqn.replace(**called_from(eqn, name_stack(call), traceback_of(call)))
    assert str(name_stack(new)) == "outer/inner" and name_stack(new)
    assert not name_stack(equation(lambda x: x * 2, 1.0))
    assert traceback_of(new) is traceback_of(call) and context_key(new) == context_key(eqn)


def test_tracebacks_begin_with_the_innermost_function() -> None:
    class Layer:
        def __call__(self, x: Any) -> Any:
            return jax.lax.mul(x, x)

    traceback = traceback_of(equation(lambda x: Layer()(x), 1.0))
    names = [frame.function_name for frame in frames(traceback)]
    assert names == [code.co_qualname for code in codes(traceback)]
    mine = [frame for frame in frames(traceback) if frame.file_name == __file__]
    assert mine[0].function_name.endswith("Layer.__call__")
    line = Layer.__call__.__code__.co_firstlineno + 1
    assert mine[0].line_num == line and mine[1].function_name.endswith("<lambda>")


def test_equations_that_work_in_place_are_known() -> None:
    def add(x: Any) -> Any:
        ref = jax.new_ref(x)
        jax.jit(lambda: ref.__setitem__(..., ref[...] + 1))()
        return ref[...]

    eqns = jax.make_jaxpr(add)(1.0).eqns
    calls = [eqn for eqn in eqns if "jaxpr" in eqn.params]
    assert calls and all(map(names_its_operands, calls))
    printed = equation(jax.jit(lambda x: jax.debug.print("{}", x)), 1.0)
    assert printed.effects and not names_its_operands(printed)
