"""What is read from one equation is true of its numbers, for equations of random programs and of their derivatives."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_programs import equations

from cjax.jax_compat.core import Equation, Literal
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.along import Places, along, is_made_by_number, summed
from cjax.trace.jaxpr.linear import linear_results
from cjax.trace.jaxpr.simplify import simplify


def assert_same(eqn: Equation, found: list[jax.Array], wanted: list[jax.Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 1e-6, 1e-8, err_msg=str(eqn))


def in_other_order(ins: list[jax.Array], places: Places, order: np.ndarray) -> list[jax.Array]:
    return [x if dim is None else jnp.take(x, order, dim) for x, dim in zip(ins, places, strict=True)]


def check_order(eqn: Equation, ins: list[jax.Array], outs: list[jax.Array], pick: random.Random) -> None:
    """Places in another order give the results in that order; what is brought together has none."""
    for dim, num in enumerate(outs[0].shape):
        places = along(eqn, dim)
        if places is not None and not is_made_by_number(eqn, dim):
            order = np.array(pick.sample(range(num), num))
            found = bind(eqn, in_other_order(ins, places, order))
            assert_same(eqn, found, [jnp.take(y, order, dim) for y in outs])
    for places in summed(eqn):
        num = next(x.shape[dim] for x, dim in zip(ins, places, strict=True) if dim is not None)
        order = np.array(pick.sample(range(num), num))
        assert_same(eqn, bind(eqn, in_other_order(ins, places, order)), outs)


def check_linear(eqn: Equation, ins: list[jax.Array], pick: random.Random) -> None:
    """Twice the operands that it is linear in, less three times others, give that of the results."""
    given = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal)]
    real = [i for i in given if jnp.issubdtype(ins[i].dtype, jnp.floating)]
    marked = pick.sample(real, pick.randint(min(1, len(real)), len(real)))

    def results(*values: jax.Array) -> list[jax.Array]:
        return bind(eqn, list((dict(enumerate(ins)) | dict(zip(given, values, strict=True))).values()))

    closed = simplify(jax.make_jaxpr(results)(*(ins[i] for i in given)))
    said = linear_results(closed, [i in marked for i in given])
    if not any(said):
        return
    others = {i: jnp.cos(3.0 * jnp.arange(ins[i].size).reshape(ins[i].shape)) for i in marked}

    def at(own: float, other: float) -> list[jax.Array]:
        return results(*(own * ins[i] + other * others[i] if i in marked else ins[i] for i in given))

    for is_linear, one, other, both in zip(said, at(1, 0), at(0, 1), at(2, -3), strict=True):
        if is_linear and jnp.isfinite(one).all() and jnp.isfinite(other).all():
            size = float(jnp.abs(one).max(initial=0) + jnp.abs(other).max(initial=0))
            np.testing.assert_allclose(2 * one - 3 * other, both, 1e-6, 1e-8 + 1e-9 * size, err_msg=str(eqn))


@pytest.mark.full
@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 10**6))
def test_what_is_said_of_an_equation_is_true(seed: int) -> None:
    pick = random.Random(seed)
    with jax.enable_x64(True):
        for eqn, ins, outs in equations(seed):
            check_order(eqn, ins, outs, pick)
            check_linear(eqn, ins, pick)
