"""Layers in a Python loop over rows of stacked weights, written as the scan that they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import BATCH, DEPTH, ends, hidden, numbers, plain_trace, stacked, weights

from cjax.jax_compat.core import Equation, jaxpr_as_fun, make_jaxpr
from cjax.jax_compat.jaxprs import traceback_of
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.jaxpr.tracebacks import place
from cjax.trace.jaxpr.view import is_scan, scan_of
from cjax.trace.layers.rows import looped_over_rows
from cjax.trace.stages.stacks import find_stacks

LAYERS = stacked(weights())
SCALES = numbers(DEPTH)
X = numbers(5, 4)
Model = Callable[[Any, Any], Any]


def row(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda w: w[i], tree)


def plain(layers: Any, x: Any) -> Any:
    for i in range(DEPTH):
        x = x + hidden(x, row(layers, i))
    return x


def unstacked(layers: Any, x: Any) -> Any:
    for up, down in zip(layers["up"], layers["down"], strict=True):
        x = x + hidden(x, {"up": up, "down": down})
    return x


def checkpointed(layers: Any, x: Any) -> Any:
    for i in range(DEPTH):
        x = jax.checkpoint(lambda x, layer: x + hidden(x, layer))(x, row(layers, i))
    return x


def everything(layers: Any, x: Any) -> Any:
    """Numbers, keys and results of each layer's own; the first's input and the last's middle are read behind it."""
    skip, key, each, last = jnp.sin(x), jax.random.key(3), [], x
    for i in range(DEPTH):
        last = hidden(x, row(layers, i)) * SCALES[i]
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
        each.append(jnp.square(last).mean())
        x = x * (1 - 0.1 * i) + jnp.where(keep, last, 0) + skip
    return x, jnp.stack(each) * 2, jnp.abs(last), jnp.square(layers["up"]).sum()


def twice(layers: Any, x: Any) -> Any:
    return plain(layers, jnp.tanh(plain(layers, x)))


LOOPS: dict[str, tuple[Model, int]] = {
    "plain": (plain, 1),
    "unstacked": (unstacked, 1),
    "checkpointed": (checkpointed, 1),
    "everything": (everything, 1),
    "twice": (twice, 2),
}


def traced(model: Model) -> tuple[Any, Any]:
    flat = simplify(make_jaxpr(model)(LAYERS, X))
    return flat, looped_over_rows(flat, len(jax.tree.leaves(LAYERS)))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_the_same(name: str) -> None:
    model, num = LOOPS[name]
    flat, looped = traced(model)
    scans = [scan_of(eqn) for eqn in looped.jaxpr.eqns if is_scan(eqn)]
    assert [loop.length for loop in scans] == [DEPTH] * num
    assert all(set(looped.jaxpr.invars[:2]) <= set(loop.xs(loop.eqn.invars)) for loop in scans), "weights as they are"
    given = [*jax.tree.leaves(LAYERS), X]
    for one, other in zip(jaxpr_as_fun(looped)(*given), jaxpr_as_fun(flat)(*given), strict=True):
        np.testing.assert_allclose(one, other, 1e-6, 1e-6)


def backwards(layers: Any, x: Any) -> Any:
    for i in reversed(range(DEPTH)):
        x = x + hidden(x, row(layers, i))
    return x


def but_for_one(layers: Any, x: Any) -> Any:
    for i in range(DEPTH - 1):
        x = x + hidden(x, row(layers, i))
    return x


def shared(layers: Any, x: Any) -> Any:
    for i in (0, 0, 1, 1, 2, 2):
        x = x + hidden(x, row(layers, i))
    return x


def one_weight(layers: Any, x: Any) -> Any:
    for i in range(DEPTH):
        x = x + jnp.tanh(x @ layers["up"][i]) @ jnp.ones((6, 4))
    return x


def results_each(layers: Any, x: Any) -> Any:
    """As a state that each layer keeps."""
    found = []
    for i in range(DEPTH):
        x = x + hidden(x, row(layers, i))
        found.append(x)
    return found


@pytest.mark.parametrize("model", [backwards, but_for_one, shared, one_weight, results_each])
def test_what_stays_as_it_is(model: Model) -> None:
    flat, looped = traced(model)
    assert looped is flat


def test_stages_keep_rows_of_such_weights() -> None:
    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        return (plain(params["layers"], batch["x"] @ params["in"]) @ params["out"]).sum(), {}, model_state

    trace = plain_trace(loss, params=ends(layers=LAYERS), batch=BATCH)
    (stack,) = find_stacks(trace)
    names = sorted(trace.leaves[i].name for group in stack.weights for i in group)
    assert names == ["layers/down", "layers/up"]
    assert isinstance(stack.of, Equation)
    products = [eqn for eqn in scan_of(stack.of).body.eqns if name_of(eqn) == "dot_general"]
    said = [place(traceback_of(eqn)) for eqn in products]
    assert len(said) == 2 and all("traces.py" in where for where in said), "an error names the author's line"
