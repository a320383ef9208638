"""Groups of equations: which may be evaluated at once, and in what order the rest comes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex

from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.groups import Group, arrange, make_group, variables

SHAPES = [(3, 4), (4, 5), (4, 6), (4, 7)]


def jaxpr_of(function: Callable[..., Any], shapes: Sequence[tuple[int, ...]] = SHAPES) -> jex.Jaxpr:
    return jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr


def dots(jaxpr: jex.Jaxpr) -> list[Any]:
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]


def projections(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    first = jnp.sin(x @ a)
    second = x @ jnp.cos(b)
    return first.sum() + second.sum() + (x @ c).sum()


def test_a_group_reads_and_writes_what_others_do() -> None:
    jaxpr = jaxpr_of(projections)
    members = dots(jaxpr)
    group = make_group(members[::-1], jaxpr.eqns, jaxpr.outvars, "of")
    assert group is not None and group.of == "of"
    assert list(group.eqns) == members, "in the order of the jaxpr"
    x, a, _, c = jaxpr.invars
    cosine = next(eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "cos")
    assert list(group.ins) == [x, a, cosine, c], "each once"
    assert group.outs == tuple(eqn.outvars[0] for eqn in members)


def test_what_only_members_read_does_not_leave() -> None:
    jaxpr = jaxpr_of(lambda x, a: (x @ a) @ (x @ a).T, SHAPES[:2])
    members = jaxpr.eqns
    group = make_group(members, jaxpr.eqns, jaxpr.outvars, None)
    assert group is not None and group.ins == tuple(jaxpr.invars) and group.outs == tuple(jaxpr.outvars)


def test_what_is_read_after_the_last_equation_leaves() -> None:
    jaxpr = jaxpr_of(lambda x, a: x @ a, SHAPES[:2])
    for results in ([], jaxpr.outvars):
        group = make_group(jaxpr.eqns, jaxpr.eqns, results, None)
        assert group is not None and group.outs == tuple(results)


def chain(x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    """The second matmul reads what an equation outside of the group makes of the first."""
    return x @ (jnp.tanh(x @ a).sum() * b)


def test_equations_that_wait_for_each_other_make_no_group() -> None:
    jaxpr = jaxpr_of(chain, SHAPES[:3])
    assert make_group(dots(jaxpr), jaxpr.eqns, jaxpr.outvars, None) is None
    assert make_group(dots(jaxpr)[:1], jaxpr.eqns, jaxpr.outvars, None) is not None
    assert make_group(jaxpr.eqns, jaxpr.eqns, jaxpr.outvars, None) is not None, "all of them do"


# -- order ------------------------------------------------------------------------------------------------------------
def evaluate(jaxpr: jex.Jaxpr, order: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Items one after another, each reading only what is there already."""
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for item in order:
        for eqn in item.eqns if isinstance(item, Group) else [item]:
            env.update(zip(eqn.outvars, bind(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def test_without_groups_the_order_stays() -> None:
    jaxpr = jaxpr_of(projections)
    assert arrange(jaxpr.eqns, []) == list(jaxpr.eqns)


def test_what_a_group_reads_is_moved_before_it() -> None:
    jaxpr = jaxpr_of(projections)
    group = make_group(dots(jaxpr), jaxpr.eqns, jaxpr.outvars, None)
    assert group is not None
    order = arrange(jaxpr.eqns, [group])
    assert [getattr(item, "primitive", None) and item.primitive.name for item in order][:3] == ["cos", None, "sin"]
    args = [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(SHAPES)]
    np.testing.assert_allclose(evaluate(jaxpr, order, args)[0], projections(*args), rtol=1e-5)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Equations on earlier results: `y = x @ w` for a chosen weight, or a sum of two."""
    steps = []
    for index in range(draw(st.integers(2, 12))):
        kind = draw(st.sampled_from(["dot", "dot", "add"]))
        steps.append((kind, draw(st.integers(0, index)), draw(st.integers(0, index if kind == "add" else 2))))
    return steps


@settings(max_examples=40)
@given(programs())
def test_any_program_in_groups_by_input_is_the_same_program(steps: list[tuple[str, int, int]]) -> None:
    def run(x: jax.Array, *ws: jax.Array) -> Any:
        found = [x]
        for kind, a, b in steps:
            found.append(found[a] @ ws[b] if kind == "dot" else found[a] + found[b])
        return found[1:]

    shapes = [(2, 3)] + [(3, 3)] * 3
    jaxpr = jaxpr_of(run, shapes)
    by_input: dict[Any, list[Any]] = {}
    for eqn in dots(jaxpr):
        by_input.setdefault(eqn.invars[0], []).append(eqn)
    groups = [make_group(eqns, jaxpr.eqns, jaxpr.outvars, None) for eqns in by_input.values()]
    assert all(groups), "equations that read the same and weights alone never wait for each other"
    order = arrange(jaxpr.eqns, [group for group in groups if group is not None])
    assert sum(len(item.eqns) if isinstance(item, Group) else 1 for item in order) == len(jaxpr.eqns)
    args = [np.random.default_rng(i).integers(-2, 3, shape).astype("float32") for i, shape in enumerate(shapes)]
    for a, b in zip(evaluate(jaxpr, order, args), evaluate(jaxpr, jaxpr.eqns, args), strict=True):
        np.testing.assert_array_equal(a, b)


def test_literals_are_no_variables() -> None:
    (eqn,) = jaxpr_of(lambda x: x + 1.0, SHAPES[:1]).eqns
    assert variables(eqn) == [eqn.invars[0]]
