"""Several evaluations of one trace at a time: what each gives alone, in one loop, one behind the other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cjax.jax_compat.core import Equation, Jaxpr
from cjax.sharding.place.saved import POLICIES
from cjax.trace.emit.abreast import AWAITED, abreast, awaited, is_awaited
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import every_equation, scan_of

Arrays = list[jax.Array]
WIDE, ROWS, LAYERS = 6, 3, 4


def numbers(*shapes: tuple[int, ...]) -> Arrays:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return x + awaited(jnp.tanh(x @ up) @ down)


def stack(x: jax.Array, ups: jax.Array, downs: jax.Array, remat: str | None = None) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
        x = block(x, *weights)
        return x, x.sum()

    body = layer if remat is None else jax.checkpoint(layer, policy=POLICIES[remat])
    x, sums = lax.scan(body, x, (ups, downs))
    return x * sums.mean()


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))  # another one than JAX's


def branches(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, lambda x: block(x, ups[0], downs[0]), lambda x: x * ups.sum(), x)


def until(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return lax.fori_loop(0, jnp.int32(2), lambda i, x: block(x, ups[i], downs[i]), x)


def called(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return jax.jit(stack)(x, ups, downs) + jax.jit(jnp.sin)(x)


def counted(x: jax.Array, downs: jax.Array) -> jax.Array:
    return lax.scan(lambda c, row: (c + downs[0, 1], c * row), downs[0, 0], x)[1]


CASES: dict[str, Callable[..., jax.Array]] = {
    "a loop": stack,
    "saved": lambda *args: stack(*args, remat="none"),
    "made again": lambda *args: stack(*args, remat="block"),
    "a call": called,
    "own derivative": lambda x, ups, downs: doubled(stack(x, ups, downs)),
    "branches": branches,
    "no layer": lambda x, ups, downs: block(block(x, ups[0], downs[0]), ups[1], downs[1]),
    "a carry of weights": lambda x, ups, downs: counted(x, downs),
}  # fmt: skip


def together(function: Callable[..., jax.Array], xs: Arrays, weights: Arrays) -> Arrays:
    closed = jax.make_jaxpr(function)(xs[0], *weights)
    return abreast(closed, [(x, *weights) for x in xs])[0]


@pytest.mark.full(
    "2-a call",
    "2-a loop",
    "2-made again",
    "2-no layer",
    "2-own derivative",
    "2-saved",
    "3-a call",
    "3-a carry of weights",
    "3-a loop",
    "3-branches",
    "3-made again",
    "3-no layer",
    "3-own derivative",
    "3-saved",
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num", [2, 3])
def test_each_gives_what_it_gives_alone(name: str, num: int) -> None:
    function = CASES[name]
    *xs, ups, downs = numbers(*[(ROWS, WIDE)] * num, (LAYERS, WIDE, 5), (LAYERS, 5, WIDE))

    def sum_of(weights: Arrays, xs: Arrays, run: Callable[..., Arrays]) -> jax.Array:
        return sum((jnp.sum(y * (i + 1)) for i, y in enumerate(run(function, xs, weights))), jnp.zeros(()))

    def one_by_one(function: Callable[..., jax.Array], xs: Arrays, weights: Arrays) -> Arrays:
        return [function(x, *weights) for x in xs]

    found = jax.jit(jax.value_and_grad(lambda *args: sum_of(*args, together), (0, 1)))([ups, downs], xs)
    wanted = jax.jit(jax.value_and_grad(lambda *args: sum_of(*args, one_by_one), (0, 1)))([ups, downs], xs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_forward_only_loops_too() -> None:
    *xs, ups, downs = numbers((ROWS, WIDE), (ROWS, WIDE), (LAYERS, WIDE, 5), (LAYERS, 5, WIDE))
    for found, x in zip(together(until, xs, [ups, downs]), xs, strict=True):
        np.testing.assert_allclose(found, until(x, ups, downs), rtol=1e-5, atol=1e-6)


def jaxpr_of(function: Callable[..., Any], num: int = 2) -> Jaxpr:
    *xs, ups, downs = numbers(*[(ROWS, WIDE)] * num, (LAYERS, WIDE, 5), (LAYERS, 5, WIDE))
    return jax.make_jaxpr(lambda xs, ups, downs: together(function, xs, [ups, downs]))(xs, ups, downs).jaxpr


def named(jaxpr: Jaxpr, name: str) -> list[Equation]:
    return [eqn for eqn in every_equation(jaxpr) if name_of(eqn) == name]


def test_all_are_in_one_loop_that_reads_weights_once() -> None:
    """And what is made of weights alone is made once: their rounding, their gathering."""

    def rounding(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return block(x, *(jnp.tan(w) for w in weights)), None

        return lax.scan(layer, x, (ups, downs))[0]

    for num in (2, 3):
        (loop,) = named(jaxpr_of(rounding, num), "scan")
        view = scan_of(loop)
        assert len(view.xs(loop.invars)) == 2 and view.num_carry == num
        assert len(named(view.body, "tan")) == 2 and len(named(view.body, "dot_general")) == 2 * num


def test_a_call_is_gone_through_for_its_loops() -> None:
    assert len(named(jaxpr_of(called), "scan")) == 1 and len(named(jaxpr_of(called), "sin")) == 2


def made_of(jaxpr: Jaxpr) -> dict[Any, set[int]]:
    """By variable, the ids of all equations that it depends on."""
    found: dict[Any, set[int]] = {}
    for eqn in jaxpr.eqns:
        before = {id(eqn)}.union(*(found.get(var, set()) for var in variables(eqn)))
        found.update((var, before) for var in eqn.outvars)
    return found


def test_the_next_one_waits_for_the_operands_and_not_for_the_sum() -> None:
    """By what depends on what in a layer: the second's first product on the first's `tanh`, and not on the product that
    devices add up, which waits for nothing of the second."""
    (loop,) = named(jaxpr_of(stack), "scan")
    body = scan_of(loop).body
    of, products = made_of(body), named(body, "dot_general")
    (up_a, up_b), (down_a, down_b) = (
        [eqn for eqn in products if eqn.invars[1].aval.shape == shape] for shape in ((WIDE, 5), (5, WIDE))
    )
    assert id(up_a) in of[up_b.outvars[0]] and id(down_a) not in of[up_b.outvars[0]]
    assert id(up_b) not in of[down_a.outvars[0]] and id(up_b) in of[down_b.outvars[0]]
    assert len([eqn for eqn in named(body, "name") if is_awaited("name", eqn.params)]) == 2


def residual(x: jax.Array, scale: jax.Array, ups: jax.Array, downs: jax.Array, is_post: bool) -> jax.Array:
    """A layer whose residual passes what it reads after its scale, or before."""
    read = x * jnp.sinh(scale)  # of the weight alone: its rounding
    return (read if is_post else x) + awaited(jnp.tanh(read @ ups[0]) @ downs[0])


@pytest.mark.parametrize("num", [2, 3])
def test_what_a_residual_is_scaled_by_is_read_by_each_in_its_turn(num: int) -> None:
    """Read by all at once, one kernel would make what all of them read behind the first one's sum."""
    x, scale, ups, downs = numbers((ROWS, WIDE), (WIDE,), (LAYERS, WIDE, 5), (LAYERS, 5, WIDE))
    for is_post in (False, True):
        function = functools.partial(residual, is_post=is_post)
        xs = [i * x for i in range(1, num + 1)]
        jaxpr = jax.make_jaxpr(lambda *args, f=function: together(f, args[3:], args[:3]))(scale, ups, downs, *xs).jaxpr
        waits = [eqn for eqn in jaxpr.eqns if name_of(eqn) == "custom_jvp_call"]
        vectors = [v for eqn in waits for v in eqn.outvars if v.aval.shape == (WIDE,)]
        assert len(vectors) == (num - 1 if is_post else 0) and len(named(jaxpr, "sinh")) == 1, "rounded once"
        assert set(vectors) <= {v for eqn in jaxpr.eqns for v in variables(eqn)}
        for one, other in zip(together(function, xs, [scale, ups, downs]), xs, strict=True):
            np.testing.assert_allclose(one, function(other, scale, ups, downs), 1e-6)


def test_nothing_waits_without_such_a_product_nor_in_the_backward_pass() -> None:
    plain = lambda x, ups, downs: jnp.tanh(x @ ups[0]) @ downs[0]  # noqa: E731
    assert not named(jaxpr_of(plain), "optimization_barrier")

    def gradient(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        return jax.grad(lambda x: together(stack, [x, 2 * x], [ups, downs])[1].sum())(x)

    x, ups, downs = numbers((ROWS, WIDE), (LAYERS, WIDE, 5), (LAYERS, 5, WIDE))
    forward, backward = named(jax.make_jaxpr(gradient)(x, ups, downs).jaxpr, "scan")
    assert len(named(scan_of(forward).body, "optimization_barrier")) == 1
    assert not named(scan_of(backward).body, "optimization_barrier")


def test_nothing_more_is_saved_for_the_backward_pass() -> None:
    """Neither what waits nor what is marked is a value of its own: a layer keeps what two layers keep."""

    def saved(run: Callable[..., Arrays]) -> int:
        def total(weights: Arrays, xs: Arrays) -> jax.Array:
            return sum((y.sum() for y in run(CASES["saved"], xs, weights)), jnp.zeros(()))

        *xs, ups, downs = numbers((ROWS, WIDE), (ROWS, WIDE), (LAYERS, WIDE, 5), (LAYERS, 5, WIDE))
        loops = named(jax.make_jaxpr(jax.grad(total))([ups, downs], xs).jaxpr, "scan")
        forward = [loop for loop in loops if not loop.params["reverse"]]
        return sum(v.aval.size for loop in forward for v in scan_of(loop).ys(loop.outvars))

    apart = saved(lambda function, xs, weights: [function(x, *weights) for x in xs])
    assert saved(together) <= apart


def test_a_mark_is_known_by_its_name() -> None:
    (eqn,) = jax.make_jaxpr(awaited)(1.0).jaxpr.eqns
    assert eqn.params["name"] == AWAITED and is_awaited(name_of(eqn), eqn.params)
    assert not is_awaited("name", {"name": "other"}) and not is_awaited("add", {})
