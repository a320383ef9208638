"""How a program is composed: what is captured once, what plans decide, and what "auto" chooses."""

import collections
import dataclasses
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
from cjax.planner.choice import planning as planning_module
from cjax.planner.hardware import hardware_of
from cjax.program.steps import make_init

ROWS = 16


class Net(nn.Module):
    """6 layers of 64: 25,345 parameters."""

    num_layers: int = 6

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.num_layers):
            x = x + jnp.tanh(nn.Dense(64)(x))
        return nn.Dense(1)(x)


def loss(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch(num_rows: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32)
    return {"x": x, "y": x[:, :1]}


def make(plan: Any = "auto", **changes: Any) -> cjax.Program:
    arguments: dict[str, Any] = dict(model=Net(), loss=loss, optimizer=optax.adam(1e-2), batch=batch())
    return cjax.parallelize(**{**arguments, **changes}, plan=plan)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much memory a device has."""

    def set_limit(memory: int) -> None:
        def limited(devices: Any) -> Any:
            return dataclasses.replace(hardware_of(devices), memory=memory)

        monkeypatch.setattr("cjax.planner.choice.decide.hardware_of", limited)

    return set_limit


# -- auto -------------------------------------------------------------------------------------------------------------
def sizes(**changes: Any) -> list[float]:
    """Bytes a device by arithmetic, by ZeRO stage."""
    planning = make("data=8", **changes)._composed.planning
    return [planning.score(cjax.Plan(data=8, zero=stage)).bytes for stage in range(4)]


@pytest.mark.full("1")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_auto_takes_the_least_zero_stage_that_fits_and_says_so(limit: Callable[[int], None], stage: int) -> None:
    found = sizes()
    # Without micro-batches the second saves nothing: gradients are in parts before the optimizer reads them anyway.
    assert found[0] > found[1] >= found[2] > found[3]
    limit({0: int(2 * found[0]), 1: int(found[0]) - 1, 3: int(found[2]) - 1}[stage])
    program = make()
    assert program.plan == cjax.Plan(data=8, zero=stage)
    note = program._composed.notes[0]
    assert note.startswith(f"auto chose {program.plan}: the least arithmetic and bytes moved of ")
    assert "plans that fit" in note and "iB" in note and "how fast a cpu is nobody has measured" in note


def test_auto_turns_to_the_leanest_plan_where_none_fits_and_says_so(limit: Callable[[int], None]) -> None:
    limit(1000)
    program = make(batch=batch(64))
    note = program._composed.notes[0]
    assert "it may not fit" in note and "the leanest of" in note
    planning = program._composed.planning
    best, plain = (planning.score(plan) for plan in (program.plan, cjax.Plan(data=8, zero=3, remat="block")))
    assert best.bytes <= plain.bytes


def test_auto_without_an_optimizer_counts_none(limit: Callable[[int], None]) -> None:
    limit(int(1.3 * sizes(optimizer=None)[0]))
    assert make(optimizer=None).plan.zero_stage == 0
    assert make().plan.zero_stage > 0


@pytest.mark.full
def test_what_auto_chose_is_in_the_report_and_trains() -> None:
    program = make()
    assert program.plan == cjax.Plan(data=8)
    assert any("auto chose data=8" in line for line in program.report().watch)
    state, metrics = program.step(program.init(0), batch())
    assert state.step == 1 and metrics["skipped"] == 0
    again = program.replan("auto", jax.devices()[:4])
    assert str(again.plan) == "data=4"


def test_words_behind_auto_are_fixed() -> None:
    assert str(make("auto precision=bfloat16 microbatches=2").plan) == "data=8 microbatches=2 precision=bfloat16"
    assert make("auto data=4").plan.pipeline.size == 2, "nothing else takes two devices for a copy of this model"
    with pytest.raises(ValueError, match="tensor=2 splits no weights of this model"):
        make("auto tensor=2")
    assert str(make().replan("auto zero=1").plan) == "data=8 zero=1"


def test_auto_splits_the_model_where_the_rows_are_too_few_and_refuses_what_nothing_shares() -> None:
    program = make(batch=batch(6))
    assert 6 % program.plan.data == 0 and program.plan.num_devices == 8 and program.plan.model_size > 1
    with pytest.raises(
        ValueError, match=r"no plan shares 6 rows over 8 devices.* Use 8 rows, .*devices\(\)\[:6\].*leave out"
    ):
        make("auto tensor=1 pipeline=1", batch=batch(6))


def test_auto_leaves_a_loss_whole_that_micro_batches_cannot_make() -> None:
    """A loss of all pairs of examples can't be put together from micro-batches, also where these are asked for."""

    def pairs(model: Any, batch: Any) -> Any:
        made = model(batch["x"])
        return (jnp.abs(made - made.T) * batch["y"]).mean()

    program = make("auto", loss=pairs)
    assert program.plan.microbatches == 1
    with pytest.raises(ValueError):
        make("auto microbatches=2", loss=pairs)


@pytest.mark.full
def test_a_plan_that_compiled_is_over_makes_room_for_the_next(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where arithmetic says that it fits by a hair, the compiled step is asked before a program is made."""
    honest = planning_module.memory_of

    def too_low(*args: Any) -> Any:
        found = honest(*args)
        return dataclasses.replace(found, **{use: 0.6 * size for use, size in vars(found).items()})

    monkeypatch.setattr(planning_module, "memory_of", too_low)
    limit(int(1.02 * sizes()[0]))
    program = make()
    assert program.plan != cjax.Plan(data=8) and program.report().memory.fits
    notes = program._composed.notes
    assert notes[0].startswith("auto chose data=8:") and any("data=8 is compiled to" in note for note in notes)


# -- composition ------------------------------------------------------------------------------------------------------
def test_nothing_compiles_until_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile = jax.stages.Lowered.compile

    def counted(lowered: Any, *args: Any, **options: Any) -> Any:
        compiled.append(lowered)
        return compile(lowered, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    program = make("data=8 zero=1")
    str(program.trace), repr(program)
    state = program.init(0)
    assert not compiled
    for _ in range(3):
        state, _ = program.step(state, batch())
    program.report()
    program.lower()
    assert len(compiled) == 1


def test_a_model_is_captured_once_whatever_the_plans() -> None:
    built: list[int] = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            built.append(x.shape[0])
            return nn.Dense(1)(x)

    program = make("data=8", model=Counted())
    assert built == [ROWS, ROWS], "once for its init, once for the loss"
    program.replan("zero=3").lower()
    assert len(built) == 2
    program.replan("zero=3 microbatches=2")
    assert built[2] == ROWS // 2
    assert make("data=8", model=Counted())._composed.capture is not program._composed.capture
    assert program.replan("zero=3")._composed.capture is program._composed.capture


@pytest.mark.parametrize("plan", ["data=8 zero=3", "auto"])
def test_the_users_python_runs_once_before_a_step(plan: str) -> None:
    """Tracing is what depth costs before the first step, and most of it is the user's own Python."""
    calls: collections.Counter[str] = collections.Counter()
    adam = optax.adam(1e-2)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    def scored(model: Any, batch: Any) -> Any:
        calls["loss"] += 1
        return loss(model, batch)

    def build(rngs: nnx.Rngs) -> nnx.Linear:
        calls["build"] += 1
        return nnx.Linear(64, 1, rngs=rngs)

    optimizer = optax.GradientTransformation(counted("init", adam.init), counted("update", adam.update))
    program = make(plan, model=build, loss=scored, optimizer=optimizer)
    program.lower()
    state, _ = program.step(program.init(0), batch())
    assert calls == {"build": 1, "loss": 1, "init": 1, "update": 1}
    program.replan("zero=2").lower()
    assert (calls["build"], calls["loss"]) == (1, 1)


@pytest.mark.full("data=8")
@pytest.mark.parametrize("plan", ["data=8", "zero=3 data=2 tensor=4"])
def test_a_program_has_no_more_operations_for_more_layers(plan: str) -> None:
    def num_operations(depth: int) -> tuple[int, int]:
        program = make(plan, model=Net(depth))
        init = make_init(program._composed).lower(jax.eval_shape(lambda: jax.random.key(0)))
        return program.lower().as_text().count(" = "), init.as_text().count(" = ")

    assert num_operations(4) == num_operations(19)


def test_plans_as_text_and_as_objects_are_one() -> None:
    given = ["data=4 tensor=2 zero=1", cjax.Plan(tensor=2, zero=1), cjax.Plan(data=4, tensor=cjax.Tensor(2), zero=1)]
    assert {make(plan).plan for plan in given} == {cjax.Plan.parse("data=4 tensor=2 zero=1")}


@pytest.mark.parametrize(("name", "said"), [("fit", "; there is cjax.train.fit"), ("nothing", "'nothing'")])
def test_a_name_of_another_room_is_said_whole(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'cjax' has no attribute '{name}'") as refused:
        getattr(cjax, name)
    assert str(refused.value).endswith(said)


def test_fewer_devices_by_name() -> None:
    assert make("tensor=2", devices=jax.devices()[:4]).mesh.size == 4
    assert make("tensor=2", devices="cpu:2").mesh.size == 2


def test_the_users_arguments_stay_as_they_are() -> None:
    given = batch()
    kept = {name: array.copy() for name, array in given.items()}
    program = make("data=8 zero=3", batch=given)
    state, _ = program.step(program.init(0), given)
    assert all(np.array_equal(given[name], kept[name]) for name in kept)
    assert state.step == 1


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [(optax.adamw, "the function adamw"), ("adamw", "a str"), (1e-3, "a float")],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, given: str) -> None:
    with pytest.raises(TypeError, match=f"`optimizer` is {given}, not an optax transformation. Write optax.adamw"):
        cjax.parallelize(nn.Dense(1), lambda model, x: model(x).mean(), optimizer, np.ones((8, 2), np.float32))


def test_the_folder_of_what_goes_to_disk(tmp_path: Path) -> None:
    """A plan with `disk=` wants one where it is to run; compiled for devices that are not here, it needs none."""
    plan = "budget=1GiB host=0B disk=1GiB"
    with pytest.raises(ValueError, match="nothing says in which folder: give parallelize disk_folder="):
        make(plan)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        make("zero=1", disk_folder=tmp_path / "file")
    with pytest.raises(TypeError, match="give the path of a folder"):
        make("zero=1", disk_folder=3)
