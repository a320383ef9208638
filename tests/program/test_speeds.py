"""A job's table of speeds, from the planner."""

from typing import Any

import jax
import optax
import pytest

import cjax
from cjax.program.speeds import speed_table
from cjax.scheduler.policy.goodput import allocate
from cjax.scheduler.policy.job import Job, size_of

from .conftest import Net

ROWS = 4096
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, 8), "float32"), "y": jax.ShapeDtypeStruct((ROWS, 1), "float32")}


def loss(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


CALL = (Net(64), loss, optax.adam(1e-3), BATCH)


def test_each_size_has_the_best_plan_there() -> None:
    table = speed_table(CALL, "h100", [1, 2, 8])
    assert table.sizes == (1, 2, 8) and all(speed.batch == ROWS for speed in table.speeds)
    best = cjax.plans(CALL, "h100:8", verify=0, top=1).best
    assert table.speeds[2].plan == best.plan
    assert table.speeds[2].samples_per_second == pytest.approx(ROWS / best.seconds)
    job = Job("job", table, batch=ROWS, work_left=1e9)
    assert size_of(allocate([job], {"node": 8}, {}, 0.0)["job"]) in table.sizes


def test_sizes_without_a_plan_are_left_out_or_refused() -> None:
    with pytest.raises(ValueError, match="12 devices are more than one host of 8"):
        speed_table(CALL, "h100", [8, 12])
    alone = {name: jax.ShapeDtypeStruct((1, *each.shape[1:]), each.dtype) for name, each in BATCH.items()}
    table = speed_table((*CALL[:3], alone), "h100", [1, 8], plan="auto tensor=1 pipeline=1 sequence=1")
    assert table.sizes == (1,)  # one row can't be shared by eight
    with pytest.raises(ValueError, match="no plan fits on 8 devices"):
        speed_table((*CALL[:3], alone), "h100", [8], plan="auto tensor=1 pipeline=1 sequence=1")
