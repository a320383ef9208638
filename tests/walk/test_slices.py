"""Slices of a trace: equal ones are one program, whatever numbers they have."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Literal, Var, make_jaxpr
from cjax.trace.jaxpr.simplify import simplify
from cjax.walk.slices import Read, Slice, SliceProgram, cut, share


def slices(function: Callable[..., Sequence[jax.Array]], num: int = 3) -> list[Slice]:
    """One for each result, of a function of as many vectors and a number."""
    closed = simplify(make_jaxpr(function)(*(jnp.ones(2) for _ in range(num)), jnp.float32(2)))
    made = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    *layers, shared = closed.jaxpr.invars
    consts = set(closed.jaxpr.constvars)

    def given(var: Var) -> Read | None:
        if var in consts:
            return Read("const")
        return Read("outside") if var is shared else Read("layer", 0) if var in layers else None

    assert not made.keys() & {*layers, shared}
    return [cut([atom], made, given) for atom in closed.jaxpr.outvars]


def run(program: SliceProgram, piece: Slice) -> np.ndarray:
    values = {"layer": [jnp.array([1.0, 3.0])], "outside": [jnp.float32(2)] * len(piece.reads_of("outside"))}
    return np.asarray(program.run(values, program.numbers(piece))[0])


def test_slices_that_differ_in_numbers_are_one_program() -> None:
    found = slices(lambda *xs: [jnp.sin(x * (n + 1.0)) + 2.0 * xs[-1] for n, x in enumerate(xs[:-1])])
    programs = share(dict(enumerate(found)))
    assert len({id(program) for program in programs.values()}) == 1
    assert [len(programs[n].numbers(piece)) for n, piece in enumerate(found)] == [1, 1, 1], "and not the 2.0"
    for n, piece in enumerate(found):
        np.testing.assert_allclose(run(programs[n], piece), np.sin(np.array([1, 3]) * (n + 1.0)) + 4, rtol=1e-6)


def test_slices_that_do_something_else_are_not() -> None:
    works = [jnp.sin, jnp.cos, jnp.sin]
    found = slices(lambda *xs: [work(x) for work, x in zip(works, xs[:-1], strict=True)])
    programs = share(dict(enumerate(found)))
    assert programs[0] is programs[2] and programs[0] is not programs[1]
    assert programs[0].numbers(found[0]) == []


def test_the_order_in_which_layers_were_written_does_not_count() -> None:
    """The second layer's equations stand the other way round."""

    def mixed(x: jax.Array, y: jax.Array, z: jax.Array) -> list[jax.Array]:
        a = jnp.sin(x)
        b = jnp.cos(x) * 2
        c = jnp.cos(y) * 2
        d = jnp.sin(y)
        return [a - b, d - c]

    one, two = slices(mixed, 2)
    assert one.key == two.key


def test_which_operand_is_which_does() -> None:
    one, two = slices(lambda x, y, z: [jnp.sin(x) - jnp.cos(x), jnp.cos(y) - jnp.sin(y)], 2)
    assert one.key != two.key
    one, two = slices(lambda x, y, z: [x - z, z - y], 2)
    assert one.key != two.key


def test_a_result_that_is_given_or_a_number() -> None:
    one, two = slices(lambda x, y, z: [x, jnp.float32(3)], 2)
    assert not one.eqns and isinstance(two.outs[0], Literal)
    np.testing.assert_array_equal(run(SliceProgram([one]), one), [1.0, 3.0])
    assert run(SliceProgram([two]), two) == 3
