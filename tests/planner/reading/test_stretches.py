"""What of a trace stands before, in and after its layers, and how often loops turn."""

import jax
import jax.numpy as jnp
from traces import BATCH, ends, hidden, plain_trace, stacked, weights

from cjax.planner.reading.stretches import stretches
from cjax.planner.reading.work import work_of


def test_loops_turn_as_often_as_they_say() -> None:
    def loss(params, frozen, state, batch, key, index):
        def turn(x, _):
            return jnp.tanh(x @ params["square"]), None

        x, _ = jax.lax.scan(turn, batch["x"], None, length=5)
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ params["square"], lambda x: x, x)
        return x.sum(), {}, {}

    trace = plain_trace(loss, params={"square": jnp.ones((7, 7))}, batch=BATCH)
    (part,) = work_of(trace).parts
    assert [(product.times, product.flops) for product in part.products] == [(5, 5 * 2 * 5 * 49), (1, 2 * 5 * 49)]


def test_layers_in_a_row_and_in_a_loop_are_stacks_alike() -> None:
    def unrolled(params, frozen, state, batch, key, index):
        x = batch["x"] @ params["ends"]["in"]
        for layer in params["layers"]:
            x = x + hidden(x, layer)
        return (x @ params["ends"]["out"]).sum(), {}, {}

    def looped(params, frozen, state, batch, key, index):
        x = batch["x"] @ params["ends"]["in"]
        x, _ = jax.lax.scan(lambda x, layer: (x + hidden(x, layer), None), x, params["layers"])
        return (x @ params["ends"]["out"]).sum(), {}, {}

    layers = weights(4)
    one = plain_trace(unrolled, params={"ends": ends(), "layers": layers}, batch=BATCH)
    other = plain_trace(looped, params={"ends": ends(), "layers": stacked(layers)}, batch=BATCH)
    for trace in (one, other):
        assert [(stretch.name, stretch.repeats) for stretch in stretches(trace)] == [
            ("before", 1), ("layers", 4), ("after", 1)
        ]  # fmt: skip
    first, second = work_of(one), work_of(other)
    assert [p.flops for part in first.parts for p in part.products] == [
        p.flops for part in second.parts for p in part.products
    ]
    held = [
        sorted([size for _, size in w.dims] for w in part.weights) for work in (first, second) for part in work.parts
    ]
    assert held[:3] == held[3:] and first.model_flops == second.model_flops


def test_calls_are_looked_through() -> None:
    @jax.custom_jvp
    def squared(x):
        return x * x

    squared.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))

    def loss(params, frozen, state, batch, key, index):
        x = jax.checkpoint(lambda x: jnp.sin(squared(x @ params["w"])))(batch["x"])
        return (squared(x) @ params["w"].T).sum(), {}, {}

    (stretch,) = stretches(plain_trace(loss, params={"w": jnp.ones((7, 3))}, batch=BATCH))
    (body,) = stretch.bodies
    names = [step.name for step in body.steps]
    assert names.count("dot_general") == 2 and not {"custom_jvp_call", "remat2", "checkpoint"} & set(names)
    made = {spot for step in body.steps for spot in step.writes}
    assert all(spot in made or not spot.path for step in body.steps for spot in step.reads if spot is not None)
