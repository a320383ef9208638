"""Operations of which cjax has no facts, as planted faults: nothing is related by them, nothing split, and all named.

A user's own primitive is one that no vocabulary can have; a Fourier transform and a factorisation are taken out of it.
"""

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

import cjax
from cjax.trace.dims.rules import RULES
from cjax.trace.examples import rules as example_rules
from cjax.trace.jaxpr.primitives import FACTS

ROWS, WIDTH = 8, 8
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, 6, WIDTH)).astype(np.float32)}
PLANS = ["data=8", "data=2 tensor=4", "zero=3 data=4 tensor=2"]

# A user's own: each row's running sum along the last dim but one, and the mean over all rows added to it. Shapes agree,
# elements do not go by their places, and rows meet.
mixed_p = Primitive("test_mixed")
spread_p = Primitive("test_spread")


def mix(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, axis=-2) + x.mean(axis=0, keepdims=True)


def spread(x: jax.Array) -> jax.Array:
    """The transpose of `mix`."""
    return jnp.cumsum(x[..., ::-1, :], axis=-2)[..., ::-1, :] + x.mean(axis=0, keepdims=True)


for own_p, rule in ((mixed_p, mix), (spread_p, spread)):
    own_p.def_impl(jax.jit(rule))
    own_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own_p, mlir.lower_fun(rule, multiple_results=False))
ad.deflinear2(mixed_p, lambda gradient, _: [spread_p.bind(gradient)])
ad.deflinear2(spread_p, lambda gradient, _: [mixed_p.bind(gradient)])


def _batched(args: Any, dims: Any) -> Any:
    return lax.map(mixed_p.bind, jnp.moveaxis(args[0], dims[0], 0)), 0


batching.primitive_batchers[mixed_p] = _batched


def factor(y: jax.Array) -> jax.Array:
    square = jnp.einsum("bsd,bse->bde", y, y) + 3 * jnp.eye(WIDTH)
    return y @ lax.linalg.cholesky(square)


OPERATIONS = {
    "test_mixed": mixed_p.bind,
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
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An operation that the vocabulary does not have."""
    monkeypatch.delitem(FACTS, request.param, raising=request.param != "test_mixed")
    monkeypatch.delitem(RULES, request.param, raising=request.param != "test_mixed")
    return request.param


@pytest.mark.parametrize("plan", PLANS)
def test_values_and_gradients_are_those_of_one_device(name: str, plan: str) -> None:
    made = program(name, plan)
    found = made.check(made.init(0), BATCH)
    assert found.ok, found


def test_it_is_named_and_nothing_is_related(name: str) -> None:
    made = program(name, "data=2 tensor=4")
    (said,) = [line for line in made.report().watch if "cjax knows nothing of" in line]
    assert said.startswith(f"cjax knows nothing of {name}: every device computes all of it")
    trace = made._composed.trace
    assert dict(trace.dims.unknown) == {name: 1} and name in str(made.trace)
    (eqn,) = [eqn for eqn in trace.closed.jaxpr.eqns if eqn.primitive.name == name]
    before, after = (trace.dims.of(v) for v in (eqn.invars[0], eqn.outvars[0]))
    assert trace.batch_class in before
    assert name == "cholesky" or not set(before) & set(after)  # whose result meets what it was made of


def test_micro_batches_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(example_rules.RULES, name, raising=name != "test_mixed")
    with pytest.raises(ValueError, match="can't be followed beyond"):
        program(name, "data=2 microbatches=2", devices=2)


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
    found = made.check(made.init(0), BATCH)
    assert found.ok, found
    assert any("cjax knows nothing of test_mixed" in line for line in made.report().watch)


def _held(call: Any) -> Any:
    """A call with a derivative of its own, which is the same."""
    held = jax.custom_jvp(call)
    held.defjvp(lambda primals, tangents: jax.jvp(call, primals, tangents))
    return held
