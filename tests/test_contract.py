"""Models x plans x guarantees: what must be true of every model of the zoo under every plan (design.md, section 4)."""

import os
from collections.abc import Iterator

import jax
import numpy as np
import plans
import pytest
from contract import (
    EXACT,
    ROUNDED,
    Run,
    assert_close,
    author,
    norm,
    on_host,
    program_of,
    subject,
    train,
)
from plans import LOW, PLANS, cover, features, is_refused, num_parts
from zoo import BATCH, MODELS

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
NAMES = list(MODELS)
EXACT_PLANS = [plan for plan in PLANS if not is_refused(plan, BATCH) and plan not in LOW]
REFUSED = [plan for plan in PLANS if is_refused(plan, BATCH)]
# Pairs that broke once.
BROKEN: list[tuple[str, str]] = []


def pairs(chosen: list[str] | tuple[str, ...], times: int) -> list[tuple[str, str]]:
    if ALL:
        return [(name, plan) for name in NAMES for plan in chosen]
    return cover(NAMES, list(chosen), times, [pair for pair in BROKEN if pair[1] in chosen])


@pytest.fixture(autouse=True)
def quick_compiles() -> Iterator[None]:
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def assert_same_run(given: Run, wanted: Run, tolerance: tuple[float, float]) -> None:
    for index, (step, other) in enumerate(zip(given.steps, wanted.steps, strict=True)):
        where = f"step {index}, "
        assert_close(step.loss, other.loss, tolerance, where + "loss")
        assert_close(step.aux, other.aux, tolerance, where + "aux")
        assert_close(step.grads, other.grads, tolerance, where + "gradient of ")
    assert_close(given.params, wanted.params, tolerance, "parameter ")
    assert_close(given.carried, wanted.carried, tolerance, "carried ")


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "plan"), pairs(EXACT_PLANS, 2))
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    """Loss, aux, every gradient and, after three steps, parameters, running statistics and random state."""
    with jax.enable_x64(True):
        assert_same_run(train(name, plan, wide=True), author(name, num_parts(plan), wide=True), EXACT)
