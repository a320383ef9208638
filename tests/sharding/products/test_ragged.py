"""Rows in groups, split over devices, against all of them on one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec
from starts import begin

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.sharding.products.ragged import multiply_rows
from cjax.trace.jaxpr.view import is_by_rows

ROWS, WIDTH, INNER, GROUPS = 24, 6, 4, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
WEIGHTS = RNG.normal(size=(GROUPS, WIDTH, INNER)).astype(np.float32)
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "zero", "tensor"))


@functools.partial(jax.jit, static_argnums=1)
def both(sizes: jax.Array, features: PartitionSpec) -> tuple[Any, Any]:
    """The product and its gradients, on each device's rows and features, and on all of them."""
    (eqn,) = jax.make_jaxpr(lax.ragged_dot)(X, WEIGHTS, sizes).jaxpr.eqns

    def mine(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiply_rows(eqn, [x, w, sizes], eqn.params, ("data", "zero"), features, MESH)[0]

    def results(product: Any) -> Any:
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))(X, WEIGHTS)

    return results(mine), results(lambda x, w: lax.ragged_dot(x, w, sizes))


PLACES = [PartitionSpec(), PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor")]


@given(
    st.lists(st.integers(0, ROWS), min_size=GROUPS - 1, max_size=GROUPS - 1),
    st.integers(0, 3),
    st.sampled_from(PLACES),
    st.sampled_from(["int32", "uint8"]),
)
def test_equals_all_rows_on_one_device(ends: list[int], spare: int, features: PartitionSpec, dtype: str) -> None:
    """Groups that are empty, or end anywhere, and rows that no group has; whole weights, and those of which devices
    make or sum over some of the features."""
    ends = sorted([*ends, ROWS])
    sizes = np.diff([0, *ends]).astype(np.int32)
    sizes[-1] = max(0, sizes[-1] - spare)
    mine, theirs = both(sizes.astype(dtype), features)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), mine, theirs)


def test_other_forms_are_left_alone() -> None:
    """What adds up rows by group, a gradient; and a batch of such products."""
    sizes = jnp.array([8, 6, 6, 4])
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: lax.ragged_dot(X, w, sizes).sum()))(WEIGHTS).jaxpr
    found = [is_by_rows(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "ragged_dot_general"]
    assert False in found
    assert not any(map(is_by_rows, jax.make_jaxpr(lambda x: x @ x.T)(X).jaxpr.eqns))


class Sorted(nn.Module):
    """Tokens sorted by expert (Gale et al., 2023), and put back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up = self.param("up", nn.initializers.normal(0.3), (GROUPS, WIDTH, INNER))
        down = self.param("down", nn.initializers.normal(0.3), (GROUPS, INNER, WIDTH))
        tokens = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(nn.Dense(GROUPS)(tokens))
        expert = gates.argmax(-1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=GROUPS)
        made = lax.ragged_dot(jnp.tanh(lax.ragged_dot(tokens[order], up, sizes)), down, sizes)
        return x + (made[jnp.argsort(order)] * gates.max(-1, keepdims=True)).reshape(x.shape)


BATCH = RNG.normal(size=(8, 6, WIDTH)).astype(np.float32)


def program_of(plan: str, devices: Any) -> Any:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    return cjax.parallelize(Sorted(), loss, optax.sgd(0.1), BATCH, plan, devices=devices)


@pytest.mark.full("data=2 tensor=2", "data=4")
@pytest.mark.parametrize("plan", ["data=4", "zero=3", "data=2 tensor=2"])
def test_experts_of_sorted_tokens_train_as_on_one_device(plan: str) -> None:
    programs = (program_of(plan, jax.devices()[:4]), program_of("data=1", jax.devices()[:1]))
    mine, theirs = (program.value_and_grad(begin(program), BATCH) for program in programs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-7)


def test_nothing_of_them_is_left_to_the_partitioner() -> None:
    """Two products, each once forward and once for the gradients; the lookups of rows in order, which have no gradient,
    and of those put back; the two sorts, and how many rows each device has of an expert."""
    text = program_of("data=4", jax.devices()[:4]).lower().as_text()
    assert text.count("sdy.manual_computation") == 4 + 1 + 2 + 2 + 1


@pytest.mark.aot
def test_each_device_multiplies_its_rows() -> None:
    """On GPUs, where XLA multiplies all rows by all experts: a quarter of that."""
    flops = []
    for plan, devices in (("data=4", "h100:4"), ("data=1", "h100:1")):
        program = program_of(plan, devices)
        flops.append(audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh).flops)
    assert flops[0] == pytest.approx(flops[1] / 4, rel=0.05)
