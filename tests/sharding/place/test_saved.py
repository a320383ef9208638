"""What layers save for the backward pass: sums of products and biases, and of complex numbers their parts; models that
are made of such numbers.
"""

import os
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals
from starts import begin

import cjax
from cjax.program.steps import make_step
from cjax.sharding.place.saved import KEPT, checkpointed, has_complex, keep_sum, with_bias

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
ROWS, LENGTH, WIDTH, STATE = 16, 6, 8, 4
LAYERS = 4 if ALL else 2


def scanned(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    """A diagonal linear recurrence over positions."""

    def joined(p: Any, q: Any) -> Any:
        return p[0] * q[0], q[0] * p[1] + q[1]

    return jax.lax.associative_scan(joined, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)[1]


def complex_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    a, b = jax.random.split(key)
    return 0.3 * jax.lax.complex(jax.random.normal(a, shape), jax.random.normal(b, shape))


class StateSpace(nn.Module):
    """A layer as S5 has it; its matrices are complex parameters, or pairs of real ones."""

    paired: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def matrix(name: str, shape: tuple[int, int]) -> jax.Array:
            if not self.paired:
                return self.param(name, complex_normal, shape)
            pair = self.param(name, nn.initializers.normal(0.3), (*shape, 2))
            return pair[..., 0] + 1j * pair[..., 1]

        decay = self.param("decay", nn.initializers.normal(), (STATE,))
        turn = self.param("turn", nn.initializers.normal(), (STATE,))
        states = scanned(jnp.exp(-jnp.exp(decay) + 1j * turn), nn.LayerNorm()(x) @ matrix("B", (WIDTH, STATE)))
        return x + nn.Dense(WIDTH)(nn.gelu(2 * (states @ matrix("C", (STATE, WIDTH))).real))


class Linen(nn.Module):
    paired: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        turns = jnp.exp(1j * jnp.arange(LENGTH))[:, None]  # read by all layers, as rotary tables are
        for _ in range(LAYERS):
            x = StateSpace(self.paired)(x) + (x * turns).real
        return nn.Dense(4)(x)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.decay = nnx.Param(jax.random.normal(rngs.params(), (STATE,)))
        self.b = nnx.Param(complex_normal(rngs.params(), (WIDTH, STATE)))
        self.c = nnx.Param(complex_normal(rngs.params(), (STATE, WIDTH)))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        states = scanned(jnp.exp(-jnp.exp(self.decay[...]) + 1j), x @ self.b[...])
        return x + self.out(jnp.tanh((states @ self.c[...]).real))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: Any, batch: Any) -> jax.Array:
    return (jnp.sin(model(batch["x"])) ** 2 * batch["w"].real).mean()


BATCH = {
    "x": np.random.default_rng(0).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32),
    "w": (1 + 1j * np.arange(ROWS).reshape(ROWS, 1, 1)).astype(np.complex64),
}


def distance(found: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b)) for a, b in pairs)


def compared(model: Any, plan: str, tolerance: float) -> None:
    """A step of Adam under a plan, beside one on one device: gradients, their norm, and new parameters."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    program = cjax.parallelize(model, loss, optimizer, BATCH, plan)
    state = begin(program)
    params = jax.tree.map(np.asarray, program.params(state))
    if isinstance(model, nn.Module):
        graded = jax.jit(jax.grad(lambda p: loss(model.bind({"params": p}), BATCH)))
    else:
        graph, _, rest = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))), nnx.Param, ...)
        graded = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p, rest), BATCH)))
    wanted = graded(params)
    _, found = program.value_and_grad(state, BATCH)
    assert distance(found, wanted) < tolerance
    state, metrics = program.step(state, BATCH)
    norm, moved = jax.jit(stepped, static_argnums=0)(optimizer, wanted, params)
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=tolerance)
    assert distance(program.params(state), moved) < tolerance


def stepped(optimizer: optax.GradientTransformation, grads: Any, params: Any) -> Any:
    """The gradients' norm, and what the optimizer makes of the parameters by itself."""
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.tree.norm(grads), optax.apply_updates(params, updates)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ("data=8", 3e-5),
        ("data=4 tensor=2 zero=3 remat=dots", 3e-5),
        ("data=4 tensor=2 microbatches=2 zero=2 remat=block", 3e-5),
        ("data=2 tensor=2 pipeline=1f1b:2 microbatches=4", 3e-5),
    ][0 if ALL else 3 :],
)
def test_complex_parameters_in_layers(plan: str, tolerance: float) -> None:
    compared(Linen(), plan, tolerance)


@pytest.mark.full
def test_complex_numbers_stay_what_they_are_under_bfloat16() -> None:
    errors, graded = [], jax.jit(jax.grad(lambda p: loss(Linen().bind({"params": p}), BATCH)))
    for plan, devices in (("data=8", jax.devices()), ("data=1", jax.devices()[:1])):
        plan = f"{plan} precision=bfloat16"
        program = cjax.parallelize(Linen(), loss, optax.adam(1e-2), BATCH, plan, devices=devices)
        state = begin(program)
        params = jax.tree.map(np.asarray, program.params(state))
        wanted = graded(params)
        found = jax.tree.map(np.asarray, program.value_and_grad(state, BATCH)[1])
        assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, params)
        errors.append(float(optax.tree.norm(jax.tree.map(lambda a, b: a - b, found, wanted))))
    assert 0 < errors[0] < 1.5 * errors[1], "of rounding, what one device has"


@pytest.mark.full
def test_complex_numbers_made_of_real_parameters() -> None:
    compared(Linen(paired=True), "data=4 tensor=2 zero=1", 3e-5)


@pytest.mark.full
def test_complex_parameters_of_an_nnx_model() -> None:
    compared(lambda rngs: Stack(rngs), "data=2 tensor=2 pipeline=gpipe:2 microbatches=2", 3e-5)


def test_a_checkpoint_saves_no_complex_numbers() -> None:
    table = jnp.exp(1j * jnp.arange(4.0))

    def layer(x: jax.Array) -> jax.Array:
        return jnp.sin((x * table) @ table)

    x = jnp.ones((8, 4), jnp.complex64)
    body = checkpointed(layer, "none", has_complex(jax.make_jaxpr(layer)(x).jaxpr))
    saved = [aval.dtype for aval, _ in saved_residuals(lambda x: body(x).real.sum(), x)]
    assert saved and not any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in saved)
    np.testing.assert_allclose(
        jax.grad(lambda x: body(x).real.sum())(x), jax.grad(lambda x: layer(x).real.sum())(x), rtol=1e-5
    )


# -- products and their biases ----------------------------------------------------------------------------------------
SUMS: dict[str, Callable[..., Any]] = {
    "a vector": lambda x, w, b, r: x @ w + b,
    "in front": lambda x, w, b, r: b + x @ w,
    "of as many dims": lambda x, w, b, r: x @ w + b.reshape(1, 1, -1),
    "spread by hand": lambda x, w, b, r: x @ w + jnp.broadcast_to(b, r.shape),
    "a number": lambda x, w, b, r: x @ w + 1.0,
    "behind a cast": lambda x, w, b, r: (x @ w).astype(jnp.bfloat16) + b.astype(jnp.bfloat16),
    "behind a reshape": lambda x, w, b, r: (x.reshape(-1, WIDTH) @ w).reshape(r.shape) + b,
    "in a loop": lambda x, w, b, r: jax.lax.scan(lambda c, _: (c + x @ w, (x @ w + b).sum()), r, None, 3)[1],
    "under a checkpoint": lambda x, w, b, r: jax.checkpoint(lambda x: jnp.tanh(x @ w + b))(x),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "a residual": lambda x, w, b, r: x @ w + r,
    "two products": lambda x, w, b, r: x @ w + r @ w.T @ w,
    "read twice": lambda x, w, b, r: (lambda y: y + b + jnp.tanh(y))(x @ w),
    "read behind the add too": lambda x, w, b, r: (lambda y: ((y + b).sum(), (y * y).sum()))(x @ w),
    "handed out": lambda x, w, b, r: (lambda y: (y, y + b))(x @ w),
    "of no product": lambda x, w, b, r: jnp.tanh(x) + b[0],
    "what is not added": lambda x, w, b, r: x @ w - b,
    "behind what bends": lambda x, w, b, r: jnp.tanh(x @ w) + b,
}
GIVEN = (
    jnp.ones((ROWS, LENGTH, WIDTH)), jnp.ones((WIDTH, 12)), jnp.ones(12), jnp.ones((ROWS, LENGTH, 12)),
)  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_bias_behind_a_product_is_found(name: str) -> None:
    assert len(with_bias(jax.make_jaxpr(SUMS[name])(*GIVEN).jaxpr)) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_adds_no_bias_to_a_product_of_its_own_is_not(name: str) -> None:
    assert not with_bias(jax.make_jaxpr(OTHERS[name])(*GIVEN).jaxpr)


class Biased(nn.Module):
    """Layers of two products with their biases, of which the first is read by what bends."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(24)(nn.LayerNorm()(x))))
        return x


@pytest.mark.parametrize(("remat", "names"), [("none", 2), ("dots", 0), ("block", 0)])
def test_sums_are_saved_where_products_are(remat: str, names: int) -> None:
    """In the step of a model: each of a layer's two, and nothing where less is saved."""
    program = cjax.parallelize(Biased(), loss, optax.sgd(0.1), BATCH, f"remat={remat}")
    text = str(make_step(program._composed).trace(*program._inputs).jaxpr)
    assert text.count("name=cjax.kept") == names


@pytest.mark.parametrize("low", [False, True])
def test_the_sum_is_saved_in_place_of_its_product(low: bool) -> None:
    """As many bytes, and one of the two."""
    dtype = jnp.bfloat16 if low else jnp.float32
    x, w, b, _ = (array.astype(dtype) for array in GIVEN)

    def layer(kept: bool) -> Callable[..., Any]:
        def run(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
            product = x @ w
            return jnp.tanh(keep_sum(product + b, [product, b], "none") if kept else product + b)

        return checkpointed(run, "none", False)

    ours, plain = (
        [aval for aval, why in saved_residuals(layer(kept), x, w, b) if "argument" not in why] for kept in (True, False)
    )
    large = (ROWS, LENGTH, 12)
    assert [aval.shape for aval in plain].count(large) == [aval.shape for aval in ours].count(large) == 1
    assert sum(a.size * a.dtype.itemsize for a in ours) <= sum(a.size * a.dtype.itemsize for a in plain)
    why = [why for aval, why in saved_residuals(layer(True), x, w, b) if aval.shape == large]
    assert why[0].startswith("named 'cjax.kept'"), why
    for one, other in zip(
        *(jax.grad(lambda *a, k=k: layer(k)(*a).sum(), (0, 1, 2))(x, w, b) for k in (0, 1)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_a_sum_that_is_wider_than_its_product_is_made_again() -> None:
    def is_kept(bias: Any, remat: str = "none") -> bool:
        def added(product: jax.Array, bias: jax.Array) -> jax.Array:
            return keep_sum(product + bias, [product, bias], remat)

        return KEPT in str(jax.make_jaxpr(added)(jnp.ones((4, 3), jnp.bfloat16), jnp.ones(3, bias)))

    assert is_kept(jnp.bfloat16) and not is_kept(jnp.float32)
    assert not is_kept(jnp.bfloat16, "dots")


def test_complex_sums_are_kept_as_two_real_numbers_by_others() -> None:
    product, bias = jnp.ones((4, 3), jnp.complex64), jnp.ones(3, jnp.complex64)
    traced = jax.make_jaxpr(lambda x, b: keep_sum(x + b, [x, b], "none"))(product, bias)
    assert "name" not in [eqn.primitive.name for eqn in traced.eqns]
