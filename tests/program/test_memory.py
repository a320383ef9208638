"""A plan that does not fit is refused before its first step, with plans that do."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import cjax
from cjax.planner.hardware import hardware_of
from cjax.program import OutOfMemory

from .conftest import Net, assert_same, make, on_host, rows

WIDTH = 4096  # parameters outweigh activations


@pytest.fixture(scope="module")
def wide() -> cjax.Program:
    return make("data=8", model=Net(WIDTH))


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_limit(memory: int) -> None:
        monkeypatch.setattr(
            "cjax.planner.choice.decide.hardware_of",
            lambda devices: dataclasses.replace(hardware_of(devices), memory=memory),
        )

    return set_limit


def refused(program: cjax.Program) -> tuple[OutOfMemory, Any]:
    state = program.init(0)
    with pytest.raises(OutOfMemory) as raised:
        program.step(state, rows())
    return raised.value, state


def test_a_plan_that_fits_not_is_refused_with_plans_that_do(wide: cjax.Program, limit: Callable[[int], None]) -> None:
    plans = ("data=8", "zero=1", "zero=3")
    need, less, split = (wide.replan(plan).report().memory for plan in plans)
    assert split.total < less.total < need.total
    limit(split.total)
    tight = wide.replan(wide.plan)
    error, state = refused(tight)
    with pytest.raises(OutOfMemory):
        tight.compile()
    assert error.report.memory.total == need.total and error.report.memory.limit == split.total
    assert isinstance(error, MemoryError)
    fitting = [candidate.plan for candidate in error.alternatives.candidates]
    assert 1 <= len(fitting) <= 3 and all("zero=3" in plan or "tensor=8" in plan for plan in fitting)
    assert all(candidate.report.memory.total <= split.total for candidate in error.alternatives.candidates)
    text = str(error)
    assert text.startswith("plan 'data=8' does not fit.\nOVER ") and f'These fit: plan="{fitting[0]}"' in text
    assert all(word in text for word in ("params", "grads", "optimizer", "activations"))

    before = on_host(tight.params(state))  # nothing is lost: what is typed next goes on from here
    other = tight.replan(fitting[0])
    other.compile()
    assert "_step" in vars(other), "before the first batch"
    state = other.restore(state)
    assert_same(on_host(other.params(state)), before)
    state, metrics = other.step(state, rows())
    assert state.step == 1 and metrics["skipped"] == 0


def test_it_is_refused_as_often_as_it_is_tried_and_compiles_once(
    wide: cjax.Program, limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(1000)
    tight = wide.replan(wide.plan)
    outcomes = itertools.cycle(["refused", tight.report()])  # or too large as well
    tried: list[str] = []
    monkeypatch.setattr(tight, "_try", lambda plan: tried.append(plan) or next(outcomes))
    for _ in range(2):
        error, _ = refused(tight)
        assert error.alternatives.candidates == []
        assert "use more devices, a smaller batch, or a smaller model" in str(error)
    assert len(tried) == len(set(tried)) * 2 > 0 and str(wide.plan) not in tried


def test_what_fits_is_not_refused(wide: cjax.Program, limit: Callable[[int], None]) -> None:
    limit(wide.report().memory.total)
    same = wide.replan(wide.plan)
    assert same.report().memory.fits
    state, _ = same.step(same.init(0), rows())
    assert state.step == 1
