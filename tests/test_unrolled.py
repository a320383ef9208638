"""Layers compiled one by one, `unroll=layers`: models train as their authors train them, and there is no loop."""

import os
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from contract import (
    ROUNDED,
    SUBJECTS,
    UNDER_ALL,
    assert_close,
    assert_trained_alike,
    begun,
    on_host,
    program_of,
    subject,
)
from zoo import case, regression, regression_batch

import cjax
from cjax.mesh import build_mesh
from cjax.plan import Plan
from cjax.program import Program
from cjax.program.steps import make_step
from cjax.sharding.place import for_gpus
from cjax.sharding.place.model import make_placer

ALL = os.environ.get("CJAX_TEST_ALL") == "1"


class Normed(nn.Module):
    """Layers that draw random numbers, and carry statistics from step to step."""

    rate: float = 0.2

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(24)(x)
        for _ in range(3):
            y = nn.BatchNorm(use_running_average=not train, momentum=0.8)(nn.Dense(24)(x))
            x = x + nn.Dropout(self.rate, deterministic=not train)(nn.tanh(y))
        return nn.Dense(1)(x)


class Turn(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + scale * nn.tanh(nn.Dense(24)(x))
        return x, x.mean(-1)


class Backwards(nn.Module):
    """The author's own loop over layers, which begins with the last; each reads its row, and leaves one behind."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        loop = nn.scan(Turn, variable_axes={"params": 0}, split_rngs={"params": True}, reverse=True, length=4)
        x = nn.Dense(24)(x)
        x, seen = loop()(x, jnp.arange(1, 5, dtype=x.dtype))
        return nn.Dense(1)(jnp.concatenate([x, seen.T * jnp.arange(4, dtype=x.dtype)], axis=-1))


SUBJECTS |= {
    "linen_norm_drop": case("linen", lambda _: Normed(), regression, regression_batch, blocks=(3,), couples=True),
    # Random numbers of a CPU are made in loops of their own.
    "linen_norm": case("linen", lambda _: Normed(0.0), regression, regression_batch, blocks=(3,), couples=True),
    "linen_backwards": case("linen", lambda _: Backwards(), regression, regression_batch, scanned=True),
}
PAIRS = [
    ("linen_norm_drop", "data=1 microbatches=1"),
    ("linen_norm_drop", "data=4 tensor=2 zero=3"),
    ("linen_backwards", "zero=3 microbatches=2"),
    ("linen_backwards", "data=4 tensor=2 zero=1 remat=block"),
    ("nnx_llama", "tensor=2d:4 microbatches=2 remat=dots"),
]
MORE = [
    ("linen_scan", "data=4 tensor=2 zero=1 remat=block"),
    ("nnx_llama", "sequence=ring:2 zero=1"),
    *((n, plan) for n in ("linen_norm_drop", "linen_backwards") for plan in ("data=8", "tensor=2", "tensor=2d:4")),
    *((n, "data=4 tensor=2 microbatches=2") for n in UNDER_ALL if SUBJECTS[n].blocks),
    *((n, "zero=3 remat=block") for n in UNDER_ALL if SUBJECTS[n].blocks),
]


@pytest.mark.full(
    "linen_backwards-zero=3 microbatches=2",
    "linen_norm_drop-data=1 microbatches=1",
    "linen_norm_drop-data=4 tensor=2 zero=3",
    "nnx_llama-tensor=2d:4 microbatches=2 remat=dots",
)
@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *MORE] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, f"{plan} unroll=layers")


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=1 microbatches=1", "zero=3 remat=block"])
def test_a_loop_or_none_differs_by_rounding_alone(plan: str) -> None:
    """A GPT's classifier keeps its loop over positions."""
    found = []
    for word in ("layers", "none"):
        program = program_of("cjax_gpt", f"{plan} unroll={word}", wide=False)
        state = begun(program, "cjax_gpt", wide=False)
        found.append(on_host(program.value_and_grad(state, subject("cjax_gpt", wide=False).batches[0])))
    assert_close(found[0], found[1], ROUNDED)


def made(word: str, plan: str = "data=8", name: str = "linen_norm") -> Program:
    model, loss, batch = SUBJECTS[name].make()
    number = 1 if plan.startswith("data=1") else 8
    return cjax.parallelize(model, loss, optax.sgd(0.1), batch, f"{plan} {word}", devices=jax.devices()[:number])


@pytest.mark.parametrize("name", ["linen_norm", "linen_backwards"])
@pytest.mark.parametrize("plan", ["data=8", "data=1 remat=block"])
def test_there_is_no_loop_over_layers(name: str, plan: str) -> None:
    loops = [made(word, plan, name).lower().as_text().count("stablehlo.while") for word in ("unroll=layers", "")]
    assert loops[0] == 0 and loops[1] >= 2


class Recurrent(nn.Module):
    """Over time, with a table of positions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        places = self.param("places", nn.initializers.normal(), (len(x), x.shape[-1]))
        weight = self.param("weight", nn.initializers.normal(), (x.shape[-1], x.shape[-1]))

        def turn(h: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ weight + at[0] + at[1]), None

        return jax.lax.scan(turn, jnp.zeros(x.shape[1:]), (x, places))[0]


def test_loops_over_time_stay() -> None:
    batch = jnp.ones((7, 4, 3))
    program = cjax.parallelize(
        Recurrent(), lambda model, x: jnp.square(model(x)).mean(), optax.sgd(0.1), batch, "data=1 unroll=layers",
        devices=jax.devices()[:1],
    )  # fmt: skip
    assert "stablehlo.while" in program.lower().as_text()


def test_what_is_made_again_is_not_merged_with_what_was_made() -> None:
    """In a loop nothing would be; without one XLA sees both."""
    texts = []
    for word in ("unroll=layers", "unroll=none"):
        program = made(f"remat=block {word}")
        texts.append(str(make_step(program._composed).trace(*program._inputs).jaxpr))
    assert "prevent_cse=True" in texts[0] and "prevent_cse=True" not in texts[1]


def test_predictions_have_a_loop() -> None:
    """Without a backward pass nothing is saved, and there is nothing to win."""
    of = made("unroll=layers")._composed
    placers = [
        make_placer(of.trace, of.storage, of.plan, of.mesh, of.storage.layout, is_graded=graded)
        for graded in (True, False)
    ]
    assert [placer.unrolls for placer in placers] == [sys.maxsize, 0]


class Shallow(nn.Module):
    """Layers in a stack, of which there may be none."""

    depth: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        kernels = self.param("kernels", nn.initializers.normal(0.1), (self.depth, 24, 24))
        x, _ = jax.lax.scan(lambda x, kernel: (x + jnp.tanh(x @ kernel), None), nn.Dense(24)(x), kernels)
        return nn.Dense(1)(x)


@pytest.mark.full("1")
@pytest.mark.parametrize("depth", [0, 1])
def test_few_layers_or_none(depth: int) -> None:
    losses = []
    for word in ("layers", "none"):
        program = cjax.parallelize(
            Shallow(depth), regression, optax.sgd(0.1), regression_batch(), f"data=8 unroll={word}"
        )
        losses.append(float(program.step(program.init(0), regression_batch())[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_plan_with_it_is_explained() -> None:
    explained = str(made("unroll=layers").explain())
    assert "unroll=layers" in explained


@pytest.mark.parametrize(
    ("plan", "number", "gpus", "apart"),
    [
        ("", 1, True, True),
        ("", 1, False, False),
        ("", 2, True, False),
        ("unroll=none", 1, True, False),
        ("unroll=layers", 2, False, True),
        ("unroll=layers zero=3", 8, True, True),
        ("budget=1GiB", 1, True, False),
        ("offload=optimizer", 1, True, False),
    ],
)
def test_auto_is_for_one_gpu(plan: str, number: int, gpus: bool, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_gpus, "on_gpus", lambda mesh: gpus)
    mesh = build_mesh({"data": number}, jax.devices()[:number])
    assert bool(for_gpus.most_apart(Plan.parse(plan).resolve(number), mesh)) is apart


def test_auto_leaves_many_layers_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second to compile; whoever asks for it gets it."""
    monkeypatch.setattr(for_gpus, "on_gpus", lambda mesh: True)
    monkeypatch.setattr(for_gpus, "MOST", 1)
    assert "stablehlo.while" in made("", "data=1").lower().as_text()
    assert "stablehlo.while" not in made("unroll=layers", "data=1").lower().as_text()


def test_one_gpu_is_enough_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mesh, and not of what is here: no word asks for it."""
    monkeypatch.setattr(for_gpus, "on_gpus", lambda mesh: True)
    assert "stablehlo.while" not in made("", "data=1").lower().as_text()
    assert "stablehlo.while" in made("unroll=none", "data=1").lower().as_text()
    assert "stablehlo.while" in made("").lower().as_text(), "on eight"
