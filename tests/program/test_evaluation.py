from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from starts import begin

import cjax

from .conftest import assert_same, make, on_host, refusal, rows


def score(batches: list[Any]) -> float:
    """The mean over all rows, as the model's author would have it."""
    program = make("data=1", optimizer=None, devices=jax.devices()[:1])
    model = program.model(begin(program))
    return float(np.concatenate([((model(b["x"]) - b["y"]) ** 2).ravel() for b in batches]).mean())


RAGGED = [rows(8, 1), rows(5, 2), rows(16, 3)]


class Loader:
    def __iter__(self) -> Any:
        return iter(RAGGED)


@pytest.mark.full("list")
@pytest.mark.parametrize("batches", [RAGGED, tuple(RAGGED), Loader()], ids=["list", "tuple", "loader"])
def test_the_mean_over_batches_of_any_sizes_is_exact(evaluator: cjax.Program, batches: Any) -> None:
    state = begin(evaluator)
    np.testing.assert_allclose(evaluator.evaluate(state, batches)["loss"], score(RAGGED), rtol=1e-5)


def test_one_batch_and_a_generator(evaluator: cjax.Program) -> None:
    state = begin(evaluator)
    np.testing.assert_allclose(evaluator.evaluate(state, rows())["loss"], score([rows()]), rtol=1e-5)
    given = (batch for batch in RAGGED)
    np.testing.assert_allclose(evaluator.evaluate(state, given)["loss"], score(RAGGED), rtol=1e-5)
    assert "no batch" in refusal(lambda: evaluator.evaluate(state, given))


@pytest.mark.parametrize("batches", [[], (), iter(())])
def test_no_batch_is_refused(evaluator: cjax.Program, batches: Any) -> None:
    assert "give at least one" in refusal(lambda: evaluator.evaluate(begin(evaluator), batches))


def test_what_is_no_batch_is_refused(evaluator: cjax.Program) -> None:
    state = begin(evaluator)
    assert "saw x, y" in refusal(lambda: evaluator.evaluate(state, {"x": rows()["x"]}))
    assert "saw x, y" in refusal(lambda: evaluator.evaluate(state, [rows(), {"x": rows()["x"]}]))
    assert "not an int" in refusal(lambda: evaluator.evaluate(state, 3), TypeError)


def test_a_function_of_the_model_gives_means_and_arrays(evaluator: cjax.Program) -> None:
    def results(model: Any, batch: Any) -> Any:
        y = model(batch["x"])
        return {"y": y, "mean": batch["x"].mean(), "sum": cjax.Mean(batch["x"].sum(), 1.0)}

    state = begin(evaluator)
    given = [{"x": batch["x"]} for batch in RAGGED[:2]]  # without labels: a function may want another batch
    x = np.concatenate([batch["x"] for batch in given])
    found = evaluator.evaluate(state, given, fn=results)
    assert_same(on_host(found["y"]), on_host(evaluator.model(state)(x)), 1e-5)
    np.testing.assert_allclose(found["mean"], x.mean(), rtol=1e-4)
    np.testing.assert_allclose(found["sum"], sum(batch["x"].sum() for batch in given) / 2, rtol=1e-4)
    alone = evaluator.evaluate(state, given[0], fn=lambda model, batch: model(batch["x"]))
    assert_same(on_host(alone), on_host(found["y"][:8]), 1e-5)


def test_other_parameters_are_scored_in_place_of_the_states(evaluator: cjax.Program) -> None:
    state = begin(evaluator)
    before = on_host(evaluator.params(state))
    zeros = jax.tree.map(np.zeros_like, before)
    np.testing.assert_allclose(
        evaluator.evaluate(state, rows(), params=zeros)["loss"], (rows()["y"] ** 2).mean(), rtol=1e-5
    )
    assert_same(before, evaluator.params(state))


def test_other_parameters_that_do_not_fit_are_listed(evaluator: cjax.Program) -> None:
    state = begin(evaluator)
    wrong = on_host(evaluator.params(state))
    wrong["Dense_0"]["bias"] = np.zeros(4, np.float32)
    wrong["Dense_7"] = wrong.pop("Dense_1")
    message = refusal(lambda: evaluator.evaluate(state, rows(), params=wrong))
    for text in ("Dense_1/kernel: float32[5, 16] is missing", "Dense_7/bias: not known", "float32[4] given, float32[3"):
        assert text in message


def test_evaluation_gives_up_nothing(program: cjax.Program) -> None:
    state = begin(program)
    first = program.evaluate(state, rows())
    assert_same(first, program.evaluate(state, rows()))
    program.step(state, rows())


def test_a_loss_that_knows_its_rows_by_heart_is_scored_on_so_many() -> None:
    """How it adds up can't be read off another number of rows, so batches count by theirs."""

    def loss(model: Any, batch: Any) -> Any:
        return (((model(batch["x"]) - batch["y"]) ** 2).sum(-1) * np.arange(8)).mean()

    given = [rows(8, 1), rows(8, 2)]
    program = make("data=1", loss=loss, optimizer=None, devices=jax.devices()[:1], batch=given[0])
    state = begin(program)
    model = program.model(state)
    np.testing.assert_allclose(
        program.evaluate(state, given)["loss"], np.mean([loss(model, batch) for batch in given]), rtol=1e-5
    )


def test_a_masked_mean_beside_the_loss_is_that_of_all_batches() -> None:
    """By rows it would not be: the batches hide different shares of theirs."""

    def errors(model: Any, batch: Any) -> tuple[Any, Any]:
        error, mask = jnp.square(model(batch["x"])[:, 0] - batch["y"]), batch["mask"]
        same = (error * mask).sum() / mask.sum()
        guarded = 2 * (error * mask).sum() / jnp.maximum(mask.sum(), 1.0)
        pair = cjax.Mean((error * mask).sum(), mask.sum())
        return same, {"guarded": guarded, "mean": error.mean(), "pair": pair, "same": same, "shifted": 1 - guarded / 4}

    random = np.random.default_rng(0)
    batches = [
        {"x": random.normal(size=(num, 4)), "y": random.normal(size=num), "mask": (random.random(num) < share) * 1.0}
        for num, share in ((8, 0.9), (8, 0.2), (3, 0.7))
    ]
    batches[1]["mask"][:] = [1, 0, 0, 0, 0, 0, 0, 0]
    batches = [jax.tree.map(lambda x: x.astype(np.float32), batch) for batch in batches]
    program = cjax.parallelize(nn.Dense(1), errors, optax.sgd(0.1), batches[0], "data=8")
    state = program.init(0)
    found = program.evaluate(state, batches)
    variables = {"params": program.params(state)}
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    loss, aux = errors(lambda x: nn.Dense(1).apply(variables, x), whole)
    aux["pair"] = aux["pair"].total / aux["pair"].weight
    assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert {name: float(value) for name, value in found["aux"].items()} == pytest.approx(
        {name: float(value) for name, value in aux.items()}, rel=1e-5
    )


def guarded(model: Any, batch: Any) -> tuple[Any, Any]:
    error, mask = jnp.square(model(batch["x"])[:, 0]), batch["mask"]
    mean = (error * mask).sum() / jnp.maximum(mask.sum(), 1.0)
    return error.mean(), {"shifted": 1 - mean}


def test_a_batch_without_weight_counts_nothing() -> None:
    """Though its author's guard makes a number of it."""
    batches = [{"x": np.full((8, 4), i, np.float32), "mask": np.full(8, i < 2, np.float32)} for i in (1, 2)]
    program = cjax.parallelize(nn.Dense(1), guarded, optax.sgd(0.1), batches[0], "data=8")
    state = program.init(0)
    both, alone = (program.evaluate(state, some)["aux"]["shifted"] for some in (batches, batches[:1]))
    assert float(both) == pytest.approx(float(alone), rel=1e-6)


def test_batches_whose_numbers_mean_other_things_are_not_added() -> None:
    """A masked mean of eight rows, and of one row a plain mean."""

    def loss(model: Any, batch: Any) -> Any:
        error, mask = jnp.square(model(batch["x"])[:, 0]), batch["mask"]
        return error.mean() if len(error) == 1 else (error * mask).sum() / mask.sum()

    batches = [{"x": np.ones((num, 4), np.float32), "mask": np.ones(num, np.float32)} for num in (8, 1)]
    program = cjax.parallelize(nn.Dense(1), loss, optax.sgd(0.1), batches[0], "data=8")
    state = program.init(0)
    assert "a batch of 1 rows" in refusal(lambda: program.evaluate(state, batches))
    assert program.evaluate(state, batches[1])["loss"] >= 0
