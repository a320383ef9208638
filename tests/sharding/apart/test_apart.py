"""Operations that XLA's partitioner gets wrong, computed on each device's own parts: models of them, whole programs."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from starts import begin

import cjax
from cjax.mesh import build_mesh
from cjax.sharding.apart.apart import apart, evaluate_apart
from cjax.sharding.apart.lanes import Lane, lanes
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.jaxpr.simplify import simplify

ROWS, LENGTH, WIDTH = 16, 6, 16


class Depthwise(nn.Module):
    """Layers of a depthwise convolution, as ConvNeXt and Mamba have them, and a grouped one in front."""

    layers: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (3,), feature_group_count=4)(x)
        for _ in range(self.layers):
            y = nn.Conv(WIDTH, (4,), feature_group_count=WIDTH, padding=[(3, 0)])(x)
            x = x + nn.Dense(WIDTH)(nn.silu(nn.Dense(2 * WIDTH)(y)))
        return nn.Dense(4)(x)


class Conditional(nn.Module):
    """A depthwise convolution in a branch, and one whose gradient the author has written."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        a, b = (self.param(name, nn.initializers.normal(), (3, 1, WIDTH)) for name in "ab")
        x = nn.Dense(WIDTH)(x)
        x = lax.cond(x.sum() > 99, lambda: x, lambda: x + convolved(x, a))
        return nn.Dense(4)(x + 2 * own(x, b))


class Determinants(nn.Module):
    """Layers that each scale by a determinant, whose derivative, JAX's own, gathers rows."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            y = jnp.tanh(nn.Dense(x.shape[-1])(x))
            products = jnp.einsum("bsd,bse->bde", y, y) + jnp.diag(1.0 + jnp.arange(x.shape[-1]))
            x = nn.Dense(x.shape[-1])(x) + 0.1 * jnp.linalg.slogdet(products)[1][:, None, None]
        return x


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
    )


@jax.custom_vjp
def own(x: jax.Array, w: jax.Array) -> jax.Array:
    return convolved(x, w)


own.defvjp(lambda x, w: jax.vjp(convolved, x, w), lambda pull, grad: tuple(0.5 * g for g in pull(grad)))


def off(model: nn.Module, plan: str) -> float:
    """How far the gradients of a program are from those of one device, of the largest gradient's norm."""
    x = np.random.default_rng(0).standard_normal((ROWS, LENGTH, 8)).astype(np.float32)

    def loss(model: Any, batch: Any) -> jax.Array:
        return (jnp.sin(model(batch)) ** 2).mean()

    program = cjax.parallelize(model, loss, optax.sgd(1.0), x, plan)
    state = begin(program)
    params = jax.tree.map(np.asarray, program.params(state))
    _, found = program.value_and_grad(state, x)
    wanted = jax.jit(jax.grad(lambda p: loss(model.bind({"params": p}), x)))(params)
    return max(
        float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


@pytest.mark.full(
    "data=2 tensor=2 pipeline=1f1b:2 microbatches=2",
    "data=2 tensor=2d:4",
    "data=4 tensor=2 microbatches=2 zero=2",
    "data=8 zero=3",
)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 tensor=4 zero=1",
        "data=2 tensor=2d:4",
        "data=2 tensor=2 pipeline=1f1b:2 microbatches=2",
        "data=4 tensor=2 microbatches=2 zero=2",
        "data=8 zero=3",
    ],
)
def test_gradients_of_grouped_and_depthwise_convolutions(plan: str) -> None:
    assert off(Depthwise(), plan) < 2e-5


def test_convolutions_in_branches_and_in_derivatives_of_the_authors_own() -> None:
    assert off(Conditional(), "data=2 tensor=4") < 2e-5


def equation(function: Any, *shapes: tuple[int, ...]) -> Any:
    return simplify(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes))).eqns[-1]


@pytest.mark.full
def test_determinants_of_layers_in_stages_that_two_axes_split() -> None:
    """XLA's partitioner stopped the process here (JAX 0.10.2 and 0.12.0.1)."""
    assert off(Determinants(), "data=2 tensor=2 pipeline=1f1b:2 microbatches=2 loss=microbatch") < 2e-5


def conv(groups: int, window: int = 3) -> Any:
    def of(x: Any, w: Any) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups)

    return equation(of, (8, 6, 12), (window, 12 // groups, 24))


@pytest.mark.parametrize(
    ("groups", "x", "w", "split"),
    [
        (
            1,
            P("data", None, "tensor"),
            P(None, "tensor"),
            [P("data", None, "tensor"), P(None, "tensor"), ("tensor",)],
        ),  # channels are summed over
        (1, P("data", None, "tensor"), P(), [P("data"), P(), ()]),  # a sum would cost more than to bring them together
        (
            6,
            P(None, None, ("tensor", "data")),
            P(None, None, ("tensor", "data")),
            [P(None, None, "tensor"), P(None, None, "tensor"), ()],
        ),
        (
            4,
            P(None, None, ("tensor", "data")),
            P(),
            [P(None, None, ("tensor", "data")), P(None, None, ("tensor", "data")), ()],
        ),
    ],
)
def test_each_device_computes_its_part(groups: int, x: P, w: P, split: list[Any]) -> None:
    """Along axes that divide what is done one by one; what parts make of channels that are summed over is added up."""
    eqn, mesh = conv(groups), build_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    parts = apart(eqn, eqn.params, [x, w], [P(None, None, x[2] if groups > 1 else None)], dict(mesh.shape))
    whole = [as_spec([axes_of_entry(entry) for entry in (*spec, *[None] * 3)][:3]) for spec in split[:2]]
    assert [*parts.ins, parts.sums] == [*whole, split[2]]
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=v.aval.shape), jnp.float32) for v in eqn.invars]
    (found,) = jax.jit(lambda *given: evaluate_apart(eqn, given, parts, mesh))(*given)
    np.testing.assert_allclose(found, eqn.primitive.bind(*given, **eqn.params), rtol=1e-4, atol=1e-4)


def test_lanes_of_a_convolution() -> None:
    rows = Lane((0, None), (0,), 8)
    assert lanes(conv(4)) == [rows, Lane((2, 2), (2,), 4, ("feature_group_count", None))]
    dense = [rows, Lane((None, 2), (2,), 24), Lane((2, 1), (None,), 12)]
    assert lanes(conv(1)) == dense
    assert lanes(conv(1, window=1)) == [*dense, Lane((1, None), (1,), 6)], "a window of one moves nothing"


def test_lanes_of_windows_and_transforms() -> None:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID")

    assert lanes(equation(pool, (8, 6, 4))) == [Lane((0,), (0,), 8), Lane((2,), (2,), 4)]
    assert lanes(equation(jnp.fft.rfft, (8, 6, 4))) == [Lane((0,), (0,), 8), Lane((1,), (1,), 6)]
    assert lanes(equation(jnp.sin, (8,))) == []
