"""What is joined, summed up and cut apart again is never joined, and comes to the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.jax_compat.core import ClosedJaxpr, jaxpr_as_fun
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.jaxpr.view import every_equation

ROWS, KEYS = 3, 5
X, ONE = (jnp.asarray(np.random.default_rng(5).standard_normal(shape)) for shape in ((2, ROWS, KEYS), (2, ROWS, 1)))
MASK = jnp.asarray(np.random.default_rng(6).random((2, ROWS, KEYS + 1)) > 0.3)


def joined(x: Any, one: Any) -> Any:
    return jnp.concatenate([x, one], -1)


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x, -1)


def twice(x: Any) -> Any:
    """A maximum taken off before a softmax, which takes it off again."""
    return softmax(x - x.max(-1, keepdims=True))


def squares(x: Any) -> Any:
    """Which another number taken off changes, as it does no softmax."""
    return x * x / (x * x).sum(-1, keepdims=True)


def by_sum(x: Any) -> Any:
    exps = jnp.exp(2 * x)
    return exps / exps.sum(-1, keepdims=True)


APART: dict[str, Callable[[Any, Any], Any]] = {
    "behind": lambda x, one: softmax(joined(x, one))[..., :-1],
    "in front": lambda x, one: softmax(joined(one, x))[..., 1:],
    "what was added": lambda x, one: softmax(joined(x, one))[..., -1:],
    "both": lambda x, one: (lambda w: w[..., :-1] * w[..., -1:])(softmax(joined(x, one))),
    "twice": lambda x, one: twice(joined(x, one))[..., :-1],
    "no maximum": lambda x, one: by_sum(joined(x, one))[..., :-1],
    "a mask of all": lambda x, one: softmax(jnp.where(MASK, joined(x, one), -1e9))[..., :-1],
    "another dtype": lambda x, one: softmax(joined(x, one).astype(jnp.float16))[..., :-1],
    "the first dim": lambda x, one: jax.nn.softmax(jnp.concatenate([x[0], one[0].T.repeat(2, 1)[:, :KEYS]], 0), 0)[:-1],
    "under remat": lambda x, one: jax.checkpoint(lambda x, one: softmax(joined(x, one))[..., :-1])(x, one),
    "in a loop": lambda x, one: jax.lax.scan(lambda c, xs: (c, softmax(joined(*xs))[..., :-1]), 0.0, (x, one))[1],
}
JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "a part of both": lambda x, one: softmax(joined(x, one))[..., 1:],
    "some of one": lambda x, one: softmax(joined(x, one))[..., : KEYS - 1],
    "every other": lambda x, one: softmax(joined(x, one))[..., :KEYS:2],
    "some of the rows": lambda x, one: softmax(joined(x, one))[:, 1:, :KEYS],
    "all of it": lambda x, one: softmax(joined(x, one)),
    "all of it as well": lambda x, one: (lambda w: w[..., :-1].sum() * w)(softmax(joined(x, one))),
    "in a row": lambda x, one: jnp.cumsum(softmax(joined(x, one)), -1)[..., :-1],
    "summed over rows": lambda x, one: (lambda w: (w / w.sum(1, keepdims=True))[..., :-1])(softmax(joined(x, one))),
    "no sum": lambda x, one: (joined(x, one) * 2)[..., :-1],
    "two joins": lambda x, one: softmax(joined(x, one) + joined(2 * x, one))[..., :-1],
    "two more": lambda x, one: softmax(jnp.concatenate([x, one, one], -1))[..., :-2],
}


def flat(function: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    return simplify(jax.make_jaxpr(function)(*(args or (X, ONE))))


def is_apart(closed: ClosedJaxpr) -> bool:
    return not {"concatenate", "slice"} & {name_of(eqn) for eqn in every_equation(closed.jaxpr)}


@pytest.mark.parametrize("name", [*APART, *JOINED])
def test_the_same_numbers_and_gradients(name: str) -> None:
    function = (APART | JOINED)[name]
    closed = flat(function)
    names = [name_of(eqn) for eqn in every_equation(closed.jaxpr)]
    assert ("concatenate" not in names) == (name in APART), names

    def weighed(run: Callable[..., Any]) -> Any:
        def total(x: Any, one: Any) -> Any:
            out = run(x, one)
            return (out * jnp.sin(1.0 + jnp.arange(out.size)).reshape(out.shape)).sum()

        return jax.value_and_grad(total, (0, 1))(X, ONE)

    tol = 2e-3 if name == "another dtype" else 2e-6
    for want, have in zip(
        jax.tree.leaves(weighed(function)),
        jax.tree.leaves(weighed(lambda *ins: jaxpr_as_fun(closed)(*ins)[0])),
        strict=True,
    ):
        np.testing.assert_allclose(have, want, rtol=tol, atol=tol)


def test_what_is_summed_up_is_one_number_more() -> None:
    closed = flat(APART["behind"])
    shapes = {var.aval.shape for eqn in closed.eqns for var in eqn.outvars}
    assert all(shape[-1] != KEYS + 1 for shape in shapes if shape)
    assert is_apart(closed)


def test_a_maximum_is_taken_off_once() -> None:
    once, again = ([name_of(eqn) for eqn in flat(APART[name]).eqns] for name in ("behind", "twice"))
    assert again.count("reduce_max") == once.count("reduce_max") == 1


@pytest.mark.parametrize(
    "off",
    [
        lambda x: x.max(1, keepdims=True),
        lambda x: x[:, :, ::-1].max(-1, keepdims=True) + 1,
        lambda x: jnp.maximum(x.max(-1, keepdims=True), 0),
        lambda x: (2 * x).max(-1, keepdims=True),
        lambda x: jnp.swapaxes(x, 1, 2).max(-1)[:, :, None] if x.shape[1] == x.shape[2] else x.max(1, keepdims=True),
        lambda x: x.max(-1)[:, None, :],
    ],
)
def test_another_number_is_taken_off_as_well(off: Callable[[Any], Any]) -> None:
    """Square, so that a maximum of one dim fits to another."""
    x = (
        jnp.asarray(np.random.default_rng(8).standard_normal((2, 4, 3))),
        jnp.asarray(np.random.default_rng(9).standard_normal((2, 4, 1))),
    )

    def function(x: Any, one: Any) -> Any:
        whole = joined(x, one)
        once = whole - off(whole)
        return squares(once - once.max(-1, keepdims=True))[..., :-1]

    def second(x: Any, one: Any) -> Any:
        whole = joined(x, one)
        once = whole - whole.max(-1, keepdims=True)
        return squares(once - off(once))[..., :-1]

    for each in (function, second):
        np.testing.assert_allclose(jaxpr_as_fun(flat(each, *x))(*x)[0], each(*x), rtol=1e-5, atol=1e-6)
