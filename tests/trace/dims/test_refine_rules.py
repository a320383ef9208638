"""Primitives on operands some of whose dims are taken apart, where that is not as they are everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.trace.dims.refine_rules import RULES


@pytest.mark.parametrize(("impl", "in_parts"), [("threefry2x32", True), ("rbg", False), ("unsafe_rbg", False)])
def test_only_bits_that_are_numbered_are_drawn_in_parts(impl: str, in_parts: bool) -> None:
    key = jax.random.key(0, impl=impl)
    (eqn,) = [
        eqn for eqn in jax.make_jaxpr(lambda key: jax.random.bits(key, (2, 6)))(key).eqns
        if eqn.primitive.name == "random_bits"
    ]  # fmt: skip
    found = RULES["random_bits"](eqn, [key], [()], [(1, 3)])
    assert (found is not None) == in_parts
    if found is not None:
        assert (found[0].reshape(2, 6) == jax.random.bits(key, (2, 6))).all()


def only(function: Any, name: str, *operands: Any) -> Any:
    (eqn,) = [eqn for eqn in jax.make_jaxpr(function)(*operands).jaxpr.eqns if eqn.primitive.name == name]
    return eqn


def test_rows_in_groups_meet_weights_whose_features_are_taken_apart() -> None:
    x, w, sizes = np.random.rand(6, 4), np.random.rand(3, 4, 10), jnp.array([1, 3, 2])
    eqn = only(jax.lax.ragged_dot, "ragged_dot_general", x, w, sizes)
    given = [jnp.asarray(x), jnp.asarray(w).reshape(3, 4, 2, 5), sizes]
    (found,) = RULES["ragged_dot_general"](eqn, given, [(1, 1), (1, 1, 2), (1,)], [(1, 2)]) or [None]
    np.testing.assert_allclose(found, jax.lax.ragged_dot(x, w, sizes).reshape(6, 2, 5), rtol=1e-6)
    assert RULES["ragged_dot_general"](eqn, given, [(2, 1), (1, 1, 1), (1,)], [(2, 1)]) is None
    assert RULES["ragged_dot_general"](eqn, given, [(1, 2), (1, 1, 1), (1,)], [(1, 1)]) is None


def test_rows_are_looked_up_whose_features_are_taken_apart() -> None:
    """By whole rows; not of rows in parts, nor some features of each."""
    table, at = np.random.rand(3, 10), jnp.array([2, 0, 1, 2])
    eqn = only(lambda table, at: table.at[at].get(mode="clip"), "gather", table, at)
    whole, parts = eqn.invars[1].aval.shape, jnp.asarray(table).reshape(3, 2, 5)
    (found,) = RULES["gather"](eqn, [parts, at.reshape(whole)], [(1, 2), (1,) * len(whole)], [(1, 2)]) or [None]
    assert (found == parts[at]).all()
    assert RULES["gather"](eqn, [parts, at.reshape(whole)], [(1, 2), (1,) * len(whole)], [(1, 1)]) is None
    some = only(
        lambda table, at: jax.vmap(lambda i: jax.lax.dynamic_slice(table, (i, 0), (1, 4)))(at), "gather", table, at
    )
    assert RULES["gather"](some, [parts, at.reshape(whole)], [(1, 2), (1,) * len(whole)], [(1, 1, 2)]) is None
