"""Which dims of operands the parts of a result are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cjax.walk.through import operand_dims


@pytest.mark.parametrize(
    ("function", "shape", "dim", "wanted"),
    [
        (lambda x: x.reshape(4, 2, 3), (4, 6), 1, 1),  # not the dim in front, which two parts divide as well
        (lambda x: x.reshape(4, 2, 3), (4, 6), 0, 0),
        (lambda x: x.reshape(8, 3), (4, 6), 0, 0),
        (lambda x: x.reshape(4, 2, 3), (8, 3), 1, None),  # four rows of each dim: its parts lie apart
        (lambda x: jnp.sort(x, 1), (4, 6), 0, 0),
        (lambda x: jnp.sort(x, 1), (4, 6), 1, None),
    ],
)
def test_halves_are_made_of(function: Any, shape: tuple[int, ...], dim: int, wanted: int | None) -> None:
    eqn = jax.make_jaxpr(function)(jnp.zeros(shape)).jaxpr.eqns[-1]
    if "jaxpr" in eqn.params:
        (eqn,) = eqn.params["jaxpr"].jaxpr.eqns
    found = operand_dims(eqn, dim, 2)
    assert (None if found is None else found[0]) == wanted
