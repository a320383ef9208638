"""What is no batch, no state, no path and no plan, handed to each method: an answer that says what to give."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import cjax

from .conftest import Net, assert_same, loss, make, on_host, refusal, rows

Call = Callable[[cjax.Program, cjax.State, Path], Any]
CASES: dict[str, tuple[Call, type[Exception], str]] = {
    "schedule": (lambda p, s, d: make(schedule="1f1b"), TypeError, "`schedule` is '1f1b'"),
    "loss scale": (lambda p, s, d: make("data=8 precision=float16", loss_scale=3), TypeError, "LossScale("),
    "noise": (lambda p, s, d: make(measure_noise="yes"), TypeError, "True or False"),
    "no devices": (lambda p, s, d: make(devices="cpu:0"), ValueError, '"cpu:8"'),
    "a large seed": (lambda p, s, d: p.init(2**70), ValueError, "64 bits"),
    "a checkpoint": (
        lambda p, s, d: (p.save(d / "c", s), p.init(0, params=d / "c")), FileNotFoundError, "program.restore(path)",
    ),
    "shapes": (lambda p, s, d: p.step(s, shapes()), ValueError, "'x' is a shape without numbers"),
    "no batch": (lambda p, s, d: p.evaluate(s, None), TypeError, "not None"),
    "no rows": (lambda p, s, d: p.evaluate(s, rows(0)), ValueError, "without rows"),
    "rows that differ": (lambda p, s, d: p.evaluate(s, rows() | {"y": rows(4)["y"]}), ValueError, "x 8, y 4"),
    "no function": (lambda p, s, d: p.evaluate(s, rows(), "f"), TypeError, "`fn` is a str"),
    "no path": (lambda p, s, d: p.save(None, s), TypeError, "program.save("),
    "an empty path": (lambda p, s, d: p.save("", s), TypeError, "program.save("),
    "state first": (lambda p, s, d: p.save(s, d), TypeError, "`state` is a"),
    "no arrays": (lambda p, s, d: p.from_arrays(None), ValueError, "program.to_arrays(state)"),
    "other arrays": (lambda p, s, d: p.from_arrays({"params": {}}), ValueError, "a dict of params: give"),
    "one plan": (lambda p, s, d: p.compare(None), TypeError, "compare(["),
    "no class": (lambda p, s, d: s.find_opt_states("adam"), TypeError, "optax.ScaleByAdamState"),
    "a pickled program": (lambda p, s, d: pickle.dumps(p), TypeError, "program.save(path, state)"),
    "a pickled state": (lambda p, s, d: pickle.dumps({"state": s}), TypeError, "a State belongs to the devices"),
    "plans of four": (
        lambda p, s, d: cjax.plans(Net(), loss, p, rows()), TypeError, "plans((model, loss, optimizer, batch), ...)",
    ),
    "devices as text": (lambda p, s, d: cjax.simulate("8"), TypeError, "such as 8, not '8'"),
    "too many devices": (lambda p, s, d: cjax.simulate(10**12), ValueError, "4096"),
    "steps as text": (lambda p, s, d: keeper(d).save("5", {"w": np.ones(1)}, {}), ValueError, "not '5'"),
    "a negative step": (lambda p, s, d: keeper(d).save(-1, {"w": np.ones(1)}, {}), ValueError, "at least 0, not -1"),
    "texts": (lambda p, s, d: cjax.checkpoint.save(d / "t", {"w": "a"}, {}), ValueError, "w <U1[]"),
    "nothing to save": (lambda p, s, d: cjax.checkpoint.save(d / "t", {}, {}), ValueError, "no array"),
    "meta": (lambda p, s, d: cjax.checkpoint.save(d / "t", {"w": np.ones(1)}, None), ValueError, "`meta` is None"),
    "layers as text": (lambda p, s, d: cjax.models.gpt("gpt-mini", num_layers="3"), ValueError, "num_layers is '3'"),
    "half a row": (lambda p, s, d: cjax.data.text_data(batch_size=2.5, sequence=8), ValueError, "batch_size 2.5"),
}  # fmt: skip


def keeper(folder: Path) -> Any:
    return cjax.checkpoint.Checkpointer(folder / "run")


def shapes() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows())


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_what_to_give(program: cjax.Program, name: str, tmp_path: Path) -> None:
    call, error, said = CASES[name]
    state = program.init(0)
    message = refusal(lambda: call(program, state, tmp_path), error)
    assert said in message, message
    program.params(state)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_state_can_be_copied(program: cjax.Program, copied: Callable[[cjax.State], cjax.State]) -> None:
    state = program.init(0)
    again = copied(state)
    before = on_host(program.params(again))
    if copied is copy.deepcopy:  # an array of its own, which outlives the state
        program.step(state, rows())
    assert_same(on_host(program.params(again)), before, 0)
