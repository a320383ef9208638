import collections
from pathlib import Path

import flax.linen as nn
import numpy as np
import optax
import pytest

import cjax

from .conftest import Net, assert_same, make, on_host, refusal, rows


class Renamed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="last")(nn.relu(nn.Dense(16, name="first")(x)))


class Two(nn.Module):
    """Layers of one size, so that only their names tell them apart."""

    names: tuple[str, str]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5, name=self.names[1])(nn.Dense(5, name=self.names[0])(x))[:, :3]


@pytest.fixture(scope="module")
def saved(program: cjax.Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "two"
    state = program.init(0)
    for seed in range(2):
        state, _ = program.step(state, rows(seed=seed))
    program.save(path, state)
    return path


def test_a_checkpoint_goes_on_under_any_plan_as_if_nothing_had_been(
    program: cjax.Program, other_plan: cjax.Program, saved: Path
) -> None:
    state = program.init(0)
    for seed in range(2):
        state, _ = program.step(state, rows(seed=seed))
    _, wanted = program.step(state, rows(seed=2))
    for each, tolerance in ((program, 0), (other_plan, 1e-5)):
        again = each.restore(saved)
        assert again.step == 2
        _, metrics = each.step(again, rows(seed=2))
        assert_same(on_host(metrics), on_host(wanted), tolerance)


def test_evaluation_takes_what_was_trained(program: cjax.Program, evaluator: cjax.Program, saved: Path) -> None:
    state = program.restore(saved)
    wanted = program.evaluate(state, rows())["loss"]
    for source in (saved, state):
        assert_same(evaluator.evaluate(evaluator.restore(source), rows())["loss"], wanted, 1e-6)


def test_an_untrained_optimizer_is_not_made_up(program: cjax.Program, evaluator: cjax.Program, tmp_path: Path) -> None:
    state = evaluator.init(0)
    evaluator.save(tmp_path / "c", state)
    assert "only the model has       opt_state/0/count" in refusal(lambda: program.restore(tmp_path / "c"))
    message = refusal(lambda: program.restore(state))
    assert "this state's opt_state" in message and "0/mu/Dense_0/kernel: float32[16, 3] is missing" in message
    whole = program.init(0, params=evaluator.params(state))  # what to do instead
    assert_same(on_host(program.params(whole)), on_host(evaluator.params(state)))


OTHERS = {
    "wider": (dict(model=Net(24)), "Dense_0/kernel", "float32[16, 3] given, float32[24, 3] needed"),
    "renamed": (dict(model=Renamed()), "last/kernel", "Dense_0/kernel: not known here"),
    "optimizer": (dict(optimizer=optax.sgd(0.1, momentum=0.9)), "0/trace/Dense_0/kernel", "mu/Dense_0/bias: not known"),
    "wrt": (dict(wrt="Dense_0"), "Dense_1/kernel", "Dense_1/bias: not known here"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_model_is_refused_with_every_difference(
    program: cjax.Program, saved: Path, name: str
) -> None:
    changes, leaf, said = OTHERS[name]
    other = make("data=8 zero=1", **changes)
    message = refusal(lambda: other.restore(program.init(0)))
    assert leaf in message and said in message and "of another model, optimizer or `wrt`" in message
    message = refusal(lambda: other.restore(saved))
    assert leaf in message and f"cjax inspect {saved}" in message


def test_leaves_are_told_by_name_not_by_order() -> None:
    one, other = (make("data=8", model=Two(names)) for names in (("a", "b"), ("b", "a")))
    state = one.init(0)
    params = on_host(one.params(state))
    taken = on_host(other.params(other.restore(state)))
    assert_same(taken["a"], params["a"])
    assert not np.array_equal(params["a"]["kernel"], params["b"]["kernel"])
    backwards = collections.OrderedDict((name, params[name]) for name in ("b", "a"))
    assert_same(on_host(one.params(one.init(1, params=backwards))), params)
    assert_same(one.evaluate(one.init(1), rows(), params=backwards), one.evaluate(state, rows()))
    third = make("data=8", model=Two(("a", "c")))
    message = refusal(lambda: third.restore(state))
    assert "c/kernel: float32[5, 5] is missing" in message and "b/kernel: not known here" in message


def test_damaged_missing_and_misplaced_checkpoints_are_named(program: cjax.Program, tmp_path: Path) -> None:
    assert str(tmp_path / "no") in refusal(lambda: program.restore(tmp_path / "no"), FileNotFoundError)
    (tmp_path / "notes").write_text("mine")
    state = program.init(0)
    assert "name another folder" in refusal(lambda: program.save(tmp_path / "notes", state), FileExistsError)
    assert (tmp_path / "notes").read_text() == "mine"
    program.save(tmp_path / "c", state)
    victim = max((f for f in (tmp_path / "c").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    message = refusal(lambda: program.restore(tmp_path / "c"))
    assert "is damaged" in message and "nothing was restored" in message
    assert program.step(state, rows())[0].step == 1
    for wrong in (3, {"params": 1}):
        assert "path of a checkpoint or a state" in refusal(lambda wrong=wrong: program.restore(wrong), TypeError)


def test_a_state_of_another_model_is_not_taken_for_one_of_this(program: cjax.Program, tmp_path: Path) -> None:
    """What `save` wrote would say this program's plan, and `model` would be half of each."""
    other = make("data=8", model=Net(width=24))
    state = other.init(0)
    for call in (program.params, program.model, lambda state: program.save(tmp_path / "c", state)):
        message = refusal(lambda call=call: call(state))
        assert "bias: float32[24] given, float32[16] needed" in message
    assert not (tmp_path / "c").exists()
    mine = program.replan("data=2 tensor=4").init(0)
    assert_same(program.params(mine), program.params(program.init(0)))
