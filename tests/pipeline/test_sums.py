"""Sums over micro-batches: none is rounded to what was added."""

import jax
import jax.numpy as jnp

from cjax.pipeline.sums import added, sum_like


def test_rounded_values_are_added_up_in_float32() -> None:
    """bfloat16 counts no further than 256."""
    room = [sum_like(jax.ShapeDtypeStruct((2,), dtype)) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)]
    assert {x.dtype for x in room} == {jnp.dtype("float32")}
    for _ in range(2):
        room = added(room, [jnp.array([256, 1], dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)])
        room = added(room, [jnp.ones(2, jnp.bfloat16)] * 3)
    assert all(x.tolist() == [514, 4] for x in room)
