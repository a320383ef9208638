"""Experts that tokens are sorted for: a token's rows are added up before they are reduced, and so are gradients."""

import functools
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from starts import begin

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.plan import Plan
from cjax.planner.costs.moved import moved
from cjax.planner.reading.readings import Readings
from cjax.planner.table import PlanTable
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
BATCH, LENGTH, WIDTH, INNER, EXPERTS = 8, 6, 20, 16, 3
Weights = Callable[[str, tuple[int, ...]], jax.Array]


def sent(x: jax.Array, weights: Weights, top: int, names: Any = None) -> tuple[jax.Array, ...]:
    """Tokens, gates, the order of rows, and how many rows each expert has. Experts may have other names."""
    tokens = x.reshape(-1, WIDTH)
    best, which = lax.top_k(jax.nn.softmax(tokens @ weights("gates", (WIDTH, EXPERTS))), top)
    which = which if names is None else jnp.asarray(names)[which]
    order = jnp.argsort(which.reshape(-1))
    return tokens, best, order, which.reshape(-1)[order], jnp.bincount(which.reshape(-1), length=EXPERTS)


def experts(rows: jax.Array, sizes: jax.Array, weights: Weights) -> jax.Array:
    gate, up = (lax.ragged_dot(rows, weights(name, (EXPERTS, WIDTH, INNER)), sizes) for name in ("gate", "up"))
    return lax.ragged_dot(jnp.tanh(gate) * up, weights("down", (EXPERTS, INNER, WIDTH)), sizes)


def put_back(made: jax.Array, order: jax.Array, best: jax.Array) -> jax.Array:
    return (made[jnp.argsort(order)].reshape(*best.shape, WIDTH) * best[..., None]).sum(1)


def two(x: jax.Array, weights: Weights, top: int = 2) -> jax.Array:
    tokens, best, order, _, sizes = sent(x, weights, top)
    return put_back(experts(tokens[order // top], sizes, weights), order, best)


def one(x: jax.Array, weights: Weights) -> jax.Array:
    """As many rows as tokens: nothing is gained."""
    return two(x, weights, 1)


def with_biases(x: jax.Array, weights: Weights) -> jax.Array:
    """Each expert's bias is added to its rows, before they are put back."""
    tokens, best, order, expert, sizes = sent(x, weights, 2)
    made = experts(tokens[order // 2], sizes, weights) + weights("bias", (EXPERTS, WIDTH))[expert]
    return put_back(made, order, best)


def by_einsum(x: jax.Array, weights: Weights) -> jax.Array:
    """Weighed and added up in one product."""
    tokens, best, order, _, sizes = sent(x, weights, 2)
    made = experts(tokens[order // 2], sizes, weights)[jnp.argsort(order)].reshape(-1, 2, WIDTH)
    return jnp.einsum("tkd,tk->td", made, best)


def renamed(x: jax.Array, weights: Weights) -> jax.Array:
    """Of names that are looked up nobody knows that they begin at zero, so that devices' rows are put in one order."""
    tokens, best, order, _, sizes = sent(x, weights, 2, [1, 2, 0])
    return put_back(experts(tokens[order // 2], sizes, weights), order, best)


def scattered(x: jax.Array, weights: Weights, names: Any = None) -> jax.Array:
    """Weighed as they are sorted, and added to zeros."""
    tokens, best, order, _, sizes = sent(x, weights, 2, names)
    made = experts(tokens[order // 2], sizes, weights) * best.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[order // 2].add(made)


def onto_ones(x: jax.Array, weights: Weights) -> jax.Array:
    """What is added to is there once, and not once for each device."""
    tokens, best, order, _, sizes = sent(x, weights, 2)
    made = experts(tokens[order // 2], sizes, weights) * best.reshape(-1)[order][:, None]
    return jnp.ones_like(tokens).at[order // 2].add(made)


def curved(x: jax.Array, weights: Weights) -> jax.Array:
    """What is made of each row is no sum of parts."""
    tokens, best, order, _, sizes = sent(x, weights, 2)
    return put_back(jnp.sin(experts(tokens[order // 2], sizes, weights)), order, best)


def rows_read(x: jax.Array, weights: Weights) -> jax.Array:
    """Rows are read by others than products."""
    tokens, best, order, _, sizes = sent(x, weights, 2)
    rows = tokens[order // 2]
    return put_back(experts(rows, sizes, weights) + jnp.sin(rows), order, best)


# Each with how many times as much as the tokens a layer reduces, forward and backward; two rows a token are two. The
# gradients of rows that others read too are reduced for each of two products.
LAYERS: dict[str, tuple[Callable[[jax.Array, Weights], jax.Array], float]] = {
    "two": (two, 2), "one": (one, 2), "with biases": (with_biases, 2), "by einsum": (by_einsum, 2),
    "scattered": (scattered, 2), "onto ones": (onto_ones, 3), "curved": (curved, 3), "rows read": (rows_read, 6),
    "renamed": (renamed, 2), "renamed, scattered": (functools.partial(scattered, names=[1, 2, 0]), 2),
}  # fmt: skip


class Net(nn.Module):
    layer: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer, _ = LAYERS[self.layer]
        for block in "ab":

            def weights(name: str, shape: tuple[int, ...], block: str = block) -> jax.Array:
                return self.param(f"{name} {block}", nn.initializers.normal(0.4), shape)

            x = x + layer(x, weights).reshape(x.shape)
        return x


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def batch(rows: int = BATCH, length: int = LENGTH, width: int = WIDTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, length, width)).astype(np.float32) for name in "xy"}


def program_of(layer: str, plan: str) -> Any:
    devices = jax.devices()[:1] if plan == "data=1" else None
    return cjax.parallelize(Net(layer), loss, optax.sgd(0.1), batch(), plan, devices=devices)


PLANS = ["tensor=8", "data=2 tensor=4", "data=4 tensor=2 zero=3", "data=2 tensor=4 remat=block", "data=8"]
# Each plan and each layer once; in the whole table, each with each.
PAIRS = [
    *zip(LAYERS, itertools.cycle(PLANS), strict=False),
    ("two", "data=2 tensor=4"), ("with biases", "tensor=8"), ("scattered", "data=2 tensor=4"), ("onto ones", "data=8"),
    ("renamed", "data=8"), ("renamed", "data=2 tensor=4"), ("renamed, scattered", "data=2 tensor=4"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "plan"), [*itertools.product(LAYERS, PLANS)] if ALL else PAIRS)
def test_the_same_numbers(layer: str, plan: str) -> None:
    programs = (program_of(layer, plan), program_of(layer, "data=1"))
    mine, theirs = (program.value_and_grad(begin(program), batch()) for program in programs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5, atol=1e-6)


def arithmetic(layer: str, words: Plan, given: Any) -> dict[str, float]:
    readings = Readings(TraceSource(capture(Net(layer), loss, given), given))
    found = moved(readings.work(words), readings.split(words), PlanTable.of([words])).by_axis()
    return {axes: float(amount[0]) for axes, amount in found.items()}


@pytest.mark.parametrize("layer", LAYERS)
def test_tokens_are_reduced_and_not_their_rows(layer: str) -> None:
    """Beside them, a number for each row: a gate's gradient. Arithmetic says the same."""
    program = program_of(layer, "tensor=8")
    facts = audit(program.lower().compile(), program.mesh)
    found = facts.select("all-reduce", ["tensor"])
    reduced = sum(c.count * sum(float(np.prod(s.dims)) for s in c.shapes) for c in found) / (BATCH * LENGTH * WIDTH)
    assert reduced / 2 == pytest.approx(LAYERS[layer][1], abs=0.3)  # two layers
    if layer != "rows read":  # both reductions of whose gradients are one on GPUs
        wanted = arithmetic(layer, program.plan, batch())
        assert facts.moved_by_axis()["tensor"] == pytest.approx(wanted["tensor"], rel=0.01)


def test_rows_are_added_up_by_those_who_have_them() -> None:
    """Of tokens devices gather all, scatter the gradients; what comes back is scattered, and its gradient gathered."""
    program = program_of("renamed, scattered", "data=8")
    facts = audit(program.lower().compile(), program.mesh)
    wanted = arithmetic("renamed, scattered", program.plan, batch())
    assert facts.moved_by_axis()["data"] == pytest.approx(wanted["data"], rel=0.15)  # gates and places, too
    tokens = [
        c for c in facts.select("reduce-scatter", ["data"]) for s in c.shapes if s.dims == (BATCH * LENGTH, WIDTH)
    ]
    assert sum(c.count for c in tokens) == 2 * 2


@pytest.mark.parametrize("layer", ["two", "one", "with biases", "by einsum", "scattered", "onto ones", "rows read"])
def test_devices_sort_their_own_rows(layer: str) -> None:
    """Data parallelism moves the gradients of weights, as for any model."""
    program = program_of(layer, "data=8")
    facts = audit(program.lower().compile(), program.mesh)
    wanted = sum(leaf.size for leaf in jax.tree.leaves(program.params(program.init(0)))) * 4 * 2 * 7 / 8
    assert facts.moved_by_axis()["data"] == pytest.approx(wanted, rel=0.01)
    assert arithmetic(layer, program.plan, batch())["data"] == pytest.approx(wanted, rel=0.01)


def test_gradients_of_rows_in_order_are_looked_up() -> None:
    """Each device has all of them, and every token is two rows."""
    scattered = re.findall(
        r"stablehlo.scatter.*?\) -> tensor<([^>]*)>", program_of("two", "tensor=8").lower().as_text(), re.S
    )
    assert not [shape for shape in scattered if shape.endswith(f"x{WIDTH}xf32")]


GPU_PLANS = ["tensor=8", "data=2 tensor=4 precision=bfloat16", "data=8", "data=4 tensor=2 remat=block"]
ANEW = {
    "two": GPU_PLANS[0], "with biases": GPU_PLANS[1], "by einsum": GPU_PLANS[3], "scattered": GPU_PLANS[2],
    "renamed": GPU_PLANS[1], "renamed, scattered": GPU_PLANS[2],
}  # fmt: skip


@pytest.mark.aot
@pytest.mark.full(*(f"{layer}-{plan}" for layer in ANEW for plan in GPU_PLANS if plan != ANEW[layer]))
@pytest.mark.parametrize("plan", GPU_PLANS)
@pytest.mark.parametrize("layer", ANEW)
def test_arithmetic_has_what_a_step_moves(layer: str, plan: str) -> None:
    """Forward and backward, on GPUs."""
    rows = {name: jax.ShapeDtypeStruct((16, 64, 64), np.float32) for name in "xy"}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"WIDTH": 64, "INNER": 128}.items():
            patch.setattr(f"{__name__}.{name}", size)
        program = cjax.parallelize(Net(layer), loss, optax.adamw(1e-3), rows, plan, devices="h100:8")
        facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
        wanted = arithmetic(layer, program.plan, rows)
    for axis, amount in facts.moved_by_axis().items():
        assert amount == pytest.approx(wanted[axis], rel=0.06)
