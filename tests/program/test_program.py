"""A program in use: states that were given up, steps that are not finite, models and batches of every form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax
from cjax.train import NotFiniteError, fit

from .conftest import Net, assert_same, loss, make, on_host, refusal, rows

# -- states -----------------------------------------------------------------------------------------------------------
USES: dict[str, Callable[[cjax.Program, Any], Any]] = {
    "step": lambda program, state: program.step(state, rows()),
    "value_and_grad": lambda program, state: program.value_and_grad(state, rows()),
    "evaluate": lambda program, state: program.evaluate(state, rows()),
    "params": lambda program, state: program.params(state),
    "model": lambda program, state: program.model(state),
    "restore": lambda program, state: program.restore(state),
    "to_arrays": lambda program, state: program.to_arrays(state),
    "check": lambda program, state: program.check(state, rows()),
}


@pytest.fixture(scope="module")
def given_up(program: cjax.Program) -> Any:
    state = program.init(0)
    program.step(state, rows())
    return state


@pytest.mark.parametrize("use", USES)
def test_a_state_that_was_given_up_is_named_and_never_reaches_the_devices(
    program: cjax.Program, given_up: Any, use: str
) -> None:
    message = refusal(lambda: USES[use](program, given_up))
    assert "given up" in message and "state, metrics = program.step(state, batch)" in message
    assert "given up" in repr(given_up)


@pytest.mark.parametrize("use", ["step", "value_and_grad", "evaluate"])
def test_the_state_of_another_program_is_refused_and_can_be_taken_over(
    program: cjax.Program, other_plan: cjax.Program, use: str
) -> None:
    state = program.init(3)
    assert "program.restore(state)" in refusal(lambda: USES[use](other_plan, state))
    assert_same(other_plan.params(other_plan.restore(state)), program.params(state))


@pytest.mark.parametrize("wrong", [None, {"w": 1}, (1, 2)])
def test_what_is_no_state_is_told_where_states_come_from(program: cjax.Program, wrong: Any) -> None:
    message = refusal(lambda: program.step(wrong, rows()), TypeError)
    assert type(wrong).__name__ in message and "program.init(0)" in message


def test_absent_hardware_runs_nothing_and_says_what_does(
    program: cjax.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = program.init(0)
    monkeypatch.setattr("cjax.program.starting.is_compile_only", lambda devices: True)
    calls = {"init": lambda: program.init(0), "step": lambda: program.step(state, rows())}
    for what, call in {**calls, "restore": lambda: program.restore(state)}.items():
        message = refusal(call)
        assert f"{what} needs devices that are here" in message and "report()" in message and "8 x cpu" in message


def test_without_an_optimizer_there_is_evaluation_alone(evaluator: cjax.Program) -> None:
    state = evaluator.init(0)
    value, grads = evaluator.value_and_grad(state, rows())
    for call in (lambda: evaluator.step(state, rows()), lambda: evaluator.update(state, grads)):
        assert "optax.adamw(1e-3)" in refusal(call)
    assert_same(evaluator.evaluate(state, rows())["loss"], value, 1e-6)


def test_what_was_taken_from_a_state_outlives_it(program: cjax.Program) -> None:
    state = program.init(0)
    arrays, params, model = program.to_arrays(state), program.params(state), program.model(state)
    twins = [program.restore(state), program.from_arrays(arrays), program.init(1, params=params)]
    for each in (state, *twins):
        program.step(each, rows())
    assert_same(arrays["params"], params)
    assert_same(model.variables["params"], params)
    assert arrays["step"] == 0 and jax.random.key_data(arrays["key"]).shape == (2,)


# -- steps that are not finite ----------------------------------------------------------------------------------------
def test_a_step_that_is_not_finite_changes_its_number_alone(program: cjax.Program) -> None:
    state, _ = program.step(program.init(0), rows())
    before = on_host(program.to_arrays(state))
    poisoned = rows()
    poisoned["x"][3, 2] = np.nan
    state, metrics = program.step(state, poisoned)
    assert metrics["skipped"] == 1 and np.isnan(metrics["loss"])
    after = on_host(program.to_arrays(state))
    assert (before.pop("step"), after.pop("step")) == (1, 2)
    assert (before["loss_scale"].num_skipped, after["loss_scale"].num_skipped) == (0, 1)
    assert_same(before | {"loss_scale": after["loss_scale"]}, after)
    state, metrics = program.step(state, rows())
    assert metrics["skipped"] == 0 and np.isfinite(metrics["loss"])


def test_fit_stops_there_with_the_last_good_checkpoint_or_goes_on(program: cjax.Program, tmp_path: Path) -> None:
    batches = [rows(seed=i) for i in range(5)]
    batches[3]["y"][0, 0] = np.inf
    with pytest.raises(NotFiniteError, match='step 4 was not finite.*on_nan="skip"') as stopped:
        fit(program, batches, steps=5, folder=tmp_path / "a", checkpoint_every=2, log_every=1)
    assert stopped.value.checkpoint == tmp_path / "a" / "checkpoints" / "2" and str(stopped.value.checkpoint) in str(
        stopped.value
    )
    kept = program.restore(stopped.value.checkpoint)
    assert kept.step == 2
    assert fit(program, batches, steps=5, on_nan="skip").step == 5


def test_gradients_that_are_not_finite_update_nothing(program: cjax.Program) -> None:
    state = program.init(0)
    before = on_host(program.params(state))
    _, grads = program.value_and_grad(state, rows())
    after = program.update(state, jax.tree.map(lambda x: x * np.nan, grads))
    assert_same(before, program.params(after))
    assert "given up" in refusal(lambda: program.params(state))


@pytest.mark.parametrize("wrong", [{"a": np.zeros(3)}, {"Dense_0": {"bias": np.zeros(4)}}])
def test_gradients_of_another_tree_are_listed_and_cost_no_state(program: cjax.Program, wrong: Any) -> None:
    state = program.init(0)
    message = refusal(lambda: program.update(state, wrong))
    assert "Dense_0/kernel: float32[16, 3] is missing" in message
    assert ("a: not known here" in message) != ("Dense_0/bias: float32[4] given, float32[3] needed" in message)
    program.params(state)


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_wrt_leaves_out_stays_as_it_was(stage: int) -> None:
    program = make(f"data=4 tensor=2 zero={stage}", wrt="Dense_0")
    state = program.init(0)
    assert list(program.params(state)) == ["Dense_0"]
    first = on_host(program.model(state).variables["params"])
    state, _ = program.step(state, rows())
    last = program.model(state).variables["params"]
    assert_same(first["Dense_1"], last["Dense_1"])
    assert not np.array_equal(first["Dense_0"]["kernel"], last["Dense_0"]["kernel"])


def test_a_run_goes_on_under_another_plan_and_in_micro_batches(program: cjax.Program, other_plan: cjax.Program) -> None:
    parts = program.replan("data=4 tensor=2 microbatches=2")
    state, _ = program.step(program.init(0), rows())
    losses = []
    for each in (other_plan, parts):
        _, metrics = each.step(each.restore(state), rows(seed=1))
        losses.append(metrics["loss"])
    _, metrics = program.step(state, rows(seed=1))
    np.testing.assert_allclose(losses, [metrics["loss"]] * 2, rtol=1e-5)


def test_batches_may_come_from_a_generator(program: cjax.Program) -> None:
    state = program.init(0)
    for batch in (rows(seed=i) for i in range(3)):
        state, metrics = program.step(state, batch)
    assert state.step == 3 and metrics["loss"].shape == ()


# -- models and losses ------------------------------------------------------------------------------------------------
class Scale(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param("w", nn.initializers.ones, ())


class Slashes(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3, name="a/b")(nn.Dense(16, name="c.d")(x))


class Drop(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(16)(x)))


def sequential(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(5, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 3, rngs=rngs))


def noisy(model: Any, batch: Any, key: Any, train: bool) -> Any:
    noise = 0.1 * train * jax.random.normal(key, (3,))
    return ((model(batch["x"], train) + noise - batch["y"]) ** 2).mean()


def with_aux(model: Any, batch: Any) -> Any:
    error = (model(batch["x"]) - batch["y"]) ** 2
    return cjax.Mean(error.sum(), jnp.float32(error.size)), {
        "rows": cjax.Mean(batch["y"].sum(), 1.0 * len(error)),
        "x": batch["x"].mean(),
    }


MODELS: dict[str, tuple[Any, Any, str]] = {
    "nnx.Sequential": (sequential, loss, "data=4 tensor=2 zero=3"),
    "nn.Sequential": (nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)]), loss, "data=4 tensor=2 zero=1"),
    "one number": (Scale(), lambda model, batch: (model(batch["x"]) ** 2).mean(), "data=4 tensor=2 zero=3"),
    "names with slashes": (Slashes(), loss, "data=8 zero=1"),
    "key and train": (Drop(), noisy, "data=4 tensor=2"),
    "Mean and aux": (Net(), with_aux, "data=4 tensor=2 zero=2 microbatches=2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_losses_of_every_form_train_as_on_one_device(name: str) -> None:
    model, loss, plan = MODELS[name]
    parts = "microbatches=2" if "microbatches" in plan else "data=1"
    ends = []
    for text, devices in ((plan, None), (parts, jax.devices()[:1])):
        program = make(text, model=model, loss=loss, devices=devices)
        state = program.init(0)
        for seed in range(2):
            state, metrics = program.step(state, rows(seed=seed))
        ends.append((on_host(metrics), on_host(program.params(state))))
    assert_same(*ends, 1e-4)


def test_a_parameter_is_found_by_a_name_with_a_slash(tmp_path: Path) -> None:
    program = make("data=8 zero=1", model=Slashes(), loss=loss)
    state = program.init(0, params={"a/b/kernel": np.ones((16, 3))})
    assert_same(program.params(state)["a/b"]["kernel"], np.ones((16, 3)))
    program.save(tmp_path / "c", state)
    assert_same(program.params(program.restore(tmp_path / "c")), program.params(state))


def test_a_loss_left_in_training_mode_is_not_scored() -> None:
    program = make("data=8", model=Drop(), loss=lambda model, batch: model(batch["x"], True).mean(), optimizer=None)
    message = refusal(lambda: program.evaluate(program.init(0), rows()))
    assert "dropout" in message and "def loss(model, batch, train)" in message


def test_check_compares_with_one_device(program: cjax.Program) -> None:
    found = program.check(program.init(0), rows())
    assert found.is_close and "agrees with one device" in str(found)


def test_an_instance_keeps_its_weights_and_gets_them_back() -> None:
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    model.kernel.set_value(jnp.ones((5, 3)))
    program = make("data=8", model=model, optimizer=optax.sgd(0.1))
    state = program.init(7)
    assert_same(program.params(state)["kernel"].get_value(), np.ones((5, 3)))
    state, _ = program.step(state, rows())
    assert_same(model.kernel.get_value(), np.ones((5, 3)))
    nnx.update(model, program.params(state))
    assert not np.array_equal(model.kernel.get_value(), np.ones((5, 3)))


class Fused(nn.Module):
    """Queries, keys and values of one product, over a width that ZeRO's axis does not divide."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (part.reshape(*x.shape[:2], 4, 5) for part in jnp.split(nn.Dense(60)(x), 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return nn.Dense(18)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], 20))


def test_gradients_of_packed_weights_come_out_where_state_is_padded() -> None:
    batch = {name: np.random.default_rng(0).normal(size=(16, 7, 18)).astype(np.float32) for name in "xy"}

    def error(model: Any, batch: Any) -> jax.Array:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    program = cjax.parallelize(Fused(), error, optax.sgd(0.1), batch, "data=4 tensor=2 zero=2")
    state = program.init(0)
    params = jax.tree.map(np.asarray, program.params(state))
    wanted = jax.grad(lambda params: error(Fused().bind({"params": params}), batch))(params)
    _, found = program.value_and_grad(state, batch)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6), wanted, found)
    assert float(program.loss(state, batch)) == pytest.approx(float(program.step(state, batch)[1]["loss"]), rel=1e-6)
