"""Which values of a forward pass have a gradient, and which of them its derivative reads."""

import jax
import jax.numpy as jnp
from traces import BATCH, ends, plain_trace

from cjax.planner.reading.derived import derived, learned_of
from cjax.planner.reading.stretches import stretches


def test_gradients_end_where_they_are_stopped() -> None:
    def loss(params, frozen, state, batch, key, index):
        made = jnp.tanh(batch["x"] @ params["in"])
        return (jnp.sin(made) * jax.lax.stop_gradient(jnp.exp(made))).sum() + jnp.cos(batch["x"]).max(), {}, {}

    trace = plain_trace(loss, params=ends(), batch=BATCH)
    ((body,),) = (stretch.bodies for stretch in stretches(trace))
    found = derived(body, learned_of(trace))
    wanted = {step.name: found.has_gradient(step.writes[0]) for step in body.steps}
    assert [name for name in wanted if not wanted[name]] == ["stop_gradient", "cos", "reduce_max"]
    # A sum needs nothing, a product both operands; what is stopped is one of them, and so needs what it is made of.
    read = {step.name: step.reads[0] in found.needed for step in body.steps}
    assert read["mul"] and read["sin"] and read["dot_general"] and not read["reduce_sum"]
