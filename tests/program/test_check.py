"""What `check` and `verify=True` find, and what they let pass: faults are planted where cjax could have them."""

import dataclasses
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starts import begin

import cjax
from cjax.program import compose as composition
from cjax.program import verify
from cjax.program.check import TF32, Outcome, compare
from cjax.program.reference import has_tf32, narrowest, perturbed
from cjax.trace.microbatches import part

from .conftest import loss, make, rows

PARTS = "data=4 tensor=2 microbatches=2"


def masked(model: Any, batch: Any) -> jax.Array:
    """A mean over some rows: its micro-batches are not worth the same."""
    counts = batch["y"][:, 0] > 0.3
    return (jnp.square(model(batch["x"])).sum(-1) * counts).sum() / counts.sum()


class Drop(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(16)(x)))


class Tracking(nn.Module):
    """What it remembers of its inputs takes the micro-batches in order, and moves nothing else."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(5))
        if train and not self.is_initializing():
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        return nn.Dense(3)(x)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x)))


def masked_in_training(model: Any, batch: Any, train: bool) -> Any:
    value = masked(lambda x: model(x, train), batch)
    return value, {"mean": batch["y"].mean()}


def with_fault(program: cjax.Program, factor: float) -> cjax.Program:
    """The program with one gradient that is so many times too large."""

    def gradients(*args: Any) -> Any:
        graded = program._composed.gradients(*args)
        first, *rest = graded.grads
        return dataclasses.replace(graded, grads=(first * factor, *rest))

    return cjax.Program(dataclasses.replace(program._composed, gradients=gradients))


def test_a_wrong_factor_is_found_and_named(program: cjax.Program) -> None:
    state = begin(program)
    wrong = with_fault(program, 2.0)
    found = wrong.check(wrong.restore(state), rows())
    assert not found.ok and found.worst == "Dense_0/bias" and [each.name for each in found.wrong] == ["Dense_0/bias"]
    assert found.wrong[0].factor == pytest.approx(2) and found.error > 1e3
    assert "DIFFERS from one device" in str(found) and "2 times as large" in str(found)


def test_the_reference_is_the_undivided_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches on one device would lose the weight of this mean too, and agree."""
    right = make(PARTS, loss=masked)
    found = right.check(begin(right), rows())
    assert found.ok and found.reference == "one device", str(found)
    monkeypatch.setattr(part, "lift", lambda trace, *_, **__: trace)
    wrong = make(PARTS, loss=masked)
    found = wrong.check(begin(wrong), rows())
    assert not found.ok and "loss" in [each.name for each in found.wrong]
    assert found.loss[0] != pytest.approx(found.loss[1], rel=1e-3)


@pytest.mark.full("dropout")
@pytest.mark.parametrize("model", [Drop(), Normed()], ids=["dropout", "batch norm"])
def test_what_micro_batches_have_of_their_own_is_compared_with_theirs(model: nn.Module) -> None:
    program = make(PARTS, model=model, loss=masked_in_training)
    found = program.check(begin(program), rows())
    assert found.ok and "in the same 2 micro-batches" in str(found), str(found)
    assert {each.name for each in found.differences} >= {"loss", "aux/mean", "Dense_0/kernel"}
    assert ("BatchNorm_0" in found.reference) == isinstance(model, Normed)


def test_statistics_that_take_micro_batches_in_order_are_not_held_against_a_batchs() -> None:
    changes: Any = {"model": Tracking(), "loss": lambda model, batch, train: loss(lambda x: model(x, train), batch)}
    program = make("data=8 microbatches=2", batch=rows(16), **changes)
    found = program.check(begin(program), rows(16))
    assert found.ok and found.reference == "one device", str(found)
    assert "Dense_0/kernel" in {each.name for each in found.differences}


@pytest.mark.full("float16")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_low_precision_is_no_alarm_and_no_excuse(precision: str) -> None:
    # A factor that overflows: looked at with a smaller one.
    scale = cjax.optim.LossScale(initial=2.0**32) if precision == "float16" else None
    program = make(f"data=8 precision={precision}", loss_scale=scale)
    state = begin(program)
    found = program.check(state, rows())
    assert found.ok and found.error > 1e-3, str(found)
    wrong = with_fault(program, 1.5)
    assert wrong.check(wrong.restore(state), rows()).worst == "Dense_0/bias"


def test_a_plan_is_verified_before_the_first_step_on_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, check = [], verify.check_plan
    monkeypatch.setattr(verify, "check_plan", lambda *args: seen.append(args) or check(*args))
    program = make("data=4 tensor=2", batch=rows(32), verify=True)
    state, _ = program.step(begin(program), rows(32))
    program.step(state, rows(32))
    assert isinstance(program.verified, cjax.program.Check) and program.verified.ok
    assert [jax.tree.leaves(args[2])[0].shape[0] for args in seen] == [8]
    assert "verified: data=4 tensor=2: agrees with one device" in str(program.report())


def test_a_plan_that_computes_otherwise_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    true = composition.build_gradients

    def faulty(loss: Any, *rest: Any) -> Any:
        built = true(loss, *rest)

        def doubled(*args: Any) -> Any:
            graded = built.gradients(*args)
            return dataclasses.replace(graded, grads=(graded.grads[0] * 2, *graded.grads[1:]))

        return dataclasses.replace(built, gradients=doubled) if loss.plan.tensor.size > 1 else built

    monkeypatch.setattr(composition, "build_gradients", faulty)
    program = make("data=4 tensor=2", verify=True)
    state = begin(program)
    for call in (program.step, program.value_and_grad):
        with pytest.raises(cjax.MismatchError) as raised:
            call(state, rows())
        assert not [said for said in ("Dense_0/bias", "2 times", 'plan="data=-1"') if said not in str(raised.value)]
    assert raised.value.agreed == ("data=-1",) and int(state.step) == 0


def test_numbers_of_the_host_are_told_from_a_wrong_plan() -> None:
    """Of a loss that draws them each trace is another, so that no plan agrees with anything."""
    rng = np.random.default_rng(0)

    def number(model: Any, batch: Any) -> Any:
        return loss(model, batch) * rng.random()

    def numbers(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) * jnp.asarray(rng.random((3,)), jnp.float32)).mean()

    for drawn in (number, numbers):
        program = make("data=8", loss=drawn, verify=True)
        with pytest.raises(cjax.MismatchError, match="Nor does it compute the same twice.*draw from `key`") as raised:
            program.step(begin(program), rows())
        assert "to the authors" not in str(raised.value) and raised.value.agreed == ()


def test_a_model_too_large_for_one_device_is_trained_unverified_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(verify.hardware_of(jax.devices()), memory=20)
    monkeypatch.setattr(verify, "hardware_of", lambda devices: small)
    monkeypatch.setattr(verify, "reference_of", lambda composed: pytest.fail("nothing is compiled for it"))
    program = make("data=8", verify=True)
    state = begin(program)
    program.step(state, rows())
    assert isinstance(program.verified, str) and "does not fit one device" in str(program.report())
    with pytest.raises(MemoryError, match="does not fit one device"):
        program.check(begin(program), rows())


def test_gradients_at_other_parameters(program: cjax.Program) -> None:
    state, other = begin(program), program.params(program.init(1))
    given = program.value_and_grad(state, rows(), params=other)
    wanted = program.value_and_grad(program.init(1), rows())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), given, wanted)
    with pytest.raises(ValueError, match="these params are of another model"):
        program.value_and_grad(state, rows(), params={"w": np.ones(3)})


def outcomes(*grads: Any, loss: float = 1.0) -> list[Outcome]:
    return [Outcome(loss, {}, {"w": np.asarray(each)}) for each in grads]


def test_numbers_that_are_not_finite_or_not_real_are_compared_too() -> None:
    right, wrong = np.array([1 + 1j, 2.0]), np.array([1 - 1j, 2.0])
    assert compare("p", *outcomes(right, right), (), 4).ok
    assert compare("p", *outcomes(wrong, right), (), 4).worst == "w"
    assert "it is zero" in str(compare("p", *outcomes(0 * right, right), (), 4))
    nan = np.array([np.nan, 2.0])
    assert not compare("p", *outcomes(nan, np.array([1.0, 2.0])), (), 4).ok
    both = compare("p", *outcomes(nan, nan, loss=float("nan")), (), 4)
    assert not both.ok and {each.name for each in both.wrong} == {"loss", "w"} and "DIFFERS" in str(both)


def test_rounding_excuses_what_it_does_and_no_factor() -> None:
    right = np.ones(100)
    near, far = right * (1 + 1e-4), right * 1.5
    shaken = Outcome(1.0, {}, {"w": right * (1 + 1e-4)})
    assert not compare("p", *outcomes(near, right), (), 4).ok
    assert compare("p", *outcomes(near, right), [shaken], 4).ok
    wild = Outcome(1.0, {}, {"w": -right})
    assert not compare("p", *outcomes(far, right), [wild], 2).ok


def test_products_that_a_card_rounds_are_compared_as_such() -> None:
    """float32 goes through a matmul with 10 bits on such cards, unless more is asked for."""

    def of(precision: Any, dtype: Any = jnp.float32) -> int:
        def twice(x: jax.Array) -> jax.Array:
            return jax.jit(lambda x: jnp.dot(x, x, precision=precision))(x) + 1

        return narrowest(jax.make_jaxpr(twice)(jnp.ones((3, 3), dtype)).jaxpr, tf32=True)

    assert [of(None), of("default"), of("highest"), of(None, jnp.bfloat16)] == [TF32, TF32, 4, 2]
    sums = jax.make_jaxpr(lambda x: x.sum())(jnp.ones(3)).jaxpr
    assert [narrowest(sums, tf32=True), narrowest(jax.make_jaxpr(jnp.dot)(1.0, 2.0).jaxpr)] == [4, 4]
    cards = [types.SimpleNamespace(platform=platform, compute_capability=chip) for platform, chip in CARDS]
    assert [has_tf32(card) for card in (*cards, jax.devices()[0])] == [False, True, True, False, False]
    right = np.ones(100)
    shaken = Outcome(1.0, {}, {"w": np.asarray(perturbed({"w": jnp.ones(100)}, TF32)["w"], np.float64)})
    near, far = right * (1 + 1.5e-3), right * 1.5
    assert [compare("p", *outcomes(x, right), [shaken], TF32).ok for x in (near, far)] == [True, False]


CARDS = [("gpu", "7.0"), ("gpu", "8.0"), ("gpu", "10.0"), ("gpu", "gfx942")]


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = x + nn.Dense(5)(nn.relu(x))
        return x


def contrast(model: Any, batch: Any) -> jax.Array:
    z = model(batch["x"])
    return jnp.square(z @ z.T - jnp.eye(len(z))).mean()


@pytest.mark.full
def test_plans_that_share_a_trace_do_not_share_derivatives_traced_within_a_mesh() -> None:
    """relu's, which is custom, is traced in the pipeline's region first."""
    program = make("pipeline=gpipe:2 data=1", model=Deep(), loss=contrast, devices=jax.devices()[:2])
    state = begin(program)
    loss, grads = program.value_and_grad(state, rows())
    other = program.replan("tensor=2")
    given = other.value_and_grad(other.restore(state), rows())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), given, (loss, grads))
    assert program.check(state, rows()).ok


def blended(model: Any, batch: Any, train: bool) -> Any:
    """A masked mean beside a mean, whose micro-batches divide by weights of the whole batch; and a sum."""
    value, _ = masked_in_training(model, batch, train)
    return value + jnp.square(model(batch["x"], train)).mean(), {"sum": batch["y"].sum()}


@pytest.mark.full
def test_means_and_ratios_that_are_put_together() -> None:
    program = make(PARTS, model=Drop(), loss=blended)
    found = program.check(begin(program), rows())
    assert found.ok and "in the same 2 micro-batches" in str(found), str(found)
    plain = make(PARTS, model=Drop(), loss=lambda model, batch: blended(model, batch, False))
    found = plain.check(begin(plain), rows())
    assert found.ok and found.reference == "one device", str(found)


def test_micro_batches_that_are_batches_of_their_own() -> None:
    program = make(f"{PARTS} loss=microbatch", loss=contrast)
    found = program.check(begin(program), rows())
    assert found.ok and "(loss=microbatch)" in found.reference, str(found)
