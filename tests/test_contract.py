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


@pytest.mark.parametrize("plan", ["data=8", "tensor=8", "zero=3", "data=4 tensor=2 zero=2 microbatches=2"])
@pytest.mark.parametrize("name", ["linen_tied", "nnx_conv"])
def test_float32_differs_by_rounding_alone(name: str, plan: str) -> None:
    program, batch = program_of(name, plan, wide=False), subject(name, wide=False).batches[0]
    loss, grads = program.value_and_grad(program.init(0), batch)
    wanted = author(name, num_parts(plan), wide=False).steps[0]
    assert_close(on_host(loss), wanted.loss, ROUNDED, "loss")
    assert_close(on_host(grads), wanted.grads, ROUNDED, "gradient of ")


@pytest.mark.parametrize(("name", "plan"), pairs(LOW, 2))
def test_bfloat16_is_as_good_as_on_one_device(name: str, plan: str) -> None:
    """Not worse than 1.5 times what rounding costs there, gradients taken together."""
    batch = subject(name, wide=False).batches[0]
    wanted = author(name, num_parts(plan), wide=False).steps[0]
    here, there = (
        value_and_grad(name, text, batch)
        for text in (plan, f"data=1 microbatches={num_parts(plan)} precision=bfloat16")
    )
    for given in (here, there):
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(given)), "master weights' gradients are float32"

    def error(given: Any) -> float:
        return norm(jax.tree.map(lambda a, b: a - b, given, wanted.grads)) / norm(wanted.grads)

    assert 0 < error(there[1]) < 0.05, "rounding to 8 bits costs something, and not much"
    assert error(here[1]) <= 1.5 * error(there[1])
    assert abs(here[0] - wanted.loss) <= 1.5 * abs(there[0] - wanted.loss) + 2**-9 * abs(wanted.loss)


def value_and_grad(name: str, plan: str, batch: Any) -> Any:
    program = program_of(name, plan, wide=False)
    return on_host(program.value_and_grad(program.init(0), batch))


# -- placement --------------------------------------------------------------------------------------------------------
SMALL = 1024  # elements; a smaller parameter that nothing divides may stay whole
# Which dim of which parameter 1D tensor parallelism splits: heads, ffn and vocabulary; all else is whole.
ATTENTION = {"(query|key|value).*kernel": 1, "(query|key|value).*bias": 0, "out.*kernel": 0}
SPLIT = {
    "linen_decoder": {**ATTENTION, "Block_\\d.Dense_0": -1, "Block_\\d.Dense_1.kernel": 0, "Embed_0": 0, "^Dense_0": 1},
    "linen_vit": {**ATTENTION, "Block_\\d.Dense_0": -1, "Block_\\d.Dense_1.kernel": 0},
    "nnx_decoder": {**ATTENTION, "up": -1, "down.kernel": 0, "^embed": 0, "^head": 1},
    "nnx_llama": {"query|key|value": 1, "out": 0, "gate|up": 1, "down": 0, "^embed": 0, "^head": 1},
}
BYTES_PLANS = {name: plan for name, plan in zip(NAMES * 2, [p for p in plans.LAYOUTS if "tensor" not in p] * 4)}
