"""What is in memory while one operation of a trace runs."""

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import make_jaxpr
from cjax.planner.reading.live import Array, timeline
from cjax.trace.dims.find import find_dims


def test_what_is_scattered_to_zeros_lies_where_these_did() -> None:
    def picked(places: jax.Array, values: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.zeros((16, 512)).at[jnp.arange(16), places].add(values) @ weight

    closed = make_jaxpr(picked)(jnp.zeros(16, jnp.int32), jnp.zeros(16), jnp.zeros((512, 8)))
    scope = find_dims(closed).top
    line = timeline(closed.jaxpr, scope, [Array(var, scope) for var in closed.jaxpr.invars])
    (moment,) = [each for each in line.moments() if each.op.eqn.primitive.name == "scatter-add"]
    assert [array.size for array in moment.arrays if array.size >= 16 * 512] == [16 * 512 * 4]
