"""What a program holds and moves beside its work: bytes of arrays alive, transfers to the host, compilations."""

import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax
from cjax.program import evaluation

from .conftest import Net, make, on_host, rows

pytestmark = pytest.mark.usefixtures("settled")
WIDTH = 4096  # parameters outweigh all else


def most_held(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """What the first device holds at most while `call` runs, wherever cjax calls or returns, and afterwards, beside
    what was there before; and the result."""
    gc.collect()
    # Thousands of other modules' arrays are looked up, not asked for their shards at each call.
    before = {id(array): array for array in jax.live_arrays()}
    first, most = jax.devices()[0], 0

    def held() -> int:
        """In bytes."""
        new = (array for array in jax.live_arrays() if id(array) not in before and not array.is_deleted())
        real = (x for x in new if first in x.devices() and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in real)

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal most
        if event in ("call", "return") and "/cjax/" in frame.f_code.co_filename:
            sys.setprofile(None)
            most = max(most, held())
            sys.setprofile(look)

    sys.setprofile(look)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    gc.collect()
    return most, held(), result


@pytest.fixture(scope="module")
def wide() -> cjax.Program:
    return make("data=2", model=Net(WIDTH), devices=jax.devices()[:2])


def params_bytes(program: cjax.Program) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program._composed.capture.params_shape))


# -- bytes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", ["all", pytest.param("half", marks=pytest.mark.full), "none"])
def test_a_state_that_starts_from_given_values_holds_little_beside_itself(wide: cjax.Program, part: str) -> None:
    """The parameters and the two moments of Adam are three times the parameters' bytes, whatever they start from."""
    size, given = params_bytes(wide), on_host(wide.params(wide.init(1)))
    params = {"all": given, "half": {"Dense_1/kernel": given["Dense_1"]["kernel"]}, "none": None}[part]
    wide.init(0, params=params)
    most, left, state = most_held(lambda: wide.init(0, params=params))
    assert left <= 3.05 * size
    assert most <= 3.6 * size, f"{most / size:.2f} times the parameters' bytes"
    del state


def test_so_does_one_of_a_live_model() -> None:
    model = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
    program = cjax.parallelize(
        model, lambda m, x: (m(x) ** 2).mean(), optax.adam(1e-2), np.ones((8, 256), "float32"), "data=2",
        devices=jax.devices()[:2],
    )  # fmt: skip
    program.init(0)
    most, left, state = most_held(lambda: program.init(0))
    assert left <= 3.05 * params_bytes(program) and most <= 4.1 * params_bytes(program)
    del state


def test_parameters_are_taken_out_without_the_optimizers_state(wide: cjax.Program) -> None:
    state, size = wide.init(0), params_bytes(wide)
    for take in (wide.params, wide.model):
        take(state)
        most, left, taken = most_held(lambda take=take: take(state))
        assert most <= 1.05 * size and left <= 1.05 * size, f"{most / size:.2f} times the parameters' bytes"
        del taken


def test_what_was_taken_out_outlives_the_state(wide: cjax.Program) -> None:
    state = wide.init(0)
    params = wide.params(state)
    before = on_host(params)
    state, _ = wide.step(state, rows())
    jax.tree.map(np.testing.assert_array_equal, before, on_host(params))


# -- transfers --------------------------------------------------------------------------------------------------------
@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Fails where an array of a device becomes one of the host's."""
    kind: Any = type(jnp.zeros(()))
    kept = kind.__array__

    def fetched(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{self.dtype}{list(self.shape)} was fetched from its devices")

    kind.__array__ = fetched
    try:
        with jax.transfer_guard_device_to_host("disallow"):
            yield
    finally:
        kind.__array__ = kept


def test_a_batch_on_the_devices_stays_there(wide: cjax.Program) -> None:
    state = wide.init(0)
    own = jax.device_put(rows(), wide._composed.batch_shardings)
    elsewhere = jax.device_put(rows(), jax.devices()[1])
    for batch in (own, elsewhere, jax.device_put(rows())):
        state, _ = wide.step(state, batch)
        with nothing_fetched():
            state, metrics = wide.step(state, batch)
            wide.value_and_grad(state, batch)
            wide.evaluate(state, batch)
    assert np.isfinite(metrics["loss"])


# -- compilations -----------------------------------------------------------------------------------------------------
class Compilations:
    count = 0


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    counted = Compilations()

    def listen(event: str, seconds: float, **_: Any) -> None:
        counted.count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counted
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_lambda_of_the_same_code_is_compiled_once(evaluator: cjax.Program, compilations: Compilations) -> None:
    state = evaluator.init(0)

    def scored(scale: float) -> float:
        return float(evaluator.evaluate(state, rows(), fn=lambda m, b: scale * m(b["x"]).mean()))

    found = scored(2.0)
    first = compilations.count
    assert [scored(2.0), scored(2.0)] == [found, found] and compilations.count == first, "compiled again"
    assert np.isclose(scored(3.0), 1.5 * found) and compilations.count > first, "another value is another function"


def test_functions_that_are_not_used_again_make_room(evaluator: cjax.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "KEPT", 3)
    monkeypatch.setattr(evaluator._evaluate, "_compiled", {})  # without what other tests have asked for
    state, ran = evaluator.init(0), []

    def scored(number: int) -> float:
        def score(model: Any, batch: Any) -> jax.Array:
            ran.append(number)
            return number + 0 * model(batch["x"]).mean()

        return float(evaluator.evaluate(state, rows(), fn=score))

    assert [scored(n) for n in (1, 2, 3, 1, 4, 1)] == [1, 2, 3, 1, 4, 1]
    assert len(evaluator._evaluate._compiled) == 3
    assert ran.count(1) == ran.count(2), "1 was in use all the time, and traced no more often than 2"
    before = ran.count(2)
    assert scored(2) == 2 and ran.count(2) > before, "2 had made room"


def test_starting_again_compiles_nothing(wide: cjax.Program, compilations: Compilations) -> None:
    given = {"Dense_1/kernel": np.zeros((5, WIDTH), np.float32)}
    for turn in range(2):
        wide.init(turn, params=given)
        if turn == 0:
            first = compilations.count
    assert compilations.count == first
