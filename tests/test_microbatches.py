"""Micro-batches give what the whole batch gives, in values, gradients, aux and state; or are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import cjax

R = np.random.default_rng(0)
BATCH = {
    "x": R.normal(size=(16, 5, 6)).astype("float32"),
    "y": R.integers(0, 4, (16, 5)).astype("int32"),
    "m": (R.random((16, 5)) < np.linspace(0.2, 1, 16)[:, None]).astype("float32"),
    "square": R.normal(size=(16, 16)).astype("float32"),
}
BATCH["m"][:, 0] = 1
PLANS = ["data=1 microbatches=2", "data=4 microbatches=2", "data=4 microbatches=2 zero=2", "data=2 microbatches=8",
         "data=1 microbatches=16", "data=2 tensor=2 microbatches=2"]  # fmt: skip


def cross_entropies(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["x"])
    return logits, optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def blended(model: Any, batch: Any) -> Any:
    """A masked mean, a z-loss, and aux of every kind that can be put together."""
    logits, losses = cross_entropies(model, batch)
    weight = batch["m"].sum()
    loss = (losses * batch["m"]).sum() / weight + 0.1 * (jax.nn.logsumexp(logits, -1) ** 2).mean()
    right = logits.argmax(-1) == batch["y"]
    aux = {"accuracy": (right * batch["m"]).sum() / weight, "tokens": weight, "mean": right.mean()}
    return loss, aux


def run(plan: str, loss: Any, model: Any = None) -> Any:
    sizes = [int(word.split("=")[1]) for word in plan.split() if word.startswith(("data", "tensor"))]
    devices = jax.devices()[: int(np.prod(sizes))]
    return cjax.parallelize(model or nn.Dense(4), loss, optax.sgd(0.1), BATCH, plan, devices=devices)


@pytest.fixture(scope="module")
def whole() -> Any:
    program = run("data=1", blended)
    state, metrics = program.step(program.init(0), BATCH)
    return metrics, program.params(state)


@pytest.mark.full("data=2 microbatches=8", "data=2 tensor=2 microbatches=2", "data=4 microbatches=2 zero=2")
@pytest.mark.parametrize("plan", PLANS)
def test_a_ratio_and_a_mean_are_those_of_the_whole(plan: str, whole: Any) -> None:
    program = run(plan, blended)
    state, metrics = program.step(program.init(0), BATCH)
    for key in ("loss", "aux"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), metrics[key], whole[0][key])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), program.params(state), whole[1])


class Target(nnx.Module):
    """Counts its calls, and follows its own weights, as a target network does."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.online = nnx.Linear(6, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))
        self.target = nnx.Variable(jnp.ones((6, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        self.target[...] = 0.9 * self.target[...] + 0.1 * self.online.kernel[...]
        return self.online(x) - x @ self.target[...] / self.calls[...]


def square(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


@pytest.mark.full
def test_what_a_model_counts_moves_once_a_step() -> None:
    found = []
    for plan in ("data=1", "data=1 microbatches=2", "data=2 microbatches=4", "data=1 microbatches=2 loss=microbatch"):
        program = run(plan, square, lambda rngs: Target(rngs))
        state = program.init(0)
        for _ in range(2):
            state, metrics = program.step(state, BATCH)
        model = program.model(state)
        found.append((metrics["loss"], model.calls[...], model.target[...]))
    for other in found[1:3]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), other, found[0])
    assert found[3][1] == 4  # each micro-batch a batch of its own


class Drawing(nnx.Module):
    """Counts its calls, and draws."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.drop = nnx.Linear(6, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls, self.mean = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        y = self.drop(self.linear(x))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * y.mean((0, 1))
        return y / self.calls[...]


@pytest.mark.full
def test_what_was_drawn_is_counted_once_a_step() -> None:
    """As many numbers of each stream whatever the plan; each micro-batch has its own by its index."""
    for plan in ("data=1", "data=1 microbatches=2", "data=2 microbatches=4"):
        program = run(plan, square, lambda rngs: Drawing(rngs))
        state, _ = program.step(program.init(0), BATCH)
        model = program.model(state)
        assert (int(model.drop.rngs.count[...]), float(model.calls[...])) == (1, 1)
        found = program.check(program.restore(state), BATCH)
        assert found.ok and ("micro-batches" in found.reference) == ("microbatches" in plan), str(found)


class Corrected(nnx.Module):
    """A running mean of examples that knows how often it was updated."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(6, 4, rngs=rngs)
        self.calls, self.mean = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.calls[...] = self.calls[...] + 1
        self.mean[...] = self.mean[...] + (y.mean((0, 1)) - self.mean[...]) / self.calls[...]
        return y


def test_statistics_that_read_a_counter_are_refused() -> None:
    with pytest.raises(ValueError, match="mean of the examples and of calls"):
        run("data=1 microbatches=2", square, lambda rngs: Corrected(rngs))
    run("data=1 microbatches=2 loss=microbatch", square, lambda rngs: Corrected(rngs))


def rolled(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]) * jnp.roll(batch["m"], 1, 0)[..., None]).mean()


@pytest.mark.parametrize("plan", ["data=1 microbatches=2", "data=2 microbatches=2 zero=2"])
def test_a_loss_that_looks_at_other_rows_is_refused_by_name(plan: str) -> None:
    with pytest.raises(ValueError, match=r"jnp\.roll.*loss=microbatch"):
        run(plan, rolled)


def test_each_micro_batch_may_be_a_batch_of_its_own() -> None:
    program = run("data=2 microbatches=2 loss=microbatch", rolled)
    assert str(program.plan) == "data=2 microbatches=2 loss=microbatch"
    state = program.init(0)
    value, _ = program.value_and_grad(state, BATCH)
    model = nn.Dense(4).bind({"params": jax.tree.map(np.asarray, program.params(state))})
    own = [rolled(model, jax.tree.map(lambda x, i=i: x[i::2], BATCH)) for i in range(2)]
    np.testing.assert_allclose(value, np.mean(own), rtol=1e-5)
    assert program.check(state, BATCH)


@pytest.mark.parametrize("plan", ["data=8", "data=2 microbatches=2"])
def test_a_weight_that_is_trained_is_refused_and_one_that_is_counted_is_not(plan: str) -> None:
    """Gradients are those of the total alone, which total / weight would not have."""

    def gated(model: Any, batch: Any, cut: Any = lambda weight: weight) -> Any:
        y = model(batch["x"])
        gates = jax.nn.sigmoid(y[..., 0])
        return cjax.Mean((gates * y[..., 1]).sum(), cut(gates).sum())

    with pytest.raises(ValueError, match=r"The weight of a cjax.Mean .* depends on .*stop_gradient\(weight\)"):
        run(plan, gated)
    for cut in (jax.lax.stop_gradient, lambda gates: (gates > 0.5).astype("float32")):
        run(plan, lambda model, batch, cut=cut: gated(model, batch, cut))


def test_a_mean_that_is_refused_is_not_told_to_be_one() -> None:
    with pytest.raises(ValueError, match=r"The total of the loss looks at .* Use microbatches=1, or write loss=micro"):
        run("data=1 microbatches=2", lambda model, batch: cjax.Mean(model(batch["x"]).var(), 1.0))


def test_rows_known_by_heart_are_refused() -> None:
    for loss in (
        lambda model, batch: (batch["square"] @ model(batch["x"]).sum(1)).mean(),
        lambda model, batch: (model(batch["x"]).sum((1, 2)) * np.arange(16)).mean(),
    ):
        with pytest.raises(ValueError, match="knows how many rows"):
            run("data=1 microbatches=2", loss)


def only_on(*rows: int) -> Any:
    """A loss whose author checks the number of rows, and says nothing where it is another."""

    def loss(model: Any, batch: Any) -> jax.Array:
        if len(batch["x"]) not in rows:
            raise AssertionError  # as a bare `assert` does where pytest adds no words to it
        return model(batch["x"]).mean()

    return loss


def test_a_bare_assertion_about_rows_is_explained() -> None:
    with pytest.raises(ValueError, match=r"not on one of 2 micro-batches of it: AssertionError\. .*x\.shape\[0\]"):
        run("data=1 microbatches=2", only_on(16))
    with pytest.raises(ValueError, match=r"does not run on 32 \(AssertionError\).*x\.shape\[0\]"):
        cjax.parallelize(nn.Dense(4), only_on(16), optax.sgd(0.1), BATCH, "data=8", measure_noise=True)


def test_aux_that_cannot_be_put_together_is_refused() -> None:
    def loss(model: Any, batch: Any) -> Any:
        y = model(batch["x"])
        return (y**2).mean(), {"largest": y.max()}

    with pytest.raises(ValueError, match="Aux value 'largest'"):
        run("data=1 microbatches=2", loss)
