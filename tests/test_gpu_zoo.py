"""Models of many kinds on one GPU, where layers are compiled apart, products merged and tables summed otherwise than on
CPUs: the author's own loss and gradients, in float32 and in 16 bits. `make test-gpu`."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import SUBJECTS, WRT

import cjax

pytestmark = pytest.mark.gpu


def program(name: str, plan: str, device: Any) -> tuple[cjax.Program, Any]:
    model, loss, batch = SUBJECTS[name].make()
    made = cjax.parallelize(model, loss, optax.adamw(1e-3), batch, plan, devices=[device], wrt=WRT.get(name))
    return made, batch


def gradients(name: str, plan: str, device: Any) -> tuple[float, np.ndarray]:
    made, batch = program(name, plan, device)
    loss, grads = made.value_and_grad(made.init(0), batch)
    return float(loss), np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads)])


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("matmuls", [None, "float32"])
def test_float32_is_the_authors(name: str, matmuls: str | None) -> None:
    """Also with matmuls as they are by default, of numbers that are rounded to 10 bits."""
    with jax.default_matmul_precision(matmuls):
        made, batch = program(name, "data=1", jax.devices("gpu")[0])
        found = made.check(made.init(0), batch)
    assert found.ok, found.wrong


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_16_bits_round_no_more_than_on_a_cpu(name: str, precision: str) -> None:
    """A CPU takes the same plan as one loop over layers, with one product a weight."""
    cpu = jax.devices("cpu")[0]
    plan = f"data=1 precision={precision}"
    loss, grads = gradients(name, plan, jax.devices("gpu")[0])
    wanted, there = gradients(name, "data=1", cpu)
    _, rounded = gradients(name, plan, cpu)
    assert abs(loss - wanted) < 0.02 * abs(wanted)
    assert apart(grads, there) < 1.5 * apart(rounded, there) + 2e-3
