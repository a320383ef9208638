"""The author's Python runs once for a number of rows, whoever asks for the loss on them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        seen = self.variable("stats", "seen", lambda: jnp.float32(0))
        seen.value += 1
        for _ in range(2):
            x = nn.Dense(8)(jnp.tanh(x))
        return nn.Dropout(0.5, deterministic=False)(x)


@pytest.fixture
def runs() -> list[int]:
    """How many rows each run of the author's loss saw."""
    return []


@pytest.fixture
def source(runs: list[int]) -> TraceSource:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        runs.append(len(x))
        return model(x).mean()

    found = TraceSource(capture(Net(), loss, BATCH), BATCH)
    runs.clear()  # of making the parameters
    found.read()
    assert set(runs) == {16}  # twice: the first says which random streams it needs
    runs.clear()
    return found


def test_a_number_of_rows_is_traced_once(source: TraceSource, runs: list[int]) -> None:
    part = source.read(2)
    assert runs == [8] and source.read(2) is part
    pairs = source.read(2, pairs=True)
    assert part.is_chain and pairs.pairs and pairs is not part and source.read(2, pairs=True) is pairs
    source.flat(8, part, 2)
    assert runs == [8]
    source.flat(4, part, 2)
    assert runs == [8, 4] and source.read(4) is source.read(2, rows=4) and runs == [8, 4]


def test_other_batches_of_the_same_loss_know_what_was_traced(source: TraceSource, runs: list[int]) -> None:
    part = source.read(2)
    twice = source.on_rows(32)
    assert (source.num_rows, twice.num_rows) == (16, 32) and twice.read(4) is part and runs == [8]


def test_what_draws_or_counts_otherwise_is_traced_apart(source: TraceSource, runs: list[int]) -> None:
    """The whole batch draws as the author's own loop does, and which part is the last is a number in the trace."""
    parts = {id(source.read(2, rows=8)), id(source.read(rows=8))}
    parts |= {id(source.read(num, rows=8, counters=frozenset({0}))) for num in (2, 4)}
    assert len(parts) == 4 and runs == [8] * 4


def test_weights_are_read_in_the_form_of_an_earlier_trace(source: TraceSource, runs: list[int]) -> None:
    like = source.read(2)
    assert source.read(2, forms=like.forms) is source.read(2, forms=like.forms) is not like and runs == [8]


def test_evaluation_is_not_read_as_training() -> None:
    def loss(model: Any, x: jax.Array, train: bool) -> jax.Array:
        return model(x).mean() if train else jnp.sin(model(x)).mean()

    source = TraceSource(capture(nn.Dense(3), loss, BATCH), BATCH)
    trained, scored = ({eqn.primitive.name for eqn in source.read(train=t).closed.jaxpr.eqns} for t in (True, False))
    assert scored - trained == {"sin"} and source.read(train=False) is source.read(train=False)
