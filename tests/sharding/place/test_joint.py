"""Products of one tensor with several that an axis splits: their parts of its gradient are one sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from starts import begin

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.sharding.place.joint import JointProducts, SharedRead

ROWS, WIDTH, INNER = 16, 32, 64


class PostNorm(nn.Module):
    """Three products of a norm's result, which the residual reads too; written as an author may, each with a cast."""

    casts: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.LayerNorm()(x)
            read = [x.astype(jnp.bfloat16) if self.casts else x for _ in range(3)]
            a, b, c = (nn.Dense(INNER, dtype=each.dtype)(each) for each in read)
            x = x + nn.Dense(WIDTH)(jax.nn.relu(a) * b + jnp.tanh(c))
        return x


def reduced(net: nn.Module, plan: str) -> list[Any]:
    """What a step reduces over the tensor axis, of the size of the stream or larger."""
    batch = {"x": np.ones((ROWS, WIDTH), np.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2)

    program = cjax.parallelize(net, loss, optax.sgd(0.1), batch, plan, devices="h100:4")
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    found = audit(compiled, program.mesh).select("all-reduce", ["tensor"])
    return [c for c in found if sum(int(np.prod(s.dims)) for s in c.shapes) >= ROWS * WIDTH]


@pytest.mark.aot
@pytest.mark.parametrize("casts", [False, True])
def test_a_residual_behind_a_norm_costs_no_reduction(casts: bool) -> None:
    """One a layer each way, however its author rounds what products read; six without."""
    found = reduced(PostNorm(casts), "tensor=4")
    assert sum(c.count * sum(int(np.prod(s.dims)) for s in c.shapes) for c in found) == 4 * ROWS * WIDTH


class Crossing(nn.Module):
    """Layers that read their own input, and each what was made of it before the first: a decoder's."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        memory = jnp.tanh(nn.Dense(WIDTH)(x))
        for _ in range(4):
            keys, values = nn.Dense(INNER)(memory), nn.Dense(INNER)(memory)
            x = x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(INNER)(nn.LayerNorm()(x))) * keys + jax.nn.relu(values))
        return x


@pytest.mark.aot
def test_what_all_layers_read_has_its_gradient_reduced_once() -> None:
    """One reduction a layer each way for its own input, and one for the input of all; four of that before."""
    found = reduced(Crossing(), "tensor=4")
    num_numbers = sum(c.count * sum(int(np.prod(s.dims)) for s in c.shapes) for c in found)
    assert num_numbers // (ROWS * WIDTH) == 4 + 4 + 1  # a few small sums travel with the last


def held_back(plan: str, net: nn.Module | None = None) -> int:
    """How many gradients a step's backward pass holds back until others are made; those of a loop's layers once."""
    batch = {"x": np.ones((ROWS, WIDTH), np.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2)

    program = cjax.parallelize(net or PostNorm(), loss, optax.sgd(0.1), batch, plan)
    return program.lower().as_text().count("optimization_barrier")


def test_reduced_gradients_wait_for_those_of_weights_alone() -> None:
    """Not for a sum over devices with other rows, and not where a stage makes gradients of its weights later."""
    assert held_back("data=4 tensor=2 microbatches=2") == held_back("data=1 tensor=8") == 1 + held_back("data=8")
    assert held_back("data=4 tensor=2") == held_back("data=8")
    staged = "data=2 tensor=2 microbatches=2 pipeline"
    assert held_back(f"{staged}=1f1b:2") > held_back(f"{staged}=zero_bubble:2")


class Bare(nn.Module):
    """Layers whose products read what the layer before has handed on, as it is."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(INNER)(x)))
        return x


@pytest.mark.parametrize("net", [Crossing(), Bare()], ids=["all_layers_input", "handed_on"])
def test_gradients_of_what_all_layers_read_do_not_wait(net: nn.Module) -> None:
    """Those of a layer's own input do."""
    assert held_back("data=1 tensor=8", net) == 1


class Wide(nn.Module):
    """Layers whose matmuls take as long as what is reduced of them is on its way."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = x + nn.Dense(4096)(jax.nn.relu(nn.Dense(4 * 4096)(nn.LayerNorm()(x))))
        return x


@pytest.mark.aot
def test_a_layers_reduction_is_hidden_under_the_gradients_of_its_weights() -> None:
    batch = {"x": np.ones((4096, 4096), np.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2)

    plan = "tensor=4 precision=bfloat16"
    program = cjax.parallelize(Wide(), loss, optax.sgd(0.1), batch, plan, devices="h100:4")
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    back = [c for c in audit(compiled, program.mesh).select("all-reduce", ["tensor"]) if "transpose" in c.op_name]
    (large,) = [c for c in back if c.bytes > 2**20]
    assert large.is_async and large.overlap_flops >= 2 * 4096**3  # one weight's gradient at least


class Crossed(nn.Module):
    """Two matrices made of weights, which one side multiplies in the other's opposite order."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        p, q = (jnp.tanh(self.param(name, nn.initializers.normal(0.5), (8, 8))) for name in "pq")
        return jnp.tanh(jnp.tanh(x @ p) @ q) + jnp.tanh(jnp.tanh(2 * x @ q) @ p)


def test_groups_that_would_wait_for_each_other_are_not_both_made() -> None:
    """Products with `p`, and those with `q`: each needs what one of the other's gives."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2)

    found = []
    for plan, num in (("data=1", 1), ("data=4", 4)):
        program = cjax.parallelize(Crossed(), loss, optax.sgd(0.1), batch, plan, devices=jax.devices()[:num])
        found.append(jax.tree.map(np.asarray, program.value_and_grad(begin(program), batch)))
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


class Sent(nn.Module):
    """Tokens that are sent to four experts, by what a router makes of them: two products of one input, of which the
    second waits for the first."""

    casts: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = (self.param(name, nn.initializers.normal(0.5), (4, WIDTH, WIDTH)) for name in ("up", "down"))
        for _ in range(2):
            read = x.astype(jnp.bfloat16) if self.casts else x
            gates = jax.nn.softmax(nn.Dense(4, dtype=read.dtype)(read).astype(x.dtype))
            mask = gates * (gates >= gates.max(-1, keepdims=True))
            sent = jnp.einsum("be,bd->ebd", mask.astype(read.dtype), x.astype(read.dtype))
            made = jnp.einsum("ebd,edf->ebf", jnp.tanh(jnp.einsum("ebd,edf->ebf", sent, up)), down)
            x = x + jnp.einsum("be,ebd->bd", mask, made)
        return x


def square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


@pytest.mark.full("True")
@pytest.mark.parametrize("casts", [False, True])
def test_products_that_wait_for_each_other_read_one_copy(casts: bool) -> None:
    """A router's and its experts' input; with the numbers of one device, evaluated twice as well."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)}
    found = []
    for plan, num in (("data=1", 1), ("tensor=4", 4), ("tensor=2 remat=block", 2)):
        program = cjax.parallelize(Sent(casts), square, optax.sgd(0.1), batch, plan, devices=jax.devices()[:num])
        found.append(jax.tree.map(np.asarray, program.value_and_grad(begin(program), batch)))
    for each in found[1:]:
        for mine, theirs in zip(jax.tree.leaves(each), jax.tree.leaves(found[0]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5 if not casts else 0.05, atol=1e-6 if not casts else 1e-3)


def test_a_copy_is_of_one_evaluation() -> None:
    """Which may have been broken off: whoever comes again reads what it was given now."""
    first, second = jax.make_jaxpr(lambda x: (x + 1, x * 2))(1.0).eqns
    reading = SharedRead(np.dtype("float32"), {id(first): 0, id(second): 0})
    one, two = jnp.ones(3), jnp.zeros(3)
    copies = [reading.copied(eqn, value) for eqn, value in ((first, one), (first, two), (second, two), (second, one))]
    assert copies[1] is copies[2] and [float(copy.sum()) for copy in copies] == [3, 0, 0, 3]


def test_a_router_and_its_experts_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read = JointProducts.read

    def seen(self: JointProducts, eqn: Any, operands: list[Any]) -> list[Any]:
        found = read(self, eqn, operands)
        reads.extend(new for new, old in zip(found, operands, strict=True) if new is not old)
        return found

    monkeypatch.setattr(JointProducts, "read", seen)
    batch = {"x": np.ones((8, WIDTH), np.float32)}
    cjax.parallelize(Sent(), square, optax.sgd(0.1), batch, "tensor=4", devices=jax.devices()[:4]).lower()
    assert len(reads) >= 2 and all(a is b for a, b in zip(reads[::2], reads[1::2], strict=True))


@pytest.mark.aot
@pytest.mark.parametrize("casts", [False, True])
def test_what_is_sent_to_experts_costs_one_reduction_each_way(casts: bool) -> None:
    """Sums over experts, of a number a token, may go along."""
    found = reduced(Sent(casts), "tensor=4")
    elements = sum(c.count * sum(int(np.prod(s.dims)) for s in c.shapes) for c in found)
    assert sum(c.count for c in found) == 4 and 0 <= elements - 4 * ROWS * WIDTH <= 4 * ROWS
