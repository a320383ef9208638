"""Sums of weights' gradients on their way while the inputs' are made: models train as their authors train them, where
every product's waits, and compiled for GPUs little of a step's transfers has nothing beside it."""

import collections
import os
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import UNDER_ALL, assert_trained_alike
from large import audited, waited_for

import cjax
from cjax.audit import audit
from cjax.jax_compat.core import Equation, Jaxpr, Literal
from cjax.program.steps import make_step
from cjax.sharding.place import weight_sums
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import open_bodies

ALL = os.environ.get("CJAX_TEST_ALL") == "1"


@pytest.fixture
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sums, "SCATTERED_TOGETHER", 0)
    monkeypatch.setattr(weight_sums, "ROWS", 0)


PLANS = ["data=8", "zero=1", "zero=2", "zero=3", "zero=3 remat=block", "zero=3 microbatches=2", "zero=3 unroll=layers"]
PAIRS = [
    ("linen_scan", "zero=3 remat=block"),
    ("nnx_llama", "data=4 sequence=ring:2 zero=3"),
    ("cjax_t5", "zero=1"),
    ("linen_encoder_decoder", "data=8"),
    ("nnx_scan", "zero=3 microbatches=2"),
    ("linen_part_frozen", "zero=3"),
]
MORE = [(name, plan) for name in UNDER_ALL for plan in PLANS]


class Net(nn.Module):
    """Products of a batch, of a weight in front, turned, made of another, and read twice; the last is small."""

    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = lambda name, *shape: self.param(name, nn.initializers.lecun_normal(), shape)  # noqa: E731
        x = jnp.tanh(x @ weight("first", 24, self.width))
        x = jnp.tanh(jax.lax.dot_general(weight("in front", self.width, self.width), x, (((0,), (1,)), ((), ()))).T)
        x = jnp.tanh(x @ weight("turned", 2 * self.width, self.width).T)
        x = jnp.tanh(x @ jnp.sin(weight("made", 2 * self.width, 2 * self.width)))
        twice = weight("twice", 2 * self.width, 2 * self.width)
        x = jnp.tanh(jnp.tanh(x @ twice) @ twice)
        return x @ weight("small", 2 * self.width, 3)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.tanh(nn.Dense(256)(nn.LayerNorm()(x))), None


class Layers(nn.Module):
    in_a_loop: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.in_a_loop:
            return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()(x, None)[0]
        for _ in range(4):
            x, _ = Layer()(x, None)
        return x


class Again(nn.Module):
    """A weight that each turn of a loop reads, over positions or of layers that share it, that two parts read which are
    made again, or that is a table, too; or that such a part is given in another form."""

    where: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(nn.Dense(48)(x))
        shared = self.param("shared", nn.initializers.lecun_normal(), (48, 48))
        part = jax.checkpoint(lambda x, weight: jnp.tanh(jnp.tensordot(x, weight, 1)))
        if self.where in ("turned", "cut"):
            form = {"turned": lambda w: w.T, "cut": lambda w: w.reshape(48, 2, 48)}[self.where]
            return part(x, form(self.param("tall", nn.initializers.lecun_normal(), (96, 48))))
        if self.where == "parts":
            return jnp.sin(part(jnp.cos(part(x, shared)), shared))
        if self.where == "table":
            table = self.param("table", nn.initializers.lecun_normal(), (1028, 48))
            return jax.checkpoint(lambda x, table: x @ table.T)(jnp.cos(x + table[jnp.argmax(x, 1)]), table)
        if self.where == "layers":
            for i in range(4):
                x = x + jnp.tanh(x @ shared) * self.param(f"own_{i}", nn.initializers.ones, (48,))
            return x
        turn = lambda _, part: (None, jnp.tanh(part @ shared))  # noqa: E731
        return jax.lax.scan(turn, None, x[None] * jnp.arange(1.0, 5.0)[:, None, None])[1].mean(0)


WHERE = ("layers", "loop", "parts", "table", "turned", "cut")
MODELS = {"net": Net(), "scanned": nn.Sequential([nn.Dense(256), Layers(True)])} | {each: Again(each) for each in WHERE}


def squares(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - 0.1).mean()


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.full("linen_scan-zero=3 remat=block")
@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *sorted({*MORE} - {*PAIRS})] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


def program_of(plan: str, model: nn.Module | None = None, wrt: Any = None) -> cjax.Program:
    batch = {"x": np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)}
    devices = jax.devices()[:1] if plan == "data=1" else None
    return cjax.parallelize(
        model or Net(), squares, optax.sgd(0.1), batch, plan, devices=devices, wrt=wrt, verify=False
    )


def waiting(program: cjax.Program) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of what waits for each other in a step, scalars and forward passes aside."""

    return [tuple(v.aval.shape for v in eqn.outvars) for eqn, _ in barriers(step_of(program))]


def step_of(program: cjax.Program) -> Jaxpr:
    return make_step(program._composed).trace(*program._inputs).jaxpr.jaxpr


def barriers(jaxpr: Jaxpr) -> Iterator[tuple[Equation, list[str]]]:
    """Each with the names of what makes its operands."""
    makers = {var: name_of(eqn) for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        if name_of(eqn) == "optimization_barrier":
            yield eqn, [makers.get(var, "") for var in eqn.invars if not isinstance(var, Literal)]
        for body in open_bodies(eqn):
            yield from barriers(body)


READ, TURNED = [((16, 64), (64, 64))], [((16, 64), (64, 128))]  # of inputs, and of weights as they are multiplied
LAST = [((16, 128), (128, 3))]
MADE = [((16, 128), (128, 128))]  # of a weight that is made of another, whose own gradient is a sum of them


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("data=8", [*READ, *TURNED, *LAST, *MADE]),
        ("zero=1", [*READ, *TURNED, *LAST, *MADE]),
        ("zero=3", [*READ, *TURNED, *LAST, *MADE]),
        # Nothing is added up, devices add up numbers of their own first, or a group's sum is one part of it all.
        ("data=1", []),
        ("data=8 microbatches=2", []),
        ("zero=3/4", MADE),
        ("data=2 tensor=4", []),
        ("zero=3 microbatches=2 overlap=2", [((8, 128), (128, 128))] * 2),
    ],
)
def test_what_waits(plan: str, expected: list[Any]) -> None:
    """A product's input for its weight, where nothing else reads that; of a batch nobody makes the gradient."""
    program = program_of(plan)
    found = [tuple(sorted(each)) for each in waiting(program) if all(len(shape) == 2 for shape in each)]
    assert sorted(found) == sorted(tuple(sorted(each)) for each in expected)
    placed = ["sharding_constraint" in names for _, names in barriers(step_of(program))]
    assert sum(placed) == len([each for each in expected if each in (*READ, *TURNED, *LAST)])


@pytest.mark.usefixtures("small_ones_too")
def test_a_frozen_weight_has_no_gradient() -> None:
    found = waiting(program_of("zero=3", wrt="first|turned"))
    assert sorted(tuple(sorted(each)) for each in found) == [*TURNED, *MADE]


def test_small_sums_go_together_and_large_ones_with_enough_to_hide_them_under(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting(program_of("zero=1")) == waiting(program_of("data=8")) == MADE
    monkeypatch.setattr(weight_sums, "SCATTERED_TOGETHER", 4 * 64 * 64)
    assert len(waiting(program_of("zero=1"))) == 3
    # An all-reduce takes twice as long: of two rows a device, nothing waits for it.
    assert waiting(program_of("data=8")) == MADE
    monkeypatch.setattr(weight_sums, "ROWS", 3)
    assert waiting(program_of("data=8")) == MADE
    monkeypatch.setattr(weight_sums, "ROWS", 2)
    assert len(waiting(program_of("data=8"))) == 3


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("plan", ["data=8", "zero=1", "zero=3"])
@pytest.mark.full(*(f"{name}-{plan}" for name in [*MODELS][4:] for plan in ("data=8", "zero=1")))
@pytest.mark.parametrize("name", MODELS)
def test_as_much_is_moved(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]

    def moved() -> float:
        program = program_of(plan, model)
        return audit(program.lower().compile(), program.mesh).moved()

    as_it_is = moved()
    assert (waiting(program_of(plan, model)) == []) == isinstance(model, Again)
    monkeypatch.setattr(weight_sums, "SCATTERED_TOGETHER", 1 << 40)
    assert moved() == as_it_is > 0


@pytest.mark.parametrize("in_a_loop", [True, False])
def test_the_smallest_weights_of_layers_are_gathered_once(in_a_loop: bool) -> None:
    """A 256th of the largest: a norm's, and a bias, which ZeRO-3 would gather once more for the backward pass."""
    batch = {"x": np.ones((16, 256), np.float32)}
    program = cjax.parallelize(Layers(in_a_loop), squares, optax.sgd(0.1), batch, "zero=3", verify=False)
    counts = collections.Counter[tuple[int, ...]]()
    for each in audit(program.lower().compile(), program.mesh).collectives:
        if each.kind == "all-gather":
            for shape in each.shapes:
                counts[tuple(size for size in shape.dims if size > 1)] += int(each.count)
    assert counts == {(256,): 3 * 4, (256, 256): 2 * 4}


# -- compiled for GPUs that are absent --------------------------------------------------------------------------------
@pytest.mark.aot
@pytest.mark.full("own-zero=1-0.3", "gpt-data=8-0.1")
@pytest.mark.parametrize(
    ("name", "plan", "most"), [("gpt", "zero=3", 0.2), ("own", "zero=1", 0.3), ("gpt", "data=8", 0.1)]
)
def test_little_of_what_is_sent_has_nothing_beside_it(name: str, plan: str, most: float) -> None:
    facts, devices, _ = audited(name, f"{plan} precision=bfloat16", 2048, 8, 4096, "h100:8")
    transfer, exposed = waited_for(facts, devices)
    assert 0 < exposed <= most * transfer
