"""What a report says of a program, from its placement and what was counted in its compiled step."""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import numpy as np
import pytest

import cjax
from cjax.planner.hardware import Hardware
from cjax.program import description

from .conftest import Words, make, tokens, word_loss

MIB = 2**20
COUNTED: Any = SimpleNamespace(memory=SimpleNamespace(temporary=100 * MIB, outputs=7, aliased=5), collectives=())
CPUS = Hardware("cpu", 8, 8, 2**30)


class Wide(nn.Module):
    """One matrix of 64 x 512 and nothing else."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(512, use_bias=False)(x)


def wide(plan: str) -> cjax.Program:
    def loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) ** 2).mean()

    return make(plan, model=Wide(), loss=loss, batch={"x": np.ones((16, 64), np.float32)})


@pytest.mark.parametrize(
    ("plan", "params", "grads", "optimizer"),
    [("zero=0", 1, 1, 1), ("zero=1", 1, 1, 8), ("zero=2", 1, 8, 8), ("zero=3", 8, 8, 8), ("data=2 tensor=4", 4, 4, 4)],
)
def test_memory_is_told_by_what_a_device_keeps(plan: str, params: int, grads: int, optimizer: int) -> None:
    matrix, count = 64 * 512 * 4, 4
    found = description._memory(wide(plan)._composed, COUNTED, CPUS)
    assert (found.params, found.grads) == (matrix // params, matrix // grads)
    assert found.optimizer == 2 * matrix // optimizer + count  # Adam's moments, and how many steps it took
    assert found.compiler == 2 and found.limit == 2**30
    assert found.activations == 100 * MIB - found.grads


def test_transfers_of_a_kind_and_an_axis_are_one_row() -> None:
    def sent(kind: str, axis: str, total: float, count: int, exposed: float) -> Any:
        return SimpleNamespace(
            kind=kind, axis=axis, total_bytes=total, count=count, exposed_bytes=lambda hardware: exposed
        )

    audit: Any = SimpleNamespace(
        collectives=(
            sent("all-gather", "data", 10.0, 2, 3.0),
            sent("all-reduce", "tensor", 100.0, 4, 50.0),
            sent("all-gather", "data", 30.0, 5, 1.0),
        )
    )
    rows = [(each.kind, each.axis, each.bytes, each.count) for each in description.transfer_rows(audit, None)]
    assert rows == [("all-reduce", "tensor", 100, 4), ("all-gather", "data", 40, 7)], "the most first"
    assert [each.exposed_bytes for each in description.transfer_rows(audit, CPUS)] == [50, 4]


def test_what_is_filled_up_is_named() -> None:
    class Odd(Words):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1027)(nn.Embed(1027, 32)(x))

    even, odd = (make("tensor=8", model=model, loss=word_loss, batch=tokens()) for model in (Words(), Odd()))
    assert description._padding(even._composed) == []
    said = description._padding(odd._composed)
    assert said and all(each.endswith("1027 padded to 1032") for each in said)
