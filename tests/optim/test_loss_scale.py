"""The factor on the loss, followed step by step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.optim import LossScale, count_skipped


def follow(scaling: LossScale, steps: Sequence[bool]) -> list[float]:
    """The factor after each step."""
    adjust, state, found = jax.jit(scaling.adjust), scaling.init(), []
    for finite in steps:
        state = adjust(state, jnp.array(finite))
        found.append(float(state.scale))
    return found


def test_halves_at_each_overflow_and_doubles_after_enough_good_steps() -> None:
    scaling = LossScale(initial=16, growth_interval=3)
    assert follow(scaling, [True, False, True, True, True, True, False]) == [16, 8, 8, 8, 16, 16, 8]


def test_an_overflow_starts_the_count_of_good_steps_again() -> None:
    assert follow(LossScale(initial=16, growth_interval=3), [True, True, False, True, True]) == [16, 16, 8, 8, 8]


def test_hysteresis_forgives_until_the_scale_grows() -> None:
    """From the second overflow since the last growth on, each one counts."""
    scaling = LossScale(initial=16, growth_interval=2, hysteresis=2)
    steps = [False, True, False, False, True, True, False, False]
    assert follow(scaling, steps) == [16, 16, 8, 4, 4, 8, 8, 4]


def test_stays_within_its_bounds() -> None:
    scaling = LossScale(initial=4, growth_interval=1, minimum=2, maximum=8)
    assert follow(scaling, [True, True, True, False, False, False, False]) == [8, 8, 8, 4, 2, 2, 2]


def test_can_be_fixed() -> None:
    assert set(follow(LossScale(initial=64, growth=1, backoff=1, growth_interval=1), [True, False] * 3)) == {64}


def test_counts_skipped_steps() -> None:
    scaling = LossScale(hysteresis=3)
    state = scaling.init()
    for finite in (True, False, False, True, False):
        state = scaling.adjust(state, jnp.array(finite))
    assert int(state.num_skipped) == 3
    assert int(count_skipped(state, jnp.array(False)).num_skipped) == 4
    assert int(count_skipped(state, jnp.array(True)).num_skipped) == 3


@given(steps=st.lists(st.booleans(), max_size=40), interval=st.integers(1, 5), hysteresis=st.integers(1, 3))
def test_is_as_if_written_in_python(steps: list[bool], interval: int, hysteresis: int) -> None:
    scaling, state = LossScale(initial=256, growth_interval=interval, hysteresis=hysteresis), None
    scale, good, overflows = 256.0, 0, 0
    state = scaling.init()
    for finite in steps:
        if finite:
            good += 1
            if good == interval:
                scale, good, overflows = min(2 * scale, 2.0**32), 0, 0
        else:
            good, overflows = 0, overflows + 1
            if overflows >= hysteresis:
                scale = max(scale / 2, 1.0)
        state = scaling.adjust(state, jnp.array(finite))
        assert (float(state.scale), int(state.good_steps), int(state.overflows)) == (scale, good, overflows)


@pytest.mark.parametrize(
    ("field", "value"),
    [("initial", 0.5), ("initial", 2.0**40), ("growth", 0.5), ("backoff", 0.0), ("backoff", 2.0),
     ("growth_interval", 0), ("hysteresis", 0), ("minimum", 0.0), ("maximum", -1.0)],
)  # fmt: skip
def test_refuses_numbers_that_mean_nothing(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="LossScale: "):
        LossScale(**{field: value})
