"""What goes on inside of the stages of a pipeline: several stacks of layers, and what XLA's partitioner moves there."""

import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from forked import Forks
from stages import LENGTH, MODELS, ROWS, error
from starts import begin

import cjax
from cjax.program import lockstep

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
STAGES = Path(__file__).parent / "stages.py"


# -- two stacks of layers ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("between", "pipeline=gpipe:4 microbatches=4"),
        ("again", "pipeline=1f1b:2 microbatches=4 zero=1"),
        ("encoder_decoder", "pipeline=1f1b:2 microbatches=4 zero=1"),
        ("between", "pipeline=zero_bubble:2 microbatches=4 zero=3"),
        ("side_by_side", "pipeline=interleaved:2/2 microbatches=4"),
    ][: None if ALL else 2],
)
def test_what_is_in_front_of_the_second_stack_learns(name: str, plan: str) -> None:
    """Also where all stages go through the ticks of either stack in lockstep."""
    with jax.enable_x64(True):
        off, _ = error(name, plan, lockstep=True)
    assert off < 1e-12


# -- what the partitioner moves ---------------------------------------------------------------------------------------
MOVED = [
    "rolled:pipeline=1f1b:2 microbatches=4 data=2 tensor=2",
    "shifted:pipeline=zero_bubble:2 microbatches=4 tensor=2",
    "experts:pipeline=interleaved:2/2 microbatches=4 tensor=4",
]
if ALL:
    MOVED += [
        "between:pipeline=gpipe:2 microbatches=4 tensor=2d:4",
        "permuted:pipeline=gpipe:2 microbatches=4 data=2 tensor=2",
        "top:pipeline=zero_bubble:2 microbatches=4 tensor=2d:4",
    ]


@pytest.mark.full
def test_moves_along_split_dims(forks: Forks) -> None:
    """In a process of its own: a hang, which XLA ends after a minute by stopping the process, must not be ours."""
    flags = re.sub(r"(terminate_timeout_seconds)=\d+", r"\1=60", os.environ["XLA_FLAGS"])
    run = forks.run([str(STAGES), *MOVED], os.environ | {"XLA_FLAGS": flags})
    said = dict(line.rsplit(": ", 1) for line in run.stdout.splitlines())
    assert list(said) == MOVED, f"{run.stdout}\n{run.stderr[-2000:]}"
    assert all(float(off.split()[0]) < 1e-12 for off in said.values()), run.stdout


def program_of(name: str, plan: str) -> Any:
    x = np.random.RandomState(0).randn(ROWS, LENGTH, 8)
    return cjax.parallelize(MODELS[name], lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1), x, plan), x


@pytest.mark.full("plain-1")
@pytest.mark.parametrize(("name", "times"), [("plain", 1), ("shifted", 2)])
def test_stages_go_together_only_where_the_compiled_program_needs_it(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step and its report are one compilation, or two; gradients are not asked again."""
    compiled, compile_lowered = [], lockstep.compile_lowered

    def counted(*args: Any, **more: Any) -> Any:
        compiled.append(1)
        return compile_lowered(*args, **more)

    monkeypatch.setattr(lockstep, "compile_lowered", counted)
    with jax.enable_x64(True):
        program, x = program_of(name, "pipeline=zero_bubble:2 microbatches=4 tensor=2")
        report = program.report()
        state, _ = program.step(begin(program), x)
        assert len(compiled) == times
        program.value_and_grad(state, x)
        assert len(compiled) == times + 1
    said = [line for line in report.watch if "lockstep" in line]
    assert len(said) == times - 1
    if said:
        assert "since XLA has put collective-permute for " in said[0], said
        assert said[0].endswith("into them: zero_bubble is no faster than 1f1b here"), said


@pytest.mark.full
def test_refuses_what_stages_can_not_do_together() -> None:
    """A branch of the author's own, by a weight of the layer, with a permute in it."""
    with jax.enable_x64(True):
        program, _ = program_of("chosen", "pipeline=1f1b:2 microbatches=4 tensor=2")
        with pytest.raises(ValueError, match=r"a branch of this model \(Net/cond\).* collective-permute .* jnp.where"):
            program.report()
