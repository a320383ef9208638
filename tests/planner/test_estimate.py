from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from cjax.plan import Plan
from cjax.planner.estimate import Activations, state_bytes
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource

ROWS, WIDTH, HIDDEN = 16, 32, 64


@pytest.mark.parametrize(("stage", "a_parameter"), [(0, 16), (1, 8 + 8 / 8), (2, 4 + 12 / 8), (3, 16 / 8)])
def test_bytes_of_a_parameter_under_adam(stage: int, a_parameter: float) -> None:
    assert state_bytes(4 * 8000, 8 * 8000, Plan(zero=stage), 8) == 8000 * a_parameter


class Stack(nn.Module):
    num_layers: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.num_layers):
            x = x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(HIDDEN)(x)))
        return x


def activations(num_layers: int) -> Activations:
    return Activations(trace_stack(num_layers))


def trace_stack(num_layers: int) -> Trace:
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    captured = capture(Stack(num_layers), lambda model, x: (model(x) ** 2).mean(), batch)
    return TraceSource(captured, batch).read()


# A layer's derivative needs its input, tanh's result for the second kernel, and tanh's slope. Kept until then are its
# input and the first matmul's result, of which the others are made.
LAYER = 4 * ROWS * (WIDTH + 2 * HIDDEN)
KEPT = 4 * ROWS * (WIDTH + HIDDEN)


@pytest.mark.parametrize("num_layers", [4, 12])
def test_without_remat_results_of_matmuls_are_kept_and_one_layer_is_made_again(num_layers: int) -> None:
    found = activations(num_layers).bytes(Plan(), 1)
    assert num_layers * KEPT + LAYER <= found <= num_layers * KEPT + 2 * LAYER


def test_remat_keeps_what_layers_hand_on_and_one_of_them() -> None:
    found = activations(12)
    block, dots = (found.bytes(Plan(remat=remat), 1) for remat in ("block", "dots"))
    assert 12 * 4 * ROWS * WIDTH + LAYER <= block <= 12 * 4 * ROWS * WIDTH + 2 * LAYER
    assert 12 * KEPT + LAYER <= dots <= 12 * KEPT + 2 * LAYER
    assert block < dots == found.bytes(Plan(), 1)  # whose matmuls are all with weights


def test_rows_are_shared_by_devices_and_micro_batches_and_bfloat16_is_half() -> None:
    found = activations(4)
    whole = found.bytes(Plan(), 1)
    assert found.bytes(Plan(), 8) == whole // 8
    assert found.bytes(Plan(microbatches=2), 8) == whole // 16
    assert found.bytes(Plan(precision="bfloat16"), 1) == whole // 2


def test_a_model_without_layers_has_nothing_to_recompute() -> None:
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    captured = capture(nn.Dense(HIDDEN), lambda model, x: (model(x) ** 2).mean(), batch)
    found = Activations(TraceSource(captured, batch).read())
    assert found.bytes(Plan(remat="block"), 1) == found.bytes(Plan(), 1) == 4 * ROWS * HIDDEN
