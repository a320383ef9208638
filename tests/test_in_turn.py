"""Weights that layers gather in the first micro-batch, and sums of gradients that they reduce in the last, as programs
for GPUs do: models train as their authors train them, and each layer gathers and reduces its own."""

import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from contract import SUBJECTS, UNDER_ALL, assert_close, assert_trained_alike, begun, on_host, program_of, subject
from large import audited, waited_for
from zoo import case, regression, regression_batch

import cjax
from cjax.gradients import build
from cjax.jax_compat.backends import keeps_behind_barriers
from cjax.jax_compat.core import Jaxpr
from cjax.mesh import build_mesh
from cjax.plan import Plan
from cjax.program import Program
from cjax.program.steps import make_step
from cjax.sharding.place import for_gpus
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import open_bodies

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
SUMS, GATHERS = ("psum", "psum_invariant", "reduce_scatter"), ("all_gather", "all_gather_invariant")


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "works_in_turn", lambda plan, mesh: plan.unroll != "none")


class Twice(nn.Module):
    """Two stacks of layers: of one, each layer has weights of its own; those of the other run twice."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(24)(x)
        own, again = ([nn.Dense(24, name=f"{name}_{i}") for i in range(3)] for name in ("own", "again"))
        for layer in own:
            x = x + nn.tanh(layer(x))
        for layer in (*again, *again):
            x = x + jnp.sin(layer(x))
        return nn.Dense(1)(x)


SUBJECTS |= {"linen_twice": case("linen", lambda _: Twice(), regression, regression_batch, blocks=(3, 6))}
PLANS = [
    "data=8 microbatches=2",
    "microbatches=2 zero=1 remat=block",
    "data=4 tensor=2 microbatches=4 zero=2",
    "data=4 tensor=2 microbatches=4 overlap=2",
    "data=8 zero=1/2 microbatches=2 unroll=layers",
    "data=2 tensor=2d:4 microbatches=2 zero=1",
]
PAIRS = [
    ("linen_scan", "data=4 tensor=2 microbatches=4 zero=2"),
    ("linen_twice", "data=8 microbatches=2"),
    ("nnx_llama", "microbatches=2 zero=1 remat=block"),
]
MORE = [(name, plan) for name in UNDER_ALL if SUBJECTS[name].blocks or SUBJECTS[name].scanned for plan in PLANS]


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.full("linen_scan-data=4 tensor=2 microbatches=4 zero=2")
@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *sorted({*MORE} - {*PAIRS})] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


LOW = [
    ("linen_twice", "data=8 zero=1 microbatches=2"),
    ("linen_twice", "data=4 tensor=2 zero=2 microbatches=4 remat=block"),
    ("linen_twice", "data=8 zero=1 microbatches=1 reduce=bfloat16"),
    ("linen_twice", "data=4 tensor=2 zero=1 microbatches=4 overlap=2"),
    ("linen_scan", "data=8 zero=2/2 microbatches=2"),
    ("nnx_scan", "data=8 zero=1 microbatches=2 remat=dots"),
    ("cjax_t5", "data=8 zero=1 microbatches=2"),
    ("linen_decoder", "data=8 zero=1 microbatches=2 unroll=layers"),
]


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.full(*(f"{name}-{plan}" for name, plan in LOW[2:]))
@pytest.mark.parametrize(("name", "plan"), LOW)
def test_in_16_bits_numbers_are_those_of_one_turn_for_all(
    name: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are rounded before they are gathered, sums are made in float32 and in the same order, and reduced in the
    dtype that the plan says."""
    found = []
    for is_in_turn in (True, False):
        monkeypatch.setattr(build, "works_in_turn", lambda plan, mesh, which=is_in_turn: which)
        program = program_of(name, f"{plan} precision=bfloat16", wide=False)
        state = begun(program, name, wide=False)
        found.append(on_host(program.value_and_grad(state, subject(name, wide=False).batches[0])))
    assert_close(found[0], found[1], (1e-6, 1e-7))


def made(plan: str, name: str = "linen_twice") -> Program:
    model, loss, batch = SUBJECTS[name].make()
    return cjax.parallelize(model, loss, optax.sgd(0.1), batch, plan)


def in_layers(program: Program) -> tuple[int, int]:
    """How many arrays, numbers aside, a step gathers, and adds up over devices, in a turn of a loop over layers."""

    def count(jaxpr: Jaxpr, names: tuple[str, ...], depth: int = 0) -> int:
        found = 0
        for eqn in jaxpr.eqns:
            arrays = [out for out in eqn.outvars if out.aval.ndim]
            found += len(arrays) if depth and name_of(eqn) in names else 0
            found += sum(count(body, names, depth + (name_of(eqn) == "scan")) for body in open_bodies(eqn))
        return found

    jaxpr = make_step(program._composed).trace(*program._inputs).jaxpr.jaxpr
    return count(jaxpr, GATHERS), count(jaxpr, SUMS)


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize(
    ("plan", "gathers", "sums"),
    [
        ("data=8 microbatches=2", 0, 2),
        ("data=4 tensor=2 microbatches=4 zero=1 precision=bfloat16", 2, 2),
    ],
)
def test_each_layer_works_on_its_own(plan: str, gathers: int, sums: int) -> None:
    """A kernel and a bias. Of layers that run twice none does: each run would add all that was summed up before."""
    assert in_layers(made(plan)) == (gathers, sums)
    assert in_layers(made(f"{plan} unroll=none")) == (0, 0)


@pytest.mark.usefixtures("as_on_gpus")
def test_the_noise_scale_has_its_parts() -> None:
    """They are the gradients of single micro-batches, and one that is added up as it is made is never there alone."""
    model, loss, batch = SUBJECTS["linen_twice"].make()
    program = cjax.parallelize(model, loss, optax.sgd(0.1), batch, "data=8 microbatches=2", measure_noise=True)
    assert in_layers(program) == (0, 0)
    assert jnp.isfinite(program.step(program.init(0), batch)[1]["noise_scale"])


@pytest.mark.parametrize(
    ("plan", "number", "gpus", "is_new", "expected"),
    [
        ("microbatches=2", 8, True, True, True),
        ("microbatches=2", 8, False, True, False),
        ("microbatches=2 unroll=none", 8, True, True, False),
        ("microbatches=2", 1, True, True, False),
        ("microbatches=2", 8, True, False, False),
    ],
)
def test_it_is_for_several_gpus(
    plan: str, number: int, gpus: bool, is_new: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(for_gpus, "on_gpus", lambda mesh: gpus)
    monkeypatch.setattr(for_gpus, "keeps_behind_barriers", lambda: is_new)
    mesh = build_mesh({"data": number}, jax.devices()[:number])
    assert for_gpus.works_in_turn(Plan.parse(plan).resolve(number), mesh) is expected


# -- compiled for GPUs that are absent --------------------------------------------------------------------------------
WIDTH = 2048
LAYER = 4 * WIDTH**2  # bytes of a matrix in float32


@pytest.mark.aot
@pytest.mark.full("gpt-data=2 tensor=4 zero=2 microbatches=4-50331648")
@pytest.mark.skipif(not keeps_behind_barriers(), reason="this XLA would keep two micro-batches at a time")
@pytest.mark.parametrize(
    ("name", "plan", "sums"),
    [
        ("gpt", "data=2 tensor=4 zero=2 microbatches=4", 3 * LAYER),
        ("own", "data=8 zero=1 microbatches=1 reduce=float32 remat=block", 19 * LAYER),
    ],
)
def test_layers_are_sent_beside_what_is_computed(name: str, plan: str, sums: int) -> None:
    """At least a third of what data-parallel devices wait for is gone, for the room of two layers' sums and of one
    layer's weights in 16 bits, which are on their way. The last forward pass, which reads no sums, is not computed
    ahead of the others."""
    moved, waited, peak = {}, {}, {}
    for word in ("none", "auto"):
        facts, devices, _ = audited(name, f"{plan} precision=bfloat16 unroll={word}", WIDTH, 4, 2048, "h100:8")
        assert facts.memory is not None
        moved[word], waited[word], peak[word] = facts.moved(), waited_for(facts, devices, "data")[1], facts.memory.peak
    assert waited["auto"] <= 0.67 * waited["none"], waited
    assert moved["auto"] == pytest.approx(moved["none"], rel=1e-3)
    assert peak["auto"] <= peak["none"] + 2.5 * sums, peak
