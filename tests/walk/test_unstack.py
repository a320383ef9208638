"""A stack that its author made taken apart: the same numbers, each layer's made of its own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cjax.jax_compat.core import ClosedJaxpr, Literal, jaxpr_as_fun, make_jaxpr
from cjax.trace.jaxpr.simplify import simplify
from cjax.walk.unstack import Unstacked, unstack

NUM = 3
SHAPE = (NUM, 4, 4)
Function = Callable[[jax.Array], jax.Array]

# Each layer's result of its own leaf alone.
ALONE: dict[str, Function] = {
    "elementwise": lambda w: jnp.where(w > 0, w * 2 + jnp.exp(w), jnp.clip(w, -1, 1)),
    "with numbers for all": lambda w: w + jnp.full(SHAPE, 3.0) * jnp.arange(4.0),
    "with a number for each": lambda w: w * jnp.linspace(1, 2, NUM)[:, None, None],
    "mean of each": lambda w: w - w.mean((1, 2), keepdims=True),
    "norm of each row": lambda w: w / jnp.linalg.norm(w, axis=-1, keepdims=True),
    "another order": lambda w: w.transpose(2, 0, 1).transpose(1, 2, 0),
    "flat and back": lambda w: jnp.cumsum(w.reshape(NUM * 4, 4), 1).reshape(SHAPE),
    "products": lambda w: jnp.einsum("lab,lcb->lac", w, w) @ jnp.ones((4, 4)),
    "products beside a batch": lambda w: jnp.einsum("lab,abc->lac", w, jnp.arange(64.0).reshape(4, 4, 4)),
    "sorted": lambda w: jnp.sort(w, axis=1)[:, ::-1],
    "padded and cut": lambda w: jnp.pad(w, ((0, 0), (1, 0), (0, 2)))[:, 1:, :4],
    "joined": lambda w: jnp.concatenate([w[:, :2], w[:, 2:] * 2], axis=1),
    "cut where numbers say": lambda w: lax.dynamic_slice_in_dim(jnp.concatenate([w, w], 2), 2, 4, 2),
    "factors of each": lambda w: jax.vmap(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(4)))(w),
    "largest": lambda w: jnp.broadcast_to(jnp.argmax(w, 2)[..., None].astype(w.dtype), SHAPE),
}
# All layers meet.
TOGETHER: dict[str, Function] = {
    "sum": lambda w: w.sum(),
    "largest of all": lambda w: w.max((0, 1)),
    "any": lambda w: (w > 2).any(),
    "inner product": lambda w: jnp.vdot(w, w),
    "sum over layers": lambda w: jnp.einsum("lab,l->ab", w, jnp.arange(3.0)),
    "along layers": lambda w: jnp.cumsum(w, 0),
    "turned": lambda w: w[::-1],
    "scaled by the sum": lambda w: w / w.sum(),
}


def apart(function: Function, stacked: bool) -> tuple[ClosedJaxpr, Unstacked]:
    closed = simplify(make_jaxpr(function)(jax.ShapeDtypeStruct(SHAPE, jnp.float32)))
    return closed, unstack(closed, {0: NUM}, {0: NUM} if stacked else {})


def numbers() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_gives_the_same_numbers(name: str) -> None:
    function, w = {**ALONE, **TOGETHER}[name], numbers()
    stacked = jax.eval_shape(function, w).shape == SHAPE
    _, found = apart(function, stacked)
    made = jaxpr_as_fun(found.closed)(*(w[layer : layer + 1] for layer in range(NUM)))
    assert len(made) == (NUM if stacked else 1)
    np.testing.assert_allclose(np.concatenate(made) if stacked else made[0], function(w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALONE)
def test_a_layer_is_made_of_its_own_leaf(name: str) -> None:
    _, found = apart(ALONE[name], True)
    jaxpr = found.closed.jaxpr
    of = {var: {layer} for layer, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        read = [of.get(v, set()) for v in eqn.invars if not isinstance(v, Literal)]
        of.update(dict.fromkeys(eqn.outvars, set().union(*read)))
    assert [of[atom] for atom in jaxpr.outvars if not isinstance(atom, Literal)] == [{0}, {1}, {2}]


@pytest.mark.parametrize("name", ["sum", "largest of all", "any", "inner product", "sum over layers"])
def test_sums_are_of_each_layers_own(name: str) -> None:
    """Nothing of the size of a layer is read by more than one equation's worth of layers."""
    _, found = apart(TOGETHER[name], False)
    assert not [eqn for eqn in found.closed.eqns if eqn.primitive.name == "concatenate"]


def keys(function: Callable[[jax.Array], jax.Array], impl: str) -> tuple[ClosedJaxpr, jax.Array]:
    key = jax.random.key(0, impl=impl)
    return simplify(make_jaxpr(function)(key)), key


def by_map(key: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.normal(key, (5, 2)) * 0.1)(jax.random.split(key, NUM))


def by_loop(key: jax.Array) -> jax.Array:
    return lax.scan(lambda c, key: (c, jax.random.normal(key, (5, 2)) * 0.1), 0.0, jax.random.split(key, NUM))[1]


def by_chain(key: jax.Array) -> jax.Array:
    def turn(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        key, own = jax.random.split(key)
        return key, jax.random.normal(own, (5, 2))

    return lax.scan(turn, key, length=NUM, reverse=True)[1]


def at_once(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (NUM, 5, 2))


@pytest.mark.parametrize(
    ("function", "is_apart"), [(by_map, True), (by_loop, True), (by_chain, True), (at_once, False)]
)
def test_random_numbers_are_drawn_layer_by_layer(function: Callable[[jax.Array], jax.Array], is_apart: bool) -> None:
    closed, key = keys(function, "threefry2x32")
    found = unstack(closed, {}, {0: NUM})
    made = jax.jit(jaxpr_as_fun(found.closed))(key)
    np.testing.assert_array_equal(np.concatenate(made), jax.jit(jaxpr_as_fun(closed))(key)[0])
    drawn = {eqn.outvars[0].aval.size for eqn in found.closed.eqns if eqn.primitive.name == "random_bits"}
    assert drawn == {10 if is_apart else 10 * NUM}


def test_keys_that_draw_otherwise_in_a_batch_are_not_taken_apart() -> None:
    """JAX's rbg draws a batch of keys from the first."""
    closed, key = keys(by_map, "rbg")
    found = unstack(closed, {}, {0: NUM})
    np.testing.assert_array_equal(np.concatenate(jaxpr_as_fun(found.closed)(key)), jaxpr_as_fun(closed)(key)[0])
