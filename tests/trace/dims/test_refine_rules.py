"""Random numbers in parts: of generators alone that number their bits row by row, whatever the shape."""

import jax
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
