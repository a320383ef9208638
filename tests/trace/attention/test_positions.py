"""Positions of the attentions in a trace, wherever their layers are: in a row, in a loop, beside each other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import numbers, plain_trace

from cjax.trace.attention.find import Attention
from cjax.trace.attention.positions import attention_groups, in_parts, positions
from cjax.trace.emit.emit import layer_of

ROWS, LENGTH, OTHER, HEADS, DEPTH, WIDTH = 2, 6, 7, 3, 5, 15


def attention(x: Any, memory: Any, layer: Any, mask: Any = None) -> Any:
    q, k, v = x @ layer["q"], memory @ layer["k"], memory @ layer["v"]
    q, k, v = (each.reshape(*each.shape[:2], HEADS, DEPTH) for each in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return jnp.tanh(out.reshape(x.shape) @ layer["o"])


def layers(depth: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {name: numbers(WIDTH, WIDTH, seed=seed + 10 * i + at) for at, name in enumerate("qkvo")} for i in range(depth)
    ]


def unrolled(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    x = batch["x"]
    mask = jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH)
    for layer in params["layers"]:
        x = x + attention(x, x, layer, mask)
    return x.mean(), {}, model_state


def rolled(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    def turn(x: Any, layer: Any) -> Any:
        return x + attention(x, x, layer), None

    return jax.lax.scan(turn, batch["x"], params["layers"])[0].mean(), {}, model_state


def rematted(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    return jax.checkpoint(lambda x: attention(x, x, params["layers"][0]))(batch["x"]).mean(), {}, model_state


def crossed(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """Before, in and behind a row of layers."""
    x, memory = batch["x"], batch["memory"]
    memory = memory + attention(memory, memory, params["first"])
    for layer in params["layers"]:
        x = x + attention(x, memory, layer)
    return (x + attention(x, x, params["last"])).mean(), {}, model_state


def asked(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
    """Of the memory's positions none is a query's."""
    return attention(batch["x"], batch["memory"], params["layers"][0]).mean(), {}, model_state


STACK = {"layers": {name: np.stack([layer[name] for layer in layers(3)]) for name in "qkvo"}}
X = {"x": numbers(ROWS, LENGTH, WIDTH)}
BOTH = X | {"memory": numbers(ROWS, OTHER, WIDTH)}
CASES: dict[str, tuple[Any, Any, Any, dict[str, int]]] = {
    "unrolled": (unrolled, {"layers": layers(3)}, X, {"x": LENGTH}),
    "rolled": (rolled, STACK, X, {"x": LENGTH}),
    "rematted": (rematted, {"layers": layers(1)}, X, {"x": LENGTH}),
    "asked": (asked, {"layers": layers(1)}, BOTH, {"x": LENGTH, "memory": OTHER}),
    "crossed": (crossed, {"layers": layers(3), "first": layers(1, 3)[0], "last": layers(1, 7)[0]}, BOTH,
                {"x": LENGTH, "memory": OTHER}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_the_batch(name: str) -> None:
    function, params, batch, wanted = CASES[name]
    trace = plain_trace(function, params=params, batch=batch)
    found, reasons = positions(trace)
    assert not reasons
    names = {trace.leaves[i].name: trace.classes_of(i) for i in trace.leaves_of("batch")}
    assert found == {names[leaf][1]: length for leaf, length in wanted.items()}


def test_what_is_no_attention_is_named_once() -> None:
    def penalised(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x, loss = batch["x"], 0.0
        for layer in params["layers"]:
            weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ layer["q"], x @ layer["k"]))
            loss += jnp.square(weights).sum()
            x = x + jnp.einsum("bqk,bkd->bqd", weights, x @ layer["v"]) @ layer["o"]
        return loss + x.mean(), {}, model_state

    found, (reason,) = positions(plain_trace(penalised, params={"layers": layers(3)}, batch=X))
    assert not found and "neither dropout nor a product with values" in reason


def test_groups_of_a_layer_are_its_attentions() -> None:
    """With a mask made before the layers, which is made again block by block: of it, the group reads positions."""
    trace = plain_trace(unrolled, params={"layers": layers(3)}, batch=X)
    (run,) = trace.runs
    eqns, results = layer_of(trace.closed.jaxpr.eqns, run)
    (group,) = attention_groups(trace, eqns, results, trace.dims.top)
    assert isinstance(group.of, Attention) and group.eqns == group.of.eqns
    sizes = sorted(var.aval.size for var in group.ins)
    assert sizes == [LENGTH] * 2 + [ROWS * LENGTH * WIDTH] * 3
    assert set(map(id, group.eqns)) < set(map(id, eqns))
    assert {id(eqn) for eqn, _ in group.of.steps.values()} - set(map(id, eqns)), "its mask was made before"


def test_blocks_of_positions_are_whole_where_positions_are_split() -> None:
    """Queries that see their own block alone: a device has some of the blocks."""
    num = 2

    def model(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = batch["x"]
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ params["q"], x @ params["k"]))
        x = x + jnp.einsum("bqk,bkd->bqd", weights, x)
        blocks = x.reshape(x.shape[0], num, -1, x.shape[-1])
        local = jax.nn.softmax(jnp.einsum("bnqd,bnkd->bnqk", blocks @ params["q"], blocks))
        return jnp.einsum("bnqk,bnkd->bnqd", local, blocks).reshape(x.shape).mean(), {}, model_state

    batch = {"x": jnp.ones((ROWS, LENGTH - LENGTH % num, WIDTH))}
    trace = plain_trace(model, params={name: jnp.ones((WIDTH, WIDTH)) for name in "qk"}, batch=batch)
    jaxpr = trace.closed.jaxpr
    groups = attention_groups(trace, jaxpr.eqns, jaxpr.outvars, trace.dims.top)
    assert [group.of.query.var.aval.ndim for group in groups] == [3, 4]
    assert in_parts(trace, groups, trace.dims.top) == groups[:1]
