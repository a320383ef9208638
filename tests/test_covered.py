"""The list of primitives that tests have run is true, and a report says what is not in it."""

from typing import Any

import covered
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax
from cjax.program import description
from cjax.trace.jaxpr.covered import PRIMITIVES, TESTED

MODELS = ["linen_tied", "nnx_conv", "nnx_mlp"]


def test_the_file_is_as_its_script_writes_it() -> None:
    assert covered.rewritten(covered.FILE.read_text(), set(PRIMITIVES[covered.VERSION])) == covered.FILE.read_text()


def test_what_the_suite_runs_is_listed() -> None:
    assert covered.in_the_zoo(MODELS) <= PRIMITIVES[covered.VERSION]


@pytest.mark.full  # it traces every model
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # random models have 64 bits
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # Flax's statistics
def test_nothing_else_is_listed() -> None:
    assert covered.in_the_zoo() | covered.in_the_search() == PRIMITIVES[covered.VERSION]


def program(loss: Any) -> cjax.Program:
    batch = {"x": np.ones((8, 5), np.float32)}
    return cjax.parallelize(lambda rngs: nnx.Linear(5, 3, rngs=rngs), loss, optax.sgd(0.1), batch, "data=8")


def test_a_report_names_primitives_and_versions_that_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(model: Any, batch: Any) -> Any:
        return jnp.square(model(batch["x"])).mean()

    monkeypatch.setattr(description, "TESTED", (*TESTED, covered.VERSION))
    assert description.uncovered(program(plain)._composed.trace) == []
    known = {version: names - {"square"} for version, names in PRIMITIVES.items()}
    monkeypatch.setattr(description, "PRIMITIVES", known)
    (said,) = description.uncovered(program(plain)._composed.trace)
    assert "no test of cjax has run square: check this plan" in said and "verify=True" in said
    monkeypatch.setattr(description, "PRIMITIVES", PRIMITIVES)
    monkeypatch.setattr(description, "TESTED", ("0.1",))
    (said,) = description.uncovered(program(plain)._composed.trace)
    assert f"JAX {jax.__version__} is not one that cjax was tested with (0.1)" in said
