"""Numbers that an optimizer keeps in its state: a checkpoint's go on, and whoever wants others is told how."""

import re
from pathlib import Path
from typing import Any

import optax
import pytest

from .conftest import make, rows


def injected(rate: float, within: bool = False) -> optax.GradientTransformation:
    """With a rate that is kept, and a decay that a schedule makes."""
    adam = optax.inject_hyperparams(optax.adamw)(rate, weight_decay=optax.linear_schedule(0.1, 0.01, 10))
    if within:
        return optax.inject_hyperparams(lambda scale: optax.chain(adam, optax.scale(scale)))(scale=1.0)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


@pytest.mark.parametrize("within", [False, True])
def test_whoever_restores_with_another_rate_is_told_how_to_have_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, within: bool
) -> None:
    program = make("data=4 tensor=2 zero=1", optimizer=injected(1e-2, within))
    state, _ = program.step(program.init(0), rows())
    state, _ = program.step(state, rows())  # with less decay
    program.save(tmp_path / "one", state)
    program.restore(tmp_path / "one")
    assert not caplog.records

    program = make("data=8 zero=3", optimizer=injected(1e-3, within))
    state = program.restore(tmp_path / "one")
    (record,) = caplog.records
    said = record.getMessage()
    assert "goes on with learning_rate = 0.01, as it was saved" in said and "made with 0.001." in said
    (where,) = set(re.findall(r"arrays\['opt_state'\]\S+", said))
    names: dict[str, Any] = {"program": program, "state": state}

    def kept() -> float:
        exec(f"arrays = program.to_arrays(state); value = {where}", names)
        return float(names["value"])

    assert kept() == pytest.approx(1e-2)
    exec(said.partition("To train with that: ")[2], names)
    names["state"], _ = program.step(names["state"], rows())
    assert kept() == pytest.approx(1e-3)
