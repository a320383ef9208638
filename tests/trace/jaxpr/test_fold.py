"""Scalars folded on the host are those the device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.trace.jaxpr.fold import fold, literal

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
INTS = st.integers(-(2**31), 2**31 - 1)
OPERATIONS = [jax.lax.add, jax.lax.sub, jax.lax.mul, jax.lax.div, jax.lax.max, jax.lax.rem, jax.lax.lt, jax.lax.ge]


def folded(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    (eqn,) = closed.eqns
    atoms = [literal(arg, var.aval) for arg, var in zip(args, closed.jaxpr.invars, strict=True)]
    return fold(eqn, atoms)


def assert_as_device(function, *args):
    with np.errstate(all="ignore"):
        got = folded(function, *args)
    want = np.asarray(jax.jit(function)(*args))
    if got is not None:
        np.testing.assert_array_equal(np.asarray(got.val, want.dtype), want)


@pytest.mark.parametrize("operation", OPERATIONS)
@given(x=FLOATS, y=FLOATS)
def test_floats(operation, x, y):
    if operation is not jax.lax.rem or y != 0:
        assert_as_device(operation, np.float32(x), np.float32(y))


@pytest.mark.parametrize("operation", OPERATIONS)
@given(x=INTS, y=INTS)
def test_integers(operation, x, y):
    assert_as_device(operation, np.int32(x), np.int32(y))


@pytest.mark.full
@settings(max_examples=25)
@given(x=FLOATS)
def test_conversions(x):
    for dtype in (jnp.int32, jnp.uint32, jnp.bool_):
        assert_as_device(lambda v, dtype=dtype: jax.lax.convert_element_type(v, dtype), np.float32(x))


def test_out_of_range_conversions_stay():
    assert folded(lambda v: jax.lax.convert_element_type(v, jnp.int32), np.float32(1e20)) is None
    assert folded(lambda v: jax.lax.convert_element_type(v, jnp.int32), np.float32(7.9)).val == 7


def test_what_libraries_disagree_on_stays():
    for function in (jax.lax.exp, jax.lax.erf, jax.lax.tanh, jax.lax.rsqrt):
        assert folded(function, np.float32(0.3)) is None


def test_no_literal_for_arrays_keys_and_tracers():
    assert literal(np.ones(2, np.float32), jax.typeof(np.ones(2, np.float32))) is None
    key = jax.random.key(0)
    assert literal(key, jax.typeof(key)) is None
    seen = []
    jax.jit(lambda x: seen.append(literal(x, jax.typeof(x))) or x)(np.float32(1))
    assert seen == [None]


def test_subnormals_stay():
    assert folded(jax.lax.mul, np.float32(1e-30), np.float32(1e-10)) is None
    assert folded(jax.lax.mul, np.float32(1e-30), np.float32(0)).val == 0


def test_weak_types_are_kept_as_python_scalars():
    closed = jax.make_jaxpr(lambda: jax.lax.add(1.5, 2.0))()
    atom = fold(closed.eqns[0], closed.eqns[0].invars)
    assert type(atom.val) is float and atom.val == 3.5 and atom.aval.weak_type
