"""What stages send and look up, as it is laid out: nothing of it is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.pipeline.buffers import Messages, columns_of


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PAYLOADS = [
    [struct(2, 3), struct(2, 3), struct(2)],
    [struct(2, 3, dtype=jnp.int32), struct(2, 3), struct(2, 3), struct(4)],
]


def test_one_form_of_message_carries_what_any_stack_hands_on() -> None:
    messages = Messages(PAYLOADS)
    kinds = [(s.shape, s.dtype) for s in messages.shapes]
    every = [(s.shape, s.dtype) for payload in PAYLOADS for s in payload]
    assert set(kinds) == set(every)
    assert len(kinds) == 5, "arrays of one shape and one dtype share a place, but not those of one payload"


@pytest.mark.parametrize("k", [0, 1])
def test_what_is_packed_is_what_is_unpacked(k: int) -> None:
    messages = Messages(PAYLOADS)
    payload = [np.full(s.shape, number, s.dtype) for number, s in enumerate(PAYLOADS[k], 1)]
    message = messages.pack(k, payload)
    assert [(x.shape, x.dtype) for x in message] == [(s.shape, s.dtype) for s in messages.shapes]
    for given, back in zip(payload, messages.unpack(k, message), strict=True):
        assert given.dtype == back.dtype
        np.testing.assert_array_equal(given, back)


def test_in_lockstep_all_stages_know_what_any_of_them_does() -> None:
    """Three ticks of two stages: what each does (0: nothing, k + 1: an op of stack k), and whether it starts there."""
    columns = {
        "does": np.array([[1, 0], [2, 1], [0, 2]]),
        "starts": np.array([[1, 0], [0, 1], [0, 0]]),
        "ends": np.array([[0, 0], [1, 0], [0, 1]]),
    }
    assert columns_of(dict(columns), 2, lockstep=False).keys() == columns.keys()
    found = columns_of(dict(columns), 2, lockstep=True)
    expected = {
        "any does 0": [1, 1, 0], "any starts 0": [1, 1, 0], "any ends 0": [0, 0, 0],
        "any does 1": [0, 1, 1], "any starts 1": [0, 0, 0], "any ends 1": [0, 1, 1],
    }  # fmt: skip
    for name, ticks in expected.items():
        np.testing.assert_array_equal(found[name], np.array(ticks, bool)[:, None].repeat(2, 1), name)
