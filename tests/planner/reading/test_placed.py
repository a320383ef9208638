"""How much of a value a device has."""

import jax.numpy as jnp
from traces import plain_trace

from cjax.planner.reading.placed import PlacedTrace
from cjax.sharding.layout.layout import Layout


def test_what_does_not_divide_is_filled_up() -> None:
    def loss(params, frozen, state, batch, key, index):
        return (batch["x"] @ params["w"]).sum(), {}, {}

    trace = plain_trace(loss, params={"w": jnp.ones((3, 10))}, batch={"x": jnp.ones((5, 3))})
    top = trace.dims.top
    (product,) = [eqn for eqn in trace.closed.eqns if eqn.primitive.name == "dot_general"]
    made = trace.dims.of(product.outvars[0], top)
    layout = Layout({made[1]: ("tensor",), made[0]: ("data",)}, {"tensor": 4, "data": 1})
    placed = PlacedTrace(trace, layout)
    assert placed.entries(product.outvars[0], top) == ((), ("tensor",)), "an axis of one device splits nothing"
    assert placed.local(product.outvars[0], top) == 5 * 3
    assert placed.local(product.invars[1], top) == 3 * 3 and placed.local(product.invars[0], top) == 5 * 3
