"""Loops that add up, all turns together: which, to the same numbers, and which are left as their author wrote them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params

from cjax.jax_compat.jaxprs import name_stack
from cjax.models.cross_entropy import IGNORED, cross_entropy
from cjax.trace.author.capture import capture
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.at_once import all_at_once
from cjax.trace.source import TraceSource

TURNS, ROWS, IN, OUT = 4, 3, 5, 7


def summed(of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss that adds up what `of` makes of a weight and a part of its input."""
    return lambda w, x: lax.scan(lambda total, part: (total + of(w, part), None), 0.0, x)[0]


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))


@jax.custom_jvp
def hidden(x: jax.Array) -> jax.Array:
    return x @ x.T @ x


hidden.defjvp(lambda primals, tangents: (hidden(*primals), tangents[0]))


def with_two_sums(w: Any, x: Any) -> Any:
    def turn(sums: Any, part: Any) -> Any:
        y = part @ w
        return (sums[0] + y.sum(), sums[1] + jnp.square(y).sum(0)), None

    total, squares = lax.scan(turn, (jnp.float32(0), jnp.zeros(OUT)), x)[0]
    return total + squares.max()


def kept_of_a_checkpoint(w: Any, x: Any) -> Any:
    turn = jax.checkpoint(lambda total, part: (total + jnp.tanh(part @ w).sum(), None))
    return lax.scan(turn, 0.0, x)[0]


TAKEN: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": summed(lambda w, part: (part @ w).sum()),
    "within a checkpoint": kept_of_a_checkpoint,
    "several sums": with_two_sums,
    "a form of the weight": lambda w, x: summed(lambda v, part: (v @ part.T).sum())(w.T * 2, x),
    "two products": summed(lambda w, part: jax.nn.relu(part @ w @ w.T).sum()),
    "a derivative by hand": summed(lambda w, part: clipped(part @ w).sum()),
    "a lookup": summed(lambda w, part: jnp.take_along_axis(part @ w, jnp.argmax(part, -1)[:, None], -1).sum()),
    "backwards": lambda w, x: lax.scan(lambda t, part: (t + (part @ w).sum(), None), 0.0, x, reverse=True)[0],
}
KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "no product": summed(lambda w, part: jnp.square(part).sum() + w.sum()),
    "turns that depend on each other": lambda w, x: lax.scan(
        lambda t, part: (jnp.tanh(t + (part @ w).sum()), None), jnp.float32(0), x
    )[0],
    "a sum that turns read": lambda w, x: lax.scan(lambda t, part: (t + (part @ w).sum() * t, None), 1.0, x)[0],
    "results of each turn": lambda w, x: jnp.sum(lax.scan(lambda t, part: (t + (part @ w).sum(), part @ w), 0.0, x)[1]),
    "scores of a part of the queries": lambda w, x: summed(
        lambda w, part: (part @ w @ (x.reshape(-1, IN) @ w).T).sum()
    )(w, x),
    "distances to all rows": lambda w, x: summed(
        lambda w, part: jnp.abs(jnp.outer(part @ w[:, 0], jnp.ones(TURNS * ROWS)) - x.reshape(-1, IN)[:, 0]).sum()
    )(w, x),
    "a product that a derivative by hand hides": summed(lambda w, part: (hidden(part) @ w).sum()),
    "a branch": summed(lambda w, part: lax.cond(part.sum() > 0, lambda: (part @ w).sum(), lambda: 0.0)),
    "random numbers": lambda w, x: summed(
        lambda w, i: (jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (ROWS, IN)) @ w).sum()
    )(w, jnp.arange(TURNS)),
    "a product that is the same in each turn": summed(lambda w, part: (part.sum() * (w.T @ w)).sum()),
}  # fmt: skip


def inputs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(IN, OUT))), jnp.asarray(rng.normal(size=(TURNS, ROWS, IN)))


def flat(loss: Callable[..., Any]) -> ClosedJaxpr:
    return simplify(jax.make_jaxpr(loss)(*inputs()))


def names(jaxpr: Any) -> set[str]:
    inside = [names(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*inside)


@pytest.mark.parametrize("name", TAKEN)
def test_all_turns_together_are_the_same(name: str) -> None:
    closed = flat(TAKEN[name])
    together = all_at_once(closed, 1)
    assert "scan" in names(closed.jaxpr) and "scan" not in names(together.jaxpr)
    given, wanted = (
        jax.value_and_grad(lambda w, x, each=each: jaxpr_as_fun(each)(w, x)[0], (0, 1))(*inputs())
        for each in (together, closed)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), given, wanted)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_more_than_a_sum_of_products_with_weights_stays_a_loop(name: str) -> None:
    closed = flat(KEPT[name])
    assert "scan" in names(closed.jaxpr) and all_at_once(closed, 1) is closed


def test_products_with_what_is_no_weight_stay_in_the_loop() -> None:
    """A part of the queries against all keys: at once, their scores would be as many as there are pairs."""
    closed = flat(TAKEN["a sum"])
    assert all_at_once(closed, 0) is closed


def test_the_name_of_the_turn_stays() -> None:
    """Reports say where an operation is by it."""

    def named(w: Any, part: Any) -> Any:
        with jax.named_scope("head"):
            return (part @ w).sum()

    (product,) = [e for e in all_at_once(flat(summed(named)), 1).eqns if e.primitive.name == "dot_general"]
    assert str(name_stack(product)) == "head"


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(IN, OUT, rngs=rngs)


def in_chunks(model: Classifier, batch: Any) -> jax.Array:
    return cross_entropy(batch["x"], batch["y"], model.head, chunk=3)


def test_a_loss_reads_as_one_that_was_never_cut() -> None:
    """Of the models' own loss: the same products, of the same classes, and sums that add up over micro-batches."""
    batch = {"x": jax.ShapeDtypeStruct((8, 6, IN), jnp.float32), "y": jax.ShapeDtypeStruct((8, 6), jnp.int32)}
    build = lambda rngs: Classifier(rngs)  # noqa: E731
    looped = TraceSource(capture(build, in_chunks, batch), batch)
    whole = TraceSource(capture(build, lambda m, b: cross_entropy(b["x"], b["y"], m.head, chunk=None), batch), batch)
    found, wanted = looped.read(at_once=True), whole.read()
    assert [m.looped for m in looped.read().dims.matmuls] == [True]
    assert [m.looped for m in found.dims.matmuls] == [m.looped for m in wanted.dims.matmuls] == [False]
    for trace in (found, wanted):
        (product,), classes = trace.dims.matmuls, trace.dims.class_of
        assert trace.batch_class in [classes(d) for d in product.lhs]
        assert [classes(d) for d in product.rhs] == list(trace.classes_of(1))
    assert IGNORED in [atom.val for eqn in found.closed.eqns for atom in eqn.invars if hasattr(atom, "val")]
