"""Evaluation by a walk: the numbers of one program, and no more on the devices than a layer and the next."""

import functools
import gc
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alive import alive
from contract import no_compilation, source_of, subject
from starts import begin

import cjax
from cjax.plan import Plan
from cjax.plan.sizes import num_bytes
from cjax.planner.choice.homes import TooLittle
from cjax.program import Given, Program
from cjax.program.compose import compose
from cjax.walk.stores import MovedRows

pytestmark = pytest.mark.usefixtures("settled")

AWAY = "data=2 offload=params"
# Unrolled and scanned, Linen and NNX, two stacks, tied embeddings, frozen layers, packed weights, a masked mean, aux.
NAMES = [
    *("linen_masked_mean", "linen_encoder_decoder", "nnx_scan"),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("linen_scan", "linen_packed_qkv", "linen_part_frozen")),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("nnx_encoder", "cjax_t5")),
]


@functools.cache
def program_of(name: str, plan: str) -> Program:
    """In float64 and without an optimizer, on two devices."""
    devices = jax.devices()[:2]
    return Program(compose(Given(source_of(name, True), None), Plan.parse(plan).resolve(2), devices))


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 100), found, wanted)


@pytest.mark.full("linen_encoder_decoder", "nnx_scan")
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_gives_the_numbers_of_one_program(name: str) -> None:
    with jax.enable_x64(True):
        walks, plain = program_of(name, AWAY), program_of(name, "data=2")
        state, other, batches = begin(walks), begin(plain), subject(name, True).batches
        tolerance = 1e-6 if name == "cjax_t5" else 1e-9
        assert_same(walks.evaluate(state, batches), plain.evaluate(other, batches), tolerance)


# -- a stack of its own, cheap to compile, whose layers are large beside what goes through them -----------------------
LAYERS, WIDTH, ROWS = 6, 32, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(2 * WIDTH, name="up")(x)))


class Tower(nn.Module):
    """Embedding, layers, head; `num` says how many of the layers."""

    @nn.compact
    def __call__(self, x: jax.Array, num: int = LAYERS) -> jax.Array:
        x = nn.Dense(WIDTH, name="first")(x)
        for i in range(num):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(3, name="head")(x)


def squared(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def rows(num: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(num, 5)).astype(np.float32),
        "y": rng.normal(size=(num, 3)).astype(np.float32),
    }


@functools.cache
def tower(plan: str, optimizer: bool = False) -> tuple[Program, Any]:
    adam = optax.adam(1e-2) if optimizer else None
    program = cjax.parallelize(Tower(), squared, adam, rows(), plan, devices=jax.devices()[:2])
    return program, begin(program)


def both(plan: str, function: Any, batch: Any = None, tolerance: float = 1e-5) -> Any:
    batch = [rows(), rows(5, 1)] if batch is None else batch
    found, wanted = (program.evaluate(state, batch, function) for program, state in (tower(plan), tower("data=2")))
    assert_same(found, wanted, tolerance)
    return found


@pytest.mark.full("data=2 offload=optimizer", "data=2 zero=3 offload=params", "tensor=2 offload=params")
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=3 offload=params",
        "tensor=2 offload=params",
        "data=2 microbatches=4 offload=params+activations",
        "data=2 offload=optimizer",
    ],
)
def test_every_plan_that_walks_gives_the_same(plan: str) -> None:
    wanted = tower("data=2")[0].evaluate(tower("data=2")[1], [rows(), rows(5, 1)])
    assert_same(tower(plan)[0].evaluate(tower(plan)[1], [rows(), rows(5, 1)]), wanted, 1e-5)


@pytest.mark.full
def test_a_function_of_the_model_is_walked_through_too() -> None:
    def results(model: Any, batch: Any) -> Any:
        y = model(batch["x"])
        return {"y": y, "most": y.max(), "sum": cjax.Mean(y.sum(), 2.0)}

    found = both(AWAY, results)
    assert found["y"].shape == (ROWS + 5, 3)
    # Under micro-batches it sees its batch whole all the same: what is largest in a part is not what is in the batch.
    both("data=2 microbatches=4 offload=params+activations", results, rows(7, 2))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_function_may_look_at_what_a_walk_has_room_for(layers: int) -> None:
    both(AWAY, lambda model, batch: model(batch["x"], layers) + batch["x"].sum())


def weights(model: Any, batch: Any) -> Any:
    found = [model.variables["params"][f"block_{i}"]["up"]["kernel"] for i in range(LAYERS)]
    return {"norm": sum(jnp.sum(w * w) for w in found), "first": found[0].mean() + batch["x"].sum()}


def twice(model: Any, batch: Any) -> Any:
    return model(batch["x"]) * model(batch["x"] + 1)


@pytest.mark.full("<lambda>", "twice")
@pytest.mark.parametrize("function", [weights, twice, lambda model, batch: model(batch["x"], LAYERS - 1)])
def test_a_function_that_takes_many_layers_at_once_is_refused_unless_they_are_there(function: Any) -> None:
    program, state = tower(AWAY)
    with pytest.raises(ValueError, match=r"`fn` reads those of . layers at once.*program.params.*program.replan"):
        program.evaluate(state, rows(), function)
    both("data=2 offload=optimizer", function)


@pytest.mark.full
def test_other_parameters_are_scored_in_place_of_the_states() -> None:
    (program, state), (plain, other) = tower(AWAY), tower("data=2")
    # A weight that no layer has, and one of a layer, as arrays of the host and of the devices.
    given = jax.tree.map(lambda x: np.asarray(x) * np.float32(0.5), plain.params(other))
    given["block_3"] = jax.tree.map(jnp.asarray, given["block_3"])
    before = program.evaluate(state, rows())
    assert_same(program.evaluate(state, rows(), params=given), plain.evaluate(other, rows(), params=given), 1e-5)
    assert program.evaluate(state, rows())["loss"] == before["loss"]
    with pytest.raises(ValueError, match="these params are of another model"):
        program.evaluate(state, rows(), params={"first": given["first"]})
    found = program.value_and_grad(state, rows(), given), plain.value_and_grad(other, rows(), given)
    assert_same(found[0], jax.tree.map(np.asarray, found[1]), 1e-4)


def test_nothing_is_compiled_again_and_two_layers_are_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    program, state = tower(AWAY)
    wanted, seen, fetch = float(program.evaluate(state, [rows(), rows()])["loss"]), [], MovedRows.fetch
    gc.collect()
    before = alive()

    def watched(self: MovedRows, layer: int) -> Any:
        row = fetch(self, layer)
        seen.append(alive() - before)
        return row

    monkeypatch.setattr(MovedRows, "fetch", watched)
    with no_compilation():
        assert float(program.evaluate(state, [rows(), rows()])["loss"]) == wanted
    layer = 4 * (2 * WIDTH * 2 * WIDTH + 3 * WIDTH)
    assert len(seen) == 2 * 2 * LAYERS and layer <= max(seen) < 2.5 * layer
    gc.collect()
    assert alive() == before


@pytest.mark.full("at once")
@pytest.mark.parametrize(
    "function", [None, lambda model, batch: model(batch["x"], 1).mean()], ids=["in turn", "at once"]
)
def test_what_a_pass_needs_is_held_against_the_budget(function: Any) -> None:
    plain, _ = tower("data=2")
    program = plain.replan("data=2 budget=128KiB", jax.devices()[:2])
    state = begin(program)
    found = program.evaluate(state, rows(), function)
    assert_same(found, plain.evaluate(plain.restore(state), rows(), function), 1e-5)
    # So many that the batch alone is too much: a CPU's compiler may hide what a program takes in a library's call.
    many = rows(16384)
    with pytest.raises(TooLittle, match=r"to score 16384 rows at once .*give batches of fewer rows, about") as error:
        program.evaluate(state, many, function)
    enough = re.search(r'program.replan\("([^"]*)"\)', str(error.value))
    assert enough
    larger = plain.replan(enough[1], jax.devices()[:2])
    larger.evaluate(larger.restore(state), many, function)
    exact = re.search(r"budget=(\w+)", enough[1])
    assert exact
    less = plain.replan(enough[1].replace(exact[0], f"budget={int(0.97 * num_bytes('budget', exact[1]))}B"))
    with pytest.raises(TooLittle, match=r"replan.*offload=params"):
        less.evaluate(less.restore(state), many, function)
