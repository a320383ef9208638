"""Sums over pieces that make their gradients along with them: which loops these are, and that numbers stay right."""

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cjax
from cjax.models import cross_entropy
from cjax.sharding.place import filled, for_gpus
from cjax.trace.emit.pieces import adds_up, summed
from cjax.trace.jaxpr.simplify import simplify

ROWS, LENGTH, WIDTH, VOCAB = 4, 6, 16, 1027
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.integers(0, VOCAB, (ROWS, LENGTH)), "y": RNG.integers(0, VOCAB, (ROWS, LENGTH))}
BATCH["y"][1, 2:] = -100

Body = Callable[[Any, jax.Array], tuple[Any, Any]]


def by_hand(scale: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The same values, with a derivative of its author's own."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, gradient: (scale(gradient),))
    return same


doubled, clipped = by_hand(lambda gradient: 2 * gradient), by_hand(lambda gradient: jnp.clip(gradient, -0.1, 0.1))
SUMS: dict[str, Body] = {
    "checkpointed": jax.checkpoint(lambda total, x: (total + jnp.sum(jnp.exp(x)), None)),
    "the other way round": jax.checkpoint(lambda total, x: (jnp.sum(jnp.exp(x)) + total, None)),
    "with a derivative by hand": jax.checkpoint(lambda total, x: (total + jnp.sum(jnp.exp(doubled(x))), None)),
    "added outside": lambda total, x: (total + jax.checkpoint(lambda x: jnp.sum(jnp.exp(x)))(x), None),
}
OTHERS: dict[str, Body] = {
    "keeps what it makes": lambda total, x: (total + jnp.sum(jnp.exp(x)), None),
    "scales what was": jax.checkpoint(lambda total, x: (2 * total + jnp.sum(x * x), None)),
    "reads what was": jax.checkpoint(lambda total, x: (total + jnp.sum(x * total), None)),
    "adds it twice": jax.checkpoint(lambda total, x: (total + (total + jnp.sum(x)), None)),
    "subtracts": jax.checkpoint(lambda total, x: (jnp.sum(x * x) - total, None)),
    "also gives each": jax.checkpoint(lambda total, x: (total + jnp.sum(x), jnp.exp(x))),
    "with a derivative that clips": jax.checkpoint(lambda total, x: (total + jnp.sum(jnp.exp(clipped(x))), None)),
    "the greatest": jax.checkpoint(lambda total, x: (jnp.maximum(total, jnp.sum(x)), None)),
    "a constant": jax.checkpoint(lambda total, x: (jnp.zeros(()), None)),
    "the last": jax.checkpoint(lambda total, x: (jnp.sum(x), None)),
}


def loop_of(body: Body, initial: Any = 0.0) -> Any:
    traced = jax.make_jaxpr(lambda xs: jax.lax.scan(body, initial, xs)[0])(jnp.ones((3, 2)))
    return next(eqn for eqn in simplify(traced).jaxpr.eqns if eqn.primitive.name == "scan")


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_what_is_made_again(name: str) -> None:
    assert adds_up(loop_of(SUMS[name], jnp.zeros(())))


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_stay_as_they_are(name: str) -> None:
    assert not adds_up(loop_of(OTHERS[name], jnp.zeros(())))


def test_sums_of_several_numbers_stay_too() -> None:
    vector = jax.checkpoint(lambda total, x: (total + jnp.exp(x), None))
    two = jax.checkpoint(lambda both, x: ((both[0] + jnp.sum(x), both[1] + 1.0), None))
    integer = jax.checkpoint(lambda total, x: (total + jnp.sum(x > 0), None))
    assert not adds_up(loop_of(vector, jnp.zeros(2)))
    assert not adds_up(loop_of(two, (jnp.zeros(()), jnp.zeros(()))))
    assert not adds_up(loop_of(integer, jnp.zeros((), jnp.int32)))


@given(st.integers(1, 5), st.booleans(), st.floats(-2, 2), st.integers(0, 9))
def test_gradients_are_those_of_the_loop(length: int, reverse: bool, factor: float, seed: int) -> None:
    draw = np.random.default_rng(seed).standard_normal
    weights, other = jnp.asarray(draw((3, 2)), jnp.float32), jnp.asarray(draw(2), jnp.float32)
    xs, places = jnp.asarray(draw((length, 4, 3)), jnp.float32), jnp.arange(4 * length).reshape(length, 4) % 2

    def part(consts: list[jax.Array], x: list[jax.Array]) -> jax.Array:
        made = jnp.tanh(x[0] @ consts[0]) * consts[1]
        return jnp.take_along_axis(made, (x[1] + consts[2])[:, None] % 2, 1).sum()

    def mine(initial: jax.Array, weights: jax.Array, other: jax.Array, xs: jax.Array) -> jax.Array:
        return factor * summed(part, initial, [weights, other, jnp.ones((), jnp.int32)], [xs, places], reverse) ** 2

    def plain(initial: jax.Array, weights: jax.Array, other: jax.Array, xs: jax.Array) -> jax.Array:
        consts = [weights, other, jnp.ones((), jnp.int32)]
        return factor * (initial + sum(part(consts, [x, place]) for x, place in zip(xs, places, strict=True))) ** 2

    args = jnp.asarray(0.5), weights, other, xs
    ours, theirs = (jax.value_and_grad(f, argnums=(0, 1, 2, 3))(*args) for f in (mine, plain))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
    np.testing.assert_allclose(mine(*args), plain(*args), rtol=1e-5, atol=1e-6)


def assert_gradients_are_the_loops(
    loss: Callable[..., jax.Array], params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program for a GPU, against plain JAX."""

    class Given(nn.Module):
        @nn.compact
        def __call__(self) -> Any:
            return {name: self.param(name, lambda _, value=value: value) for name, value in params.items()}

    batch = {"x": jnp.asarray(RNG.standard_normal((ROWS, LENGTH, WIDTH)), jnp.float32)}
    on_gpus(monkeypatch)
    some = lambda model, batch: loss(model(), jnp.swapaxes(batch["x"], 0, 1)) / ROWS  # noqa: E731
    program = cjax.parallelize(Given(), some, optax.sgd(1e-2), batch, devices=jax.devices("cpu")[:1])
    value, grads = program.value_and_grad(program.init(0), batch)
    wanted, theirs = jax.value_and_grad(lambda p: loss(p, jnp.swapaxes(batch["x"], 0, 1)) / ROWS)(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for mine, right in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(mine - right) <= 1e-4 * np.linalg.norm(right)


def test_a_derivative_that_clips_is_handed_what_the_sum_s_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(params: Any, xs: jax.Array) -> jax.Array:
        part = jax.checkpoint(lambda total, x: (total + jnp.square(clipped(x @ params["w"])).sum(), None))
        return 0.02 * jax.lax.scan(part, jnp.zeros(()), xs)[0]

    weight = jnp.asarray(RNG.standard_normal((WIDTH, 5)), jnp.float32)
    assert_gradients_are_the_loops(loss, {"w": weight}, monkeypatch)


def test_complex_weights_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(params: Any, xs: jax.Array) -> jax.Array:
        def part(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            made = x * params["z"]
            return total + (made.real * jnp.sin(made.imag)).sum(), None

        pieces = xs * params["y"]
        return jax.lax.scan(jax.checkpoint(part), jnp.zeros(()), pieces)[0]

    draw = RNG.standard_normal
    params = {name: jnp.asarray(draw(WIDTH) + 1j * draw(WIDTH), jnp.complex64) for name in "zy"}
    assert_gradients_are_the_loops(loss, params, monkeypatch)


def test_a_sum_that_is_no_wider_than_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are as wide as what they are of: rounded to the sum's bits they would be off by a thousandth."""

    def loss(params: Any, xs: jax.Array) -> jax.Array:
        def part(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.square(x @ params["w"]).sum().astype(jnp.bfloat16), None

        return jax.lax.scan(jax.checkpoint(part), jnp.zeros((), jnp.bfloat16), xs)[0].astype(jnp.float32)

    weight = jnp.asarray(RNG.standard_normal((WIDTH, 5)), jnp.float32)
    assert_gradients_are_the_loops(loss, {"w": weight}, monkeypatch)


def test_pieces_of_nothing_and_numbers_among_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(params: Any, xs: jax.Array) -> jax.Array:
        def summed_up(factor: Any, power: Any, is_on: Any) -> jax.Array:
            def part(total: jax.Array, _: None) -> tuple[jax.Array, None]:
                each = jnp.where(is_on, factor * jnp.sin(xs @ params["w"]) ** power, 0.0)
                return total + each.sum(), None

            return jax.lax.scan(jax.checkpoint(part), jnp.zeros(()), None, length=3)[0]

        return jax.jit(summed_up)(2.0, 2, True)

    weight = jnp.asarray(RNG.standard_normal((WIDTH, 5)), jnp.float32)
    assert_gradients_are_the_loops(loss, {"w": weight}, monkeypatch)


class Model(nn.Module):
    """Gives what is classified, and what classifies it."""

    tied: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = self.param("table", nn.initializers.normal(1.0), (VOCAB, WIDTH))
        x = table[tokens]
        for _ in range(3):
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(24)(nn.LayerNorm()(x))))
        return nn.LayerNorm()(x), table.T if self.tied else self.param("head", nn.initializers.normal(), (WIDTH, VOCAB))


def loss(model: Any, batch: Any, weight: float = 1.0) -> Any:
    hidden, kernel = model(batch["x"])
    return weight * cross_entropy(hidden, batch["y"], lambda some: some @ kernel, chunk=2)


def results(tied: bool, plan: str, weight: float = 1.0) -> tuple[float, list[np.ndarray], int]:
    """Loss, gradients, and products that read or make something of all classes."""
    devices = jax.devices("cpu")[:1]
    some = functools.partial(loss, weight=weight)
    program = cjax.parallelize(Model(tied), some, optax.sgd(1e-2), BATCH, plan, devices=devices)
    value, grads = program.value_and_grad(program.init(0), BATCH)
    lines = [line for line in program.lower().as_text().splitlines() if "stablehlo.dot_general" in line]
    wide = [line for line in lines if re.search(rf"(?<!\d)({VOCAB}|1088)x", line)]
    return float(value), [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)], len(wide)


as_on_cpus = functools.cache(results)


def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_gpus, "on_gpus", lambda mesh: True)
    monkeypatch.setattr(filled, "on_gpus", lambda mesh: True)


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plan", [
    pytest.param("precision=float32", marks=pytest.mark.full),
    pytest.param("precision=bfloat16", marks=pytest.mark.full),
    "precision=bfloat16 microbatches=2",
])  # fmt: skip
def test_a_loss_by_pieces_classifies_once(tied: bool, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = f"{plan} unroll=none"
    plain, wanted, again = as_on_cpus(tied, plan)
    exact = as_on_cpus(tied, "precision=float32 unroll=none")[1]
    on_gpus(monkeypatch)
    value, grads, once = results(tied, plan)
    assert (once, again) == (3, 4)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    # Under bfloat16 rounded in other places, and no more than before.
    for mine, theirs, right in zip(grads, wanted, exact, strict=True):
        allowed = 1.5 * np.linalg.norm(theirs - right) + 3e-3 * np.linalg.norm(right)
        assert np.linalg.norm(mine - right) <= (allowed if "bfloat16" in plan else 1e-5 * np.linalg.norm(right))


@pytest.mark.full
def test_gradients_take_the_factor_behind_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch)
    (_, one, _), (_, three, _) = (results(True, "precision=float32", weight) for weight in (1.0, -3.0))
    for a, b in zip(one, three, strict=True):
        np.testing.assert_allclose(-3 * a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_float16_and_evaluations_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch)
    assert results(True, "precision=float16 unroll=none")[2] == 4
    devices = jax.devices("cpu")[:1]
    program = cjax.parallelize(Model(True), loss, optax.sgd(1e-2), BATCH, "precision=float32", devices=devices)
    mine = program.loss(program.init(0), BATCH)
    monkeypatch.undo()
    assert float(mine) == pytest.approx(as_on_cpus(True, "precision=float32 unroll=none")[0], rel=1e-6)
