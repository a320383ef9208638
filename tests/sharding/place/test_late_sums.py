"""Products that sum over a split dim are added up before they are reduced, and only where that is the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import assert_close
from flax import linen as nn
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

EXPERTS, ROWS, SEQ, WIDTH, INNER = 3, 8, 6, 12, 16
Weights = Callable[[str, tuple[int, ...]], jax.Array]


def hidden(x: jax.Array, weights: Weights, name: str) -> jax.Array:
    return jnp.tanh(x @ weights(f"up {name}", (WIDTH, INNER)))


def one_by_one(x: jax.Array, weights: Weights, begin: Any = jnp.zeros_like) -> jax.Array:
    """Each expert for all tokens, weighed and added to the others'."""
    gates = jax.nn.softmax(x @ weights("gates", (WIDTH, EXPERTS)))
    total = begin(x)
    for e in range(EXPERTS):
        total = total + (hidden(x, weights, str(e)) @ weights(f"down {e}", (INNER, WIDTH))) * gates[..., e : e + 1]
    return total


def at_once(x: jax.Array, weights: Weights) -> jax.Array:
    """All experts in one product, and their sum in another."""
    gates = jax.nn.softmax(x @ weights("gates", (WIDTH, EXPERTS)))
    up, down = weights("up", (EXPERTS, WIDTH, INNER)), weights("down", (EXPERTS, INNER, WIDTH))
    made = jnp.einsum("bsef,efd->bsed", jnp.tanh(jnp.einsum("bsd,edf->bsef", x, up)), down)
    return jnp.einsum("bsed,bse->bsd", made, gates)


def branches(x: jax.Array, weights: Weights) -> jax.Array:
    """Two branches, one taken off the other, in another order of dims, divided by what each token says."""
    a, b = (hidden(x, weights, name) @ weights(f"down {name}", (INNER, WIDTH)) for name in "ab")
    scale = 1 + jnp.square(x @ weights("scale", (WIDTH, WIDTH)))
    return jnp.transpose(jnp.transpose(a - b, (0, 2, 1)) / jnp.transpose(scale, (0, 2, 1)), (0, 2, 1))


def summed(x: jax.Array, weights: Weights) -> jax.Array:
    """A sum over features of each product: a number a token."""
    made = (hidden(x, weights, "a") @ weights("down a", (INNER, WIDTH))).sum(-1, keepdims=True)
    return x * made


def added(x: jax.Array, weights: Weights) -> jax.Array:
    a, b = (hidden(x, weights, e) @ weights(f"down {e}", (INNER, WIDTH)) for e in "ab")
    return a + b


def with_biases(x: jax.Array, weights: Weights) -> jax.Array:
    """A bias is whole on each device, and would be added by each: it is added to the sum."""
    parts = [
        hidden(x, weights, e) @ weights(f"down {e}", (INNER, WIDTH)) + weights(f"bias {e}", (WIDTH,)) for e in "ab"
    ]
    return parts[0] + parts[1]


def among_others(x: jax.Array, weights: Weights) -> jax.Array:
    """Three products, and between them what each device has whole; one sum is of two such alone."""
    a, b, c = (hidden(x, weights, e) @ weights(f"down {e}", (INNER, WIDTH)) for e in "abc")
    return ((jnp.sin(x) + a) + (weights("bias", (WIDTH,)) + jnp.cos(x))) + ((b + x) + c)


def in_turn(x: jax.Array, weights: Weights) -> jax.Array:
    """The second product is of the first's sum."""
    x = x + hidden(x, weights, "a") @ weights("down a", (INNER, WIDTH))
    return x + hidden(x, weights, "b") @ weights("down b", (INNER, WIDTH))


def not_linear(x: jax.Array, weights: Weights) -> jax.Array:
    parts = [hidden(x, weights, e) @ weights(f"down {e}", (INNER, WIDTH)) for e in "ab"]
    return parts[0] * parts[1]


def from_ones(x: jax.Array, weights: Weights) -> jax.Array:
    """Begins with what is not zero: ones would be there once for each device."""
    return one_by_one(x, weights, jnp.ones_like)


def read_twice(x: jax.Array, weights: Weights) -> jax.Array:
    """What is added up is looked at alone too: no less would be reduced."""
    parts = [hidden(x, weights, e) @ weights(f"down {e}", (INNER, WIDTH)) for e in "ab"]
    return jnp.sin(parts[0]) * jnp.cos(parts[1]) + jnp.sqrt(1 + jnp.square(parts[0] + parts[1]))


def rounded(x: jax.Array, weights: Weights) -> jax.Array:
    """Rounded by its author before it is added: parts that are rounded add up to something else."""
    made = [hidden(x, weights, name) @ weights(f"down {name}", (INNER, WIDTH)) for name in "ab"]
    low = jnp.float32 if x.dtype == jnp.float64 else jnp.float16
    return (made[0].astype(low) + made[1].astype(low)).astype(x.dtype)


# Each with how many streams a forward pass reduces. Of `from_ones` the first expert is added to ones.
LAYERS: dict[str, tuple[Callable[[jax.Array, Weights], jax.Array], float]] = {
    "one by one": (one_by_one, 1), "at once": (at_once, 1), "branches": (branches, 1), "summed": (summed, 1 / WIDTH),
    "added": (added, 1), "with biases": (with_biases, 1), "among others": (among_others, 1), "in turn": (in_turn, 2),
    "not linear": (not_linear, 2), "from ones": (from_ones, EXPERTS),
    "read twice": (read_twice, 2), "rounded": (rounded, 2),
}  # fmt: skip


class Net(nn.Module):
    layer: str
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(self.depth):
            x = x + self._layer(nn.LayerNorm(param_dtype=x.dtype)(x), number)
        return x

    def _layer(self, x: jax.Array, number: int) -> jax.Array:
        def weights(name: str, shape: tuple[int, ...]) -> jax.Array:
            return self.param(f"{name} {number}", nn.initializers.normal(0.5, x.dtype), shape)

        return LAYERS[self.layer][0](x, weights)


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def batch(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(ROWS, SEQ, WIDTH)).astype(dtype) for name in "xy"}


def gradients(layer: str, plan: str, num_devices: int = 8) -> Any:
    program = cjax.parallelize(Net(layer), loss, optax.sgd(0.1), batch(), plan, devices=jax.devices()[:num_devices])
    return jax.tree.map(np.asarray, program.value_and_grad(begin(program), batch()))


@pytest.mark.full(
    "added", "at once", "branches", "from ones", "in turn", "not linear", "read twice", "rounded", "summed"
)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_numbers(layer: str) -> None:
    with jax.enable_x64(True):
        wanted = gradients(layer, "data=1", 1)
        for plan in ("data=2 tensor=4 zero=3", "data=4 tensor=2 microbatches=2"):
            assert_close(gradients(layer, plan), wanted, (1e-9, 1e-12), f"{plan} ")


def streams(compiled: Any, mesh: Any) -> float:
    """How much is reduced over the tensor axis, in what one layer hands to the next."""
    found = audit(compiled, mesh).select("all-reduce", ["tensor"])
    return sum(c.count * sum(float(np.prod(s.dims)) for s in c.shapes) for c in found) / (ROWS * SEQ * WIDTH)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_sum_is_reduced_once(layer: str) -> None:
    program = cjax.parallelize(Net(layer), loss, optax.sgd(0.1), batch(np.float32), "data=2 tensor=4")
    compiled = program._evaluate.lower().compile()
    assert streams(compiled, program.mesh) == pytest.approx(LAYERS[layer][1], abs=0.05)  # two layers, half of the rows


def moved_over_the_tensor_axis(layer: str) -> float:
    readings = Readings(TraceSource(capture(Net(layer), loss, batch(np.float32)), batch(np.float32)))
    words = Plan.parse("data=2 tensor=4")
    found = moved(readings.work(words), readings.split(words), PlanTable.of([words])).by_axis()
    return sum(float(amount[0]) for axes, amount in found.items() if "tensor" in axes)


def test_arithmetic_counts_what_is_added_once() -> None:
    """What is whole has whole gradients, so that biases move nothing over the tensor axis."""
    assert moved_over_the_tensor_axis("with biases") == moved_over_the_tensor_axis("added")
    assert moved_over_the_tensor_axis("in turn") > 1.5 * moved_over_the_tensor_axis("added")


PLANS = ["data=2 tensor=4", "data=2 tensor=4 zero=1", "data=2 tensor=4 precision=bfloat16"]
ANEW = {"one by one": PLANS[2], "at once": PLANS[1], "with biases": PLANS[0], "among others": PLANS[1]}


@pytest.mark.aot
@pytest.mark.full(*(f"{layer}-{plan}" for layer in ANEW for plan in PLANS if plan != ANEW[layer]))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layer", ANEW)
def test_arithmetic_has_what_a_step_moves(layer: str, plan: str) -> None:
    """Forward and backward, on GPUs; weights' gradients too, which are scattered under ZeRO as elsewhere."""
    rows = {name: jax.ShapeDtypeStruct((16, 64, 64), np.float32) for name in "xy"}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"EXPERTS": 3, "WIDTH": 64, "INNER": 128}.items():
            patch.setattr(f"{__name__}.{name}", size)
        readings = Readings(TraceSource(capture(Net(layer), loss, rows), rows))
        program = cjax.parallelize(Net(layer), loss, optax.adamw(1e-3), rows, plan, devices="h100:8")
        facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
        words = program.plan
        wanted = moved(readings.work(words), readings.split(words), PlanTable.of([words])).by_axis()
    for axis in ("tensor", "data"):
        assert facts.moved_by_axis()[axis] == pytest.approx(float(wanted[axis][0]), rel=0.05)
