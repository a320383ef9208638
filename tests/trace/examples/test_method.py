"""Losses that are methods of their model, and statistics that a loss hands to the model again."""

import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax

RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(16, 6)).astype(np.float32),
    "y": RANDOM.normal(size=(16, 3)).astype(np.float32),
    "m": (RANDOM.random(16) < 0.6).astype(np.float32),
}


class Base(nnx.Module):
    """Predictions, normed by a module's own statistics or not at all."""

    def __init__(self, normed: bool, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=False, rngs=rngs) if normed else None

    def made(self, batch: Any) -> jax.Array:
        x = self.linear(batch["x"])
        return x if self.norm is None else self.norm(x)

    def errors(self, batch: Any) -> jax.Array:
        return ((self.made(batch) - batch["y"]) ** 2).mean(-1)

    def centred(self, batch: Any) -> jax.Array:
        x = self.made(batch)
        return x - x.mean(0)


class Helped(Base):
    def loss(self, batch: Any) -> jax.Array:
        return ((self.centred(batch) - batch["y"]) ** 2).mean()


class Centred(Base):
    def loss(self, batch: Any) -> jax.Array:
        x = self.made(batch)
        return ((x - x.mean(0) - batch["y"]) ** 2).mean()


class RootBeside(Base):
    def loss(self, batch: Any) -> jax.Array:
        errors = self.errors(batch)
        return errors.mean() + jnp.sqrt((errors * batch["m"]).sum() / batch["m"].sum())


class Mean(Base):
    def loss(self, batch: Any) -> jax.Array:
        return self.errors(batch).mean()


class Masked(Base):
    def loss(self, batch: Any) -> jax.Array:
        return (self.errors(batch) * batch["m"]).sum() / batch["m"].sum()


class LinenCentred(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Dense(3)(batch["x"])
        return ((x - x.mean(0) - batch["y"]) ** 2).mean()


def program(model: Any, loss: Callable[..., Any], plan: str = "data=4 microbatches=2") -> cjax.Program:
    devices = jax.devices()[:4]
    return cjax.parallelize(model, loss, optax.sgd(0.1), BATCH, plan, devices=devices)


def by_method(model: Any, batch: Any) -> jax.Array:
    return model.loss(batch)


def penalised(model: Any, batch: Any) -> jax.Array:
    return 2 * model.loss(batch) + 0.1 * (model.linear.kernel[...] ** 2).sum()


@pytest.mark.parametrize("kind", [Centred, RootBeside, Helped])
@pytest.mark.parametrize("loss", [by_method, penalised])
def test_a_method_that_computes_the_loss_is_the_loss(kind: type[Base], loss: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="looks at the examples together"):
        program(kind(False, nnx.Rngs(0)), loss)
    program(kind(False, nnx.Rngs(0)), loss, "data=4 microbatches=2 loss=microbatch")


def test_a_call_that_computes_the_loss_is_the_loss() -> None:
    with pytest.raises(ValueError, match="looks at the examples together"):
        program(LinenCentred(), lambda model, batch: model(batch))


@pytest.mark.parametrize("kind", [Mean, Masked])
def test_means_in_a_method_are_those_of_the_batch(kind: type[Base]) -> None:
    model = kind(False, nnx.Rngs(0))
    run = program(model, by_method)
    found = float(run.step(run.init(0, params=nnx.state(model, nnx.Param)), BATCH)[1]["loss"])
    assert found == pytest.approx(float(model.loss(BATCH)), rel=1e-5)


@pytest.mark.parametrize("kind", [Mean, Masked])
def test_modules_that_a_method_calls_keep_their_own_statistics(kind: type[Base]) -> None:
    report = str(program(kind(True, nnx.Rngs(0)), by_method).report())
    assert "BatchNorm" in report


def test_a_term_that_a_model_hands_out_is_no_loss() -> None:
    """A router's balance, beside a loss that is made of what the model predicts."""

    class Balanced(Base):
        def __call__(self, batch: Any) -> tuple[jax.Array, jax.Array]:
            x = self.made(batch)
            return x, (x.mean(0) ** 2).sum()

    def loss(model: Any, batch: Any) -> jax.Array:
        x, balance = model(batch)
        return ((x - batch["y"]) ** 2).mean() + 0.01 * balance

    assert "is a batch of its own" in " ".join(str(program(Balanced(False, nnx.Rngs(0)), loss).report()).split())


def test_random_streams_are_no_state_that_a_loss_reads() -> None:
    class Dropped(Base):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(False, rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, batch: Any) -> jax.Array:
            return self.dropout(self.made(batch))

    def loss(model: Any, batch: Any) -> jax.Array:
        return ((model(batch) - batch["y"]) ** 2).mean()

    assert "which each micro-batch changes" not in str(program(Dropped(nnx.Rngs(0)), loss).report())


def test_what_a_model_hands_out_may_be_centred_in_it() -> None:
    """Its loss is made of that outside of it."""

    class Out(Base):
        def __call__(self, batch: Any) -> jax.Array:
            x = self.made(batch)
            return x - x.mean(0)

    program(Out(False, nnx.Rngs(0)), lambda model, batch: ((model(batch) - batch["y"]) ** 2).mean())


class Neighbours(nn.Module):
    """Each example sees another of the batch, by its number."""

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Dense(3)(batch["x"])
        return x + x[batch["next"]]


def test_which_of_the_others_a_row_sees_is_of_the_batch() -> None:
    batch = BATCH | {"next": np.roll(np.arange(16), 1).astype(np.int32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return ((model(batch) - batch["y"]) ** 2).mean()

    with pytest.raises(ValueError, match="Examples of the batch meet each other"):
        cjax.parallelize(Neighbours(), loss, optax.sgd(0.1), batch, "data=4 microbatches=2", devices=jax.devices()[:4])


@pytest.mark.full("zero=3 microbatches=4")
@pytest.mark.parametrize("plan", ["data=1 microbatches=2", "data=4 microbatches=2", "zero=3 microbatches=4"])
def test_the_report_says_what_sees_less_than_the_batch(plan: str) -> None:
    devices = jax.devices()[: 1 if plan.startswith("data=1") else 4]
    run = cjax.parallelize(Mean(True, nnx.Rngs(0)), by_method, optax.sgd(0.1), BATCH, plan, devices=devices)
    said = " ".join(str(run.report()).split())
    number = plan[-1]
    assert f"each of {number} micro-batches is a batch of its own: the loss is another than with microbatches=1" in said
    assert "to BatchNorm" in said
    plain = cjax.parallelize(Mean(False, nnx.Rngs(0)), by_method, optax.sgd(0.1), BATCH, plan, devices=devices)
    assert "a batch of its own" not in str(plain.report())


class Codebook(nn.Module):
    """Shifted by a running mean: of the batches before this one, or of no more than itself."""

    reads: bool

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Dense(3)(batch["x"])
        mean = self.variable("state", "mean", jnp.zeros, 3)
        old = mean.value
        if not self.is_initializing():
            mean.value = 0.9 * old + 0.1 * jax.lax.stop_gradient(x).mean(0)
        return x - old if self.reads else nn.Dropout(0.1, deterministic=False)(x)


@pytest.mark.parametrize("reads", [True, False])
def test_the_report_says_what_changes_between_micro_batches(reads: bool) -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return ((model(batch) - batch["y"]) ** 2).mean()

    said = " ".join(str(program(Codebook(reads), loss).report()).split())
    assert ("mean, which each micro-batch changes: it is another than with microbatches=1" in said) is reads
    assert "which each micro-batch changes" not in str(program(Codebook(reads), loss, "data=4").report())


def stepped(model: Base, batch: Any) -> jax.Array:
    """After one step on these examples (MAML: Finn et al., 2017)."""
    graph, params = nnx.split(model)

    def inner(params: Any) -> jax.Array:
        return nnx.merge(graph, params).errors(batch).mean()

    return inner(jax.tree.map(lambda a, b: a - 0.3 * b, params, jax.grad(inner)(params)))


def test_weights_after_a_step_on_the_batch_are_the_batch_s() -> None:
    with pytest.raises(ValueError, match="looks at the examples together") as error:
        program(Base(False, nnx.Rngs(0)), stepped)
    assert "transpose(jvp()) (" not in str(error.value)
    program(Base(False, nnx.Rngs(0)), stepped, "data=4")
    program(Base(False, nnx.Rngs(0)), lambda model, batch: model.errors(batch).mean())


def test_a_module_in_a_function_is_known_by_its_class() -> None:
    """`RootBeside` as a loss that is no method, from the same code."""
    code = RootBeside.loss.__code__
    free = types.FunctionType(code.replace(co_qualname="free", co_name="free"), globals(), "free")
    with pytest.raises(ValueError, match="looks at the examples together"):
        program(Base(False, nnx.Rngs(0)), free)
