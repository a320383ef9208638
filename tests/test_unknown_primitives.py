"""Operations of which cjax has no facts, as planted faults: nothing is related by them, nothing split, and all named.

A user's own primitive is one that no vocabulary can have, also where it has the name of one of JAX's: believed to be
that one, it would be split where it mixes. A Fourier transform and a factorisation are planted as such: JAX's own
primitives that cjax is made to take for somebody else's, so that no table has anything of them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from starts import begin

import cjax
from cjax.jax_compat.jaxprs import is_of_jax
from cjax.program import description
from cjax.trace.jaxpr import primitives
from cjax.trace.jaxpr.view import variable_of

ROWS, WIDTH = 8, 8
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, 6, WIDTH)).astype(np.float32)}
PLANS = ["data=8", "data=2 tensor=4", "zero=3 data=4 tensor=2"]

# A user's own: each row's running sum along the last dim but one, and the mean over all rows added to it. Shapes agree,
# elements do not go by their places, and rows meet. One has a name of its own, the other that of JAX's, which goes
# element by element and would be split any way.
mixed_p, spread_p = Primitive("test_mixed"), Primitive("test_spread")
tanh_p, spread_back_p = Primitive("tanh"), Primitive("neg")


def mix(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, axis=-2) + x.mean(axis=0, keepdims=True)


def spread(x: jax.Array) -> jax.Array:
    """The transpose of `mix`."""
    return jnp.cumsum(x[..., ::-1, :], axis=-2)[..., ::-1, :] + x.mean(axis=0, keepdims=True)


def define(there_p: Primitive, back_p: Primitive) -> None:
    """Makes of two primitives `mix` and its transpose."""
    for own_p, other_p, rule in ((there_p, back_p, mix), (back_p, there_p, spread)):
        own_p.def_impl(jax.jit(rule))
        own_p.def_abstract_eval(lambda x: x)
        mlir.register_lowering(own_p, mlir.lower_fun(rule, multiple_results=False))
        ad.deflinear2(own_p, lambda gradient, _, other_p=other_p: [other_p.bind(gradient)])


define(mixed_p, spread_p)
define(tanh_p, spread_back_p)


def _batched(args: Any, dims: Any) -> Any:
    return lax.map(mixed_p.bind, jnp.moveaxis(args[0], dims[0], 0)), 0


batching.primitive_batchers[mixed_p] = _batched


def factor(y: jax.Array) -> jax.Array:
    square = jnp.einsum("bsd,bse->bde", y, y) + 3 * jnp.eye(WIDTH)
    return y @ lax.linalg.cholesky(square)


OPERATIONS = {
    "test_mixed": mixed_p.bind,
    "tanh": tanh_p.bind,
    "fft": lambda y: jnp.fft.fft(y, axis=1).real,
    "cholesky": factor,
}


class Net(nnx.Module):
    """Two layers around the operation, which reads what `tensor` splits."""

    def __init__(self, rngs: nnx.Rngs, name: str) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        inside = self.name != "cholesky"
        y = jnp.tanh(self.up(x))
        y = self.down(OPERATIONS[self.name](y) if inside else y)
        return y if inside else OPERATIONS[self.name](y)


def program(name: str, plan: str, wrap: Any = lambda call: call, devices: int = 8) -> cjax.Program:
    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(wrap(model)(batch["x"])).mean()

    where = jax.devices()[:devices]
    return cjax.parallelize(lambda rngs: Net(rngs, name), loss, optax.sgd(0.1), BATCH, plan, devices=where)


@pytest.fixture(params=list(OPERATIONS))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An operation that the vocabulary does not have."""
    taken_out = {"fft": lax.fft_p, "cholesky": lax.linalg.cholesky_p}.get(request.param)
    monkeypatch.setattr(primitives, "is_of_jax", lambda each: each is not taken_out and is_of_jax(each))
    primitives.word_for.cache_clear()
    yield request.param
    primitives.word_for.cache_clear()


def called(name: str) -> str:
    """What a report calls it."""
    return name if name == "test_mixed" else f"{name} (not JAX's)"


@pytest.mark.parametrize("plan", PLANS)
def test_values_and_gradients_are_those_of_one_device(name: str, plan: str) -> None:
    made = program(name, plan)
    found = made.check(begin(made), BATCH)
    assert found.ok, found


def test_it_is_named_and_nothing_is_related(name: str) -> None:
    made = program(name, "data=2 tensor=4")
    (said,) = [line for line in made.report().watch if "cjax knows nothing of" in line]
    assert said.startswith(f"cjax knows nothing of {called(name)}: every device computes all of it")
    trace = made._composed.trace
    assert dict(trace.dims.unknown) == {called(name): 1} and called(name) in str(made.trace)
    (eqn,) = [eqn for eqn in trace.closed.jaxpr.eqns if primitives.name_of(eqn) == called(name)]
    before, after = (trace.dims.of(v) for v in (variable_of(eqn, 0), eqn.outvars[0]))
    assert trace.batch_class in before
    assert name == "cholesky" or not set(before) & set(after)  # whose result meets what it was made of


def test_what_has_effects_is_said_to_be_left_to_xla() -> None:
    """A region would not have its effects, so that it is the one thing unknown of which devices may compute parts."""

    def loss(model: Any, batch: Any) -> jax.Array:
        told = jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
        return jnp.square(model(mixed_p.bind(batch["x"]))).mean() + told(batch["x"])

    made = cjax.parallelize(lambda rngs: nnx.Linear(WIDTH, 3, rngs=rngs), loss, optax.sgd(0.1), BATCH, "data=8")
    apart, left = description.uncovered(made._composed.trace)
    assert apart.startswith("cjax knows nothing of test_mixed: every device computes all of it")
    assert left.startswith("cjax knows nothing of ffi_call, and what has effects or mutable arrays is left to XLA")


def test_micro_batches_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't be followed beyond"):
        program(name, "data=2 microbatches=2", devices=2)


class Block(nnx.Module):
    """A layer with attention, for plans that split positions or layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = [y.reshape(*x.shape[:2], 2, WIDTH // 2) for y in jnp.split(self.up(x), 3, -1)]
        return x + self.down(tanh_p.bind(jax.nn.dot_product_attention(*heads).reshape(x.shape)))


@pytest.mark.full("offload=params-1-2", "pipeline=1f1b:2 microbatches=1-2-2", "sequence=ring:2-2-1")
@pytest.mark.parametrize(
    ("plan", "devices", "layers"),
    [
        ("tensor=2d:4", 4, 1),
        ("sequence=ring:2", 2, 1),
        ("pipeline=1f1b:2 microbatches=1", 2, 2),
        ("offload=params", 1, 2),
    ],
)
def test_plans_that_split_otherwise_have_its_values(plan: str, devices: int, layers: int) -> None:
    """A grid, positions in a ring's order, stages, a walk."""

    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(*(Block(rngs) for _ in range(layers)))

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["x"])).mean()

    batch = {"x": BATCH["x"][:, :4]}
    made = cjax.parallelize(build, loss, optax.sgd(0.1), batch, plan, devices=jax.devices()[:devices])
    found = made.check(begin(made), batch)
    assert found.ok, found


@pytest.mark.full("scan", "vmap")
@pytest.mark.parametrize("where", ["checkpoint", "scan", "cond", "custom_jvp", "vmap"])
def test_inside_of_what_holds_equations(where: str) -> None:
    def wrapped(model: Any) -> Any:
        graph, state = nnx.split(model)

        def call(state: Any, x: jax.Array) -> jax.Array:
            return nnx.merge(graph, state)(x)

        return {
            "checkpoint": lambda x: jax.checkpoint(call)(state, x),
            "scan": lambda x: lax.scan(lambda y, _: (call(state, y), None), x, None, length=2)[0],
            "cond": lambda x: lax.cond(x.sum() > -1e9, lambda x: call(state, x), lambda x: x, x),
            "custom_jvp": lambda x: _held(call)(state, x),
            "vmap": lambda x: jax.vmap(call, (None, 1), 1)(state, jnp.stack([x, 2 * x], 1)).sum(1),
        }[where]

    made = program("test_mixed", "data=2 tensor=4", wrapped)
    found = made.check(begin(made), BATCH)
    assert found.ok, found
    assert any("cjax knows nothing of test_mixed" in line for line in made.report().watch)


def _held(call: Any) -> Any:
    """A call with a derivative of its own, which is the same."""
    held = jax.custom_jvp(call)
    held.defjvp(lambda primals, tangents: jax.jvp(call, primals, tangents))
    return held
