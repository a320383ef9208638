"""A trace cut at its stacks: whose weights are whose, and what is transferred from layer to layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import BATCH, DEPTH, FEATURES, HIDDEN, ROWS, WIDTH, ends, hidden, numbers, plain_trace, stacked, weights

from cjax.trace.emit.emit import Hooks
from cjax.trace.jaxpr.groups import Group
from cjax.trace.jaxpr.view import is_scan
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import CutTrace, cut, find_stacks, reads, reads_states, torn_states, widened, writes

FLOPS = 2 * 2 * ROWS * WIDTH * HIDDEN  # of one layer: a multiplication and an addition for each weight and row


def rolled(x: Any, layers: Any, shift: Any = 0.0) -> Any:
    """The layers as a loop that the author wrote."""
    return jax.lax.scan(lambda x, w: (x + hidden(x, w) + shift, None), x, layers)[0]


def unrolled(x: Any, layers: Any, shift: Any = 0.0) -> Any:
    for layer in layers:
        x = x + hidden(x, layer) + shift
    return x


def named(trace: Trace, entries: Any) -> list[str]:
    """The inputs among entries, by name; "made" for what the trace makes."""
    names = dict(zip(trace.closed.jaxpr.invars, (leaf.name for leaf in trace.leaves), strict=True))
    return [names.get(entry[0], "made") for entry in entries]


def taken(function: Any, **trees: Any) -> tuple[Trace, CutTrace]:
    trace = plain_trace(function, **trees)
    return trace, cut(trace, find_stacks(trace))


# -- finding ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loop", [unrolled, rolled])
def test_a_stack_has_the_weights_of_its_layers(loop: Any) -> None:
    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        return (loop(batch["x"] @ params["in"], params["layers"]) @ params["out"]).sum(), {}, model_state

    layers = weights() if loop is unrolled else stacked(weights())
    trace = plain_trace(loss, params=ends(layers=layers), batch=BATCH)
    (stack,) = find_stacks(trace)
    assert stack.is_run == isinstance(stack.of, RepeatedLayers) == (loop is unrolled)
    assert stack.length == DEPTH and stack.layered and stack.flops == DEPTH * FLOPS
    names = sorted([trace.leaves[i].name for i in group] for group in stack.weights)
    each = [[f"layers/{i}/{name}" for i in range(DEPTH)] for name in ("down", "up")]
    assert names == (each if loop is unrolled else [["layers/down"], ["layers/up"]])
    assert not stack.reads and not stack.outputs and not stack.last_only
    first, last = trace.closed.jaxpr.eqns[stack.start], trace.closed.jaxpr.eqns[stack.stop - 1]
    assert stack.initial[0] in reads(stack.of, trace) and set(stack.final) <= set(writes(stack.of, trace))
    assert stack.stop - stack.start == (1 if loop is rolled else stack.of.period * DEPTH)
    assert (first is last and is_scan(first)) or last.outvars[0] is stack.final[0]


def test_a_weight_that_is_read_elsewhere_is_not_the_layers_own() -> None:
    """Tied weights: one that the head reads as well, and one of all layers."""

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = unrolled(batch["x"] @ params["in"], params["layers"], params["shift"])
        return ((x @ params["layers"][1]["up"]).sum() + (x @ params["out"]).sum()), {}, model_state

    trace = plain_trace(loss, params=ends(layers=weights(), shift=numbers(WIDTH)), batch=BATCH)
    (stack,) = find_stacks(trace)
    assert [[trace.leaves[i].name for i in group] for group in stack.weights] == [
        [f"layers/{i}/down" for i in range(DEPTH)]
    ]
    assert sorted(named(trace, stack.reads)) == ["layers/0/up", "shift"]
    assert {len(entry) for entry in stack.reads} == {1, DEPTH}


def test_a_scans_weight_that_is_read_elsewhere_is_not_its_own() -> None:
    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = rolled(batch["x"] @ params["in"], params["layers"])
        return (x @ params["out"]).sum() + params["layers"]["up"].sum(), {}, model_state

    trace = plain_trace(loss, params=ends(layers=stacked(weights())), batch=BATCH)
    (stack,) = find_stacks(trace)
    assert [[trace.leaves[i].name for i in group] for group in stack.weights] == [["layers/down"]]
    assert named(trace, stack.reads) == ["layers/up"]


def test_a_scan_whose_weights_are_all_read_elsewhere_is_a_stack_all_the_same() -> None:
    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = rolled(rolled(batch["x"] @ params["in"], params["layers"]), params["layers"])
        return (x @ params["out"]).sum(), {}, model_state

    trace = plain_trace(loss, params=ends(layers=stacked(weights())), batch=BATCH)
    for stack in find_stacks(trace):
        assert not stack.weights and sorted(named(trace, stack.reads)) == ["layers/down", "layers/up"]
    assert len(find_stacks(trace)) == 2


def test_what_is_no_stack() -> None:
    """Loops without weights, loops that run backwards, and those that cost next to nothing beside the others."""

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = batch["x"] @ params["in"]
        x = jax.lax.scan(lambda x, w: (x + hidden(x, w), None), x, params["layers"], reverse=True)[0]
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ x.T) @ x, None), x, None, length=DEPTH)[0]
        return (x @ params["out"]).sum(), {}, model_state

    assert find_stacks(plain_trace(loss, params=ends(layers=stacked(weights())), batch=BATCH)) == ()

    def beside(share: int) -> Any:
        def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
            few, many = params["few"], params["many"]
            x = jax.lax.scan(lambda x, w: (x + w[0] * (x @ w), None), batch["x"] @ params["in"], few)[0]
            return (rolled(x, many) @ params["out"]).sum(), {}, model_state

        few = numbers(2, WIDTH, WIDTH)
        return plain_trace(loss, params=ends(few=few, many=stacked(weights(share))), batch=BATCH)

    # Two products of 4 x 4 cost 2/3 of one layer: more than a tenth of 6 layers, less than a tenth of 7.
    assert [stack.length for stack in find_stacks(beside(6))] == [2, 6]
    assert [stack.length for stack in find_stacks(beside(7))] == [7]


# -- what layers read -------------------------------------------------------------------------------------------------
def full(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """Layers that read something of each kind; what the first was made of is read behind the last as well."""
    x = batch["x"] @ params["in"]
    memory, skip = jnp.sin(x), jnp.cos(x)
    seen = (batch["x"].sum(-1, keepdims=True) > 0).astype(x.dtype)
    scale, step = jnp.exp(params["scale"]), jnp.exp(frozen["step"])
    every = []
    for layer in params["layers"]:
        h = hidden(x, layer)
        every.append(jnp.square(h).sum())
        x = x + h * scale * step * seen * memory
    return ((x + skip) @ params["out"]).sum(), {"every": jnp.stack(every)}, model_state


def test_what_layers_read_is_made_once_beside_them_or_transferred() -> None:
    trace, found = taken(
        full, params=ends(layers=weights(), scale=numbers(WIDTH)), frozen={"step": numbers(WIDTH)}, batch=BATCH
    )
    (stack,) = found.stacks
    makers = {var: eqn.primitive.name for eqn in trace.closed.jaxpr.eqns for var in eqn.outvars}
    once = {on: entry[0] for entry, on in zip(found.once[0], found.learned[0], strict=True)}
    assert {on: makers[var] for on, var in once.items()} == {True: "exp", False: "exp"}
    assert once[True] in writes_of(trace, "scale") and once[False] in writes_of(trace, "step")
    assert [makers[var] for (var,) in found.recomputed[0]] == ["convert_element_type"]
    assert sorted(makers[var] for (var,) in found.transferred[0]) == ["cos", "sin"], "what is read behind the stack too"
    assert set(stack.reads) == {
        *found.once[0],
        *found.recomputed[0],
        *(e for e in found.transferred[0] if e in stack.reads),
    }
    assert [len(entry) for entry in stack.outputs] == [DEPTH]


def writes_of(trace: Trace, name: str) -> set[Any]:
    """Results of the equations that read an input."""
    (at,) = (i for i, leaf in enumerate(trace.leaves) if leaf.name == name)
    var = trace.closed.jaxpr.invars[at]
    return {out for eqn in trace.closed.jaxpr.eqns for out in eqn.outvars if var in eqn.invars}


def two(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """An encoder and a decoder: the second stack reads the first, and something made before both."""
    x = batch["x"] @ params["in"]
    before = jnp.sin(x)
    memory = jnp.cos(unrolled(x, params["encoder"]))
    for layer in params["decoder"]:
        x = x + jnp.tanh(hidden(x, layer) * memory) + before
    return (x @ params["out"]).sum(), {}, model_state


def test_what_the_second_stack_reads_is_transferred_through_the_first() -> None:
    trees = {"encoder": weights(3), "decoder": weights(4, seed=9)}
    trace, found = taken(two, params=ends(**trees), batch=BATCH)
    assert [stack.length for stack in found.stacks] == [3, 4]
    assert found.stacks[0].stop <= found.stacks[1].start
    makers = {var: eqn.primitive.name for eqn in trace.closed.jaxpr.eqns for var in eqn.outvars}
    assert sorted(makers[v] for (v,) in found.transferred[1]) == ["cos", "sin"]
    # The decoder starts with what the encoder started with, and reads what was made before both.
    assert sorted(makers[v] for (v,) in found.transferred[0]) == ["dot_general", "sin"]
    made = {var: at for at, eqn in enumerate(trace.closed.jaxpr.eqns) for var in eqn.outvars}
    for stack, transferred in zip(found.stacks, found.transferred, strict=True):
        assert all(made[v] < stack.start for (v,) in transferred), "nothing is transferred before it is made"


@pytest.mark.parametrize("function", [full, two])
def test_what_is_outside_of_stacks_is_enough_for_results(function: Any) -> None:
    """The items for some results read inputs, what is known, and what other items write."""
    trees = {"layers": weights(), "scale": numbers(WIDTH)} if function is full else {
        "encoder": weights(3), "decoder": weights(4, seed=9)
    }  # fmt: skip
    trace, found = taken(function, params=ends(**trees), frozen={"step": numbers(WIDTH)}, batch=BATCH)
    inputs = set(trace.closed.jaxpr.invars)
    last = found.stacks[-1]
    known = {*last.final, *(v for entry in (*last.outputs, *found.transferred[-1]) for v in entry)}
    items = found.needed(found.results(), known)
    done = set(known)
    for item in items:
        assert set(reads(item, trace)) <= done | inputs
        done |= set(writes(item, trace))
    assert {v for v in found.results() if hasattr(v, "count")} <= done
    inside = {id(eqn) for stack in found.stacks for eqn in trace.closed.jaxpr.eqns[stack.start : stack.stop]}
    assert not inside & {id(item) for item in found.items}
    assert len(found.items) + len(inside) == len(trace.closed.jaxpr.eqns)


def test_groups_make_a_layer_read_more() -> None:
    """An attention that is evaluated as one may read what its mask is made of, in place of the mask."""

    trace, found = taken(two, params=ends(encoder=weights(3), decoder=weights(4, seed=9)), batch=BATCH)
    extra = trace.closed.jaxpr.invars[trace.leaves_of("batch")[0]]

    class Reading(Hooks):
        def groups(self, eqns: Any, results: Any, scope: Any) -> list[Group]:
            return [Group((eqns[0],), (extra, *reads(eqns[0], trace)), tuple(eqns[0].outvars), None)]

    stack = found.stacks[0]
    wider = widened(stack, trace, Reading())
    assert wider.reads == (*stack.reads, (extra,)), "what it reads anyway, and is handed, is not read twice"
    assert widened(stack, trace, Hooks()) == stack


# -- state ------------------------------------------------------------------------------------------------------------
def running(old: Any, x: Any) -> Any:
    return 0.9 * old + 0.1 * x.mean(0)


def with_states(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """Averages made before the layers, by each of them and behind them; and a count of draws."""
    x = batch["x"] @ params["in"]
    new = {"count": model_state["count"] + 1, "first": running(model_state["first"], x), "layers": []}
    for layer, mean in zip(params["layers"], model_state["layers"], strict=True):
        h = hidden(x, layer)
        new["layers"].append(running(mean, h))
        x = x + h
    new["last"] = running(model_state["last"], x)
    return (x @ params["out"]).sum(), {}, new


CARRIED = {"count": np.int32(3), "first": numbers(WIDTH), "last": numbers(WIDTH, seed=1),
           "layers": [numbers(WIDTH, seed=2 + i) for i in range(DEPTH)]}  # fmt: skip
PARAMS = ends(layers=weights())


def test_states_are_told_by_who_makes_them() -> None:
    trace, found = taken(with_states, params=PARAMS, model_state=CARRIED, batch=BATCH)
    names = [trace.leaves[i].name for i in trace.leaves_of("model_state")]
    states = found.states
    (((place, group),),) = states.layers
    assert [names[i] for i in group] == [f"layers/{i}" for i in range(DEPTH)] and place == 0
    assert [names[i] for i in states.before] == ["first"] and [names[i] for i in states.after] == ["last"]
    assert {names[i] for i in states.every} == set(names) - {"count"}
    assert not reads_states(trace, find_stacks(trace)) and not torn_states(trace, find_stacks(trace))
    assert len(found.results()) == 1
    assert found.stacks[0].outputs == ((),), "averages are part of no payload: no result reads them"


def test_a_state_that_is_cast_behind_its_layer_is_its_layers() -> None:
    def cast(*args: Any) -> Any:
        loss, aux, new = with_states(*args)
        return loss, aux, {**new, "layers": [x.astype(jnp.bfloat16) for x in new["layers"]]}

    model_state = {**CARRIED, "layers": [x.astype(jnp.bfloat16) for x in CARRIED["layers"]]}
    _, found = taken(cast, params=PARAMS, model_state=model_state, batch=BATCH)
    assert [len(group) for _, group in found.states.layers[0]] == [DEPTH]
    assert len(found.states.after) == 1


@pytest.mark.parametrize("which", ["first", "last", "layers"])
def test_states_that_decide_about_results_are_named(which: str) -> None:
    def normed(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        loss, aux, new = with_states(params, frozen, model_state, batch, key, index)
        old = model_state["layers"][1] if which == "layers" else model_state[which]
        return loss + old.sum(), aux, new

    trace = plain_trace(normed, params=PARAMS, model_state=CARRIED, batch=BATCH)
    wanted = "layers/1" if which == "layers" else which
    assert reads_states(trace, find_stacks(trace)) == [wanted]


def test_states_made_in_one_place_and_read_in_another_are_named() -> None:
    def handed(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        loss, aux, new = with_states(params, frozen, model_state, batch, key, index)
        return loss, aux, {**new, "first": new["first"] + model_state["last"]}

    trace = plain_trace(handed, params=PARAMS, model_state=CARRIED, batch=BATCH)
    assert torn_states(trace, find_stacks(trace)) == ["last"]
    assert not reads_states(trace, find_stacks(trace))

    def within(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        loss, aux, new = with_states(params, frozen, model_state, batch, key, index)
        return loss, aux, {**new, "last": new["last"] + model_state["layers"][0]}

    trace = plain_trace(within, params=PARAMS, model_state=CARRIED, batch=BATCH)
    assert torn_states(trace, find_stacks(trace)) == ["layers/0"]


def test_shapes_differ() -> None:
    """What the tests above rely on."""
    assert len({ROWS, FEATURES, WIDTH, HIDDEN, DEPTH}) == 5
