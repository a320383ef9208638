"""Before the layers, one layer after the other, behind them: put together, that is the function that was cut."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import BATCH, DEPTH, WIDTH, ends, hidden, numbers, plain_trace, stacked, weights

from cjax.trace.emit.emit import Hooks
from cjax.trace.stages.stacks import CutTrace, cut, find_stacks
from cjax.trace.stages.stages import Stages


def layered(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """Layers with a read of each kind, what each gives, averages made before, by and behind them, and a count."""
    x = batch["x"] @ params["in"]
    memory, skip = jnp.sin(x), jnp.cos(x) + index
    seen = (batch["x"].sum(-1, keepdims=True) > 0).astype(x.dtype) + model_state["count"]
    scale, step = jnp.exp(params["scale"]), jnp.exp(frozen["step"])
    new = {"count": model_state["count"] + 1, "first": model_state["first"] + x.mean(0), "layers": []}
    every = []
    for i, (layer, mean) in enumerate(zip(params["layers"], model_state["layers"], strict=True)):
        h = hidden(x, layer) * (1 + i)  # a literal that differs from layer to layer
        new["layers"].append(mean + h.mean(0))
        every.append(jnp.square(h).sum())
        x = x + h * scale * step * seen * memory
    new["last"] = model_state["last"] + x.mean(0)
    return ((x + skip) @ params["out"]).sum(), {"every": jnp.stack(every), "last": h.sum()}, new


def rolled(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """The same kinds of reads, as a loop that the author wrote."""
    x = batch["x"] @ params["in"]
    memory, skip = jnp.sin(x), jnp.cos(x) + index
    seen = (batch["x"].sum(-1, keepdims=True) > 0).astype(x.dtype) + model_state["count"]
    scale, step = jnp.exp(params["scale"]), jnp.exp(frozen["step"])

    def turn(x: Any, of: Any) -> Any:
        layer, mean = of
        h = hidden(x, layer)
        return x + h * scale * step * seen * memory, (mean + h.mean(0), jnp.square(h).sum())

    x, (means, every) = jax.lax.scan(turn, x, (params["layers"], model_state["layers"]))
    new = {"count": model_state["count"] + 1, "first": model_state["first"] + memory.mean(0), "layers": means}
    new["last"] = model_state["last"] + x.mean(0)
    return ((x + skip) @ params["out"]).sum(), {"every": every}, new


def two(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """Two stacks: the second starts with what the first started with, and reads what it came to."""
    x = batch["x"] @ params["in"]
    before, made = jnp.sin(x), x
    for layer in params["encoder"]:
        made = made + hidden(made, layer) * model_state["count"]
    memory = jnp.cos(made) @ params["between"]
    for layer in params["decoder"]:
        x = x + jnp.tanh(hidden(x, layer) * memory) + before
    new = {
        "count": model_state["count"] + 2,
        "first": model_state["first"],
        "layers": model_state["layers"],
        "last": x.mean(0),
    }
    return (x @ params["out"]).sum(), {"made": made.sum()}, new


MEANS = [numbers(WIDTH, seed=20 + i) for i in range(DEPTH)]
STATE = {"count": np.float32(3), "first": numbers(WIDTH, seed=10), "last": numbers(WIDTH, seed=11), "layers": MEANS}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "layered": (layered, {"params": ends(layers=weights(), scale=numbers(WIDTH)), "model_state": STATE}),
    "rolled": (rolled, {"params": ends(layers=stacked(weights()), scale=numbers(WIDTH)),
                        "model_state": {**STATE, "layers": np.stack(MEANS)}}),
    "two": (two, {"params": ends(encoder=weights(3), decoder=weights(2, seed=9), between=numbers(WIDTH, WIDTH, seed=5)),
                  "model_state": STATE}),
}  # fmt: skip


class Doubled(Hooks):
    """Makes each parameter ready by doubling it, so that one that is made ready twice, or not at all, shows."""

    def __init__(self, leaves: list[int]) -> None:
        self.leaves = leaves

    def weight(self, leaf: int, value: jax.Array) -> jax.Array:
        return 2 * value if leaf in self.leaves else value


def in_stages(found: CutTrace, inputs: list[Any], hooks: Hooks) -> tuple[list[Any], dict[int, Any]]:
    """Results, and new carried values by their number, of a cut trace run stage by stage."""
    trace, states = found.trace, found.states
    own = {i for stack in found.stacks for group in stack.weights for i in group}
    trained = [(i,) for i in trace.leaves_of("params") if i not in own]
    given = [(i,) for i, leaf in enumerate(trace.leaves) if i not in own and leaf.kind != "params"]
    stages = Stages(found, hooks, trained, given)
    args = [inputs[i] for (i,) in trained], [inputs[i] for (i,) in given]
    payload, model_state = stages.enter(*args), {}
    model_state.update(zip(states.before, stages.states_before(*args), strict=True))
    for k, stack in enumerate(found.stacks):
        once, beside = stages.once(k, *args), stages.recomputed(k, *args)
        made = []
        for i in range(stack.length):
            mine = [inputs[group[i]] if len(group) > 1 else inputs[group[0]][i] for group in stack.weights]
            ready = stages.ready(k, mine)
            made.append(stages.layer(k, ready, once, beside, jnp.int32(i), payload, states=True))
            after = stages.layer(k, ready, once, beside, jnp.int32(i), payload)
            assert [(x.shape, x.dtype) for x in after] == [(x.shape, x.dtype) for x in payload], "as it was handed"
            payload = after
        for (_, group), values in zip(states.layers[k], zip(*made, strict=True), strict=True):
            values = values if len(group) > 1 else [jnp.stack(values)]
            model_state.update(zip(group, values, strict=True))
        payload = stages.leave(k, *args, payload)
    num_results = len(found.results())
    model_state.update(zip(states.after, payload[num_results:], strict=True))
    rest = [(i,) for i in range(len(trace.leaves_of("model_state"))) if i not in states.every]
    model_state.update(zip([i for (i,) in rest], stages.next_model_state(*args, rest), strict=True))
    return payload[:num_results], model_state


@pytest.mark.parametrize("name", CASES)
def test_stages_come_to_what_was_cut(name: str) -> None:
    function, trees = CASES[name]
    trees = {**trees, "frozen": {"step": numbers(WIDTH)} if function is not two else {}, "batch": BATCH}
    trace = plain_trace(function, **trees)
    found = cut(trace, find_stacks(trace))
    assert len(found.stacks) == (2 if name == "two" else 1)
    order = ("params", "frozen", "model_state", "batch")
    key, index = jax.random.key(0), jnp.int32(2)

    def both(trees: Any, key: Any, index: Any) -> Any:
        inputs = [leaf for kind in order for leaf in jax.tree.leaves(trees[kind])]
        doubled = trees | {"params": jax.tree.map(lambda x: 2 * x, trees["params"])}
        loss, aux, new = function(*(doubled[kind] for kind in order), key, index)
        given = in_stages(found, [*inputs, key, index], Doubled(trace.leaves_of("params")))
        return given, ([loss, *jax.tree.leaves(aux)], jax.tree.leaves(new))

    (results, model_state), (wanted, new) = jax.jit(both)(trees, key, index)
    assert sorted(model_state) == list(range(len(new))), "each carried value is made by somebody, once"
    for i, (at, value) in enumerate(zip(trace.leaves_of("model_state"), new, strict=True)):
        np.testing.assert_allclose(model_state[i], value, rtol=1e-4, err_msg=trace.leaves[at].name)
    for given, value in zip(results, wanted, strict=True):
        np.testing.assert_allclose(given, value, rtol=1e-4)


def test_carried_values_that_wait_for_layers_stay_for_now() -> None:
    """`next_model_state` gives groups as they are stored: what is made of examples is what it was."""
    function, trees = CASES["layered"]
    trace = plain_trace(function, **trees, frozen={"step": numbers(WIDTH)}, batch=BATCH)
    found = cut(trace, find_stacks(trace))
    names = [trace.leaves[i].name for i in trace.leaves_of("model_state")]
    layers = tuple(i for i, name in enumerate(names) if name.startswith("layers/"))
    groups = [(names.index("count"),), (names.index("first"),), layers]
    inputs = [leaf for kind in ("model_state",) for leaf in jax.tree.leaves(trees[kind])]
    stages = Stages(found, Hooks(), [], [(i,) for i in trace.leaves_of("model_state")])
    count, first, means = stages.next_model_state([], inputs, groups)
    assert count == STATE["count"] + 1
    np.testing.assert_array_equal(first, STATE["first"])
    np.testing.assert_array_equal(means, np.stack(MEANS))
