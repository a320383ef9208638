"""Running sums along a dim of which devices have stretches: the author's numbers, for little that is moved."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from shared.kernels import kernels
from starts import begin

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.sharding.place.running import running_sum, whole_along

ROWS, LENGTH, WIDTH = 8, 16, 24
ALONG = {
    "sum": lambda x: jnp.cumsum(x, 1),
    "sum from the end": lambda x: lax.cumsum(x, 1, reverse=True),
    "maximum": lambda x: lax.cummax(x, 1),
    "logarithm": lambda x: lax.cumlogsumexp(x, 1),
    "of all rows": lambda x: jnp.cumsum(x.reshape(-1, x.shape[-1]), 0).reshape(x.shape),
    # Of rows that are joined nobody knows that they are split, and XLA splits them.
    "of joined rows": lambda x: jnp.cumsum(jnp.concatenate([rows := x.reshape(-1, x.shape[-1]), rows]), 0)[
        : len(rows)
    ].reshape(x.shape),
}


class Net(nn.Module):
    """Positions are counted where no padding is; then a running one of `ALONG` is in the stream."""

    along: str
    width: int = WIDTH

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        places = jnp.cumsum((tokens > 3).astype(jnp.int32), 1)
        x = nn.Embed(32, self.width)(tokens) + nn.Embed(tokens.shape[1] + 1, self.width)(places)
        x = x + nn.MultiHeadDotProductAttention(4)(x, mask=nn.make_causal_mask(tokens))
        return nn.Dense(32)(x + jnp.tanh(ALONG[self.along](nn.Dense(self.width)(x)) / 8))


def loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["next"]).mean()


def batch(rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 32, (rows, length)).astype(np.int32) for name in ("tokens", "next")}


def program_of(along: str, plan: str) -> cjax.Program:
    devices = jax.devices()[:1] if plan == "data=1" else None
    return cjax.parallelize(Net(along), loss, optax.sgd(0.1), batch(), plan, devices=devices)


@pytest.mark.parametrize(
    ("along", "plan"),
    [
        ("sum", "data=2 sequence=ring:4"),
        ("sum from the end", "data=2 tensor=2 sequence=all_to_all:2"),
        ("maximum", "data=2 tensor=4 sequence=gather"),
        ("logarithm", "data=2 sequence=ring:4"),
        ("of all rows", "data=8"),
        ("of all rows", "data=2 tensor=2d:4"),
        ("of joined rows", "data=8"),
    ],
)
def test_as_on_one_device(along: str, plan: str) -> None:
    programs = (program_of(along, plan), program_of(along, "data=1"))
    mine, theirs = (jax.tree.leaves(program.value_and_grad(begin(program), batch())) for program in programs)
    largest = max(float(np.abs(b).max()) for b in theirs)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5, atol=1e-6 * largest)


def test_a_device_learns_what_the_stretches_of_others_come_to() -> None:
    """Forward and backward, of each [1, width]; and gradients are reduced, as for any model."""
    program = program_of("of all rows", "data=8")
    facts = audit(program.lower().compile(), program.mesh)
    weights = sum(leaf.size for leaf in jax.tree.leaves(program.params(program.init(0))))
    assert facts.moved("all-reduce") == pytest.approx(4 * weights * 2 * 7 / 8, rel=0.01)
    assert facts.moved() - facts.moved("all-reduce") <= 4 * 2 * 8 * WIDTH


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_over_two_axes_and_in_its_own_dtype(dtype: str, reverse: bool) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("a", "b"))
    rng, shape = np.random.default_rng(1), (3, 16, 5)
    x = jnp.asarray(rng.normal(size=shape) if dtype == "bfloat16" else rng.integers(-40, 40, shape), dtype)
    plain = lambda x: lax.cumsum(x, 1, reverse)  # noqa: E731
    eqn = jax.make_jaxpr(plain)(x).eqns[0]
    assert eqn.primitive.name == "cumsum"

    def mine(x: jax.Array) -> jax.Array:
        found = running_sum(eqn, x, ("a", "b"), PartitionSpec(None, ("a", "b"), None), mesh)
        assert found is not None
        return found

    found = jax.jit(mine)(x)
    assert found.dtype == x.dtype
    if dtype == "bfloat16":  # added up in float32, and rounded once
        x = x.astype(jnp.float32)
    np.testing.assert_allclose(found, plain(x).astype(dtype), rtol=2**-8, atol=2**-8 if dtype == "bfloat16" else 0)
    if dtype == "float32":
        weighed = lambda of: jax.grad(lambda x: (of(x) * jnp.arange(x.size).reshape(x.shape)).sum())  # noqa: E731
        np.testing.assert_array_equal(jax.jit(weighed(mine))(x), weighed(plain)(x))


def test_unequal_stretches_are_left_to_the_compiler() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")), ("a",))
    eqn = jax.make_jaxpr(lambda x: lax.cumsum(x, 0))(jnp.ones(12)).eqns[0]
    assert running_sum(eqn, jnp.ones(12), ("a",), PartitionSpec("a"), mesh) is None


def test_what_no_axis_splits_the_compiler_does_not_either() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")), ("a",))
    x = jnp.ones((8, 16))
    eqn = jax.make_jaxpr(lambda x: lax.cummax(x, 1))(x).eqns[0]
    found = jax.make_jaxpr(lambda x: whole_along(eqn, x, eqn.params, mesh))(x)
    assert [each.primitive.name for each in found.eqns] == ["sharding_constraint", "cummax", "sharding_constraint"]
    free = PartitionSpec.UNCONSTRAINED
    assert [each.params["sharding"].spec for each in found.eqns[::2]] == [PartitionSpec(free, None)] * 2


@pytest.mark.aot
@pytest.mark.parametrize("along", ["sum", "maximum", "of joined rows"])
def test_an_h100_does_not_go_through_a_stretch_element_by_element(along: str) -> None:
    """As XLA's partitioner would have it, 7 kernels for each of 128 positions in each pass (JAX 0.12.0.1)."""
    shapes = {name: jax.ShapeDtypeStruct((16, 512), np.int32) for name in ("tokens", "next")}
    program = cjax.parallelize(
        Net(along, 128), loss, optax.sgd(0.1), shapes, "data=2 sequence=all_to_all:4", devices="h100:8"
    )
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    assert sum(each.count for each in kernels(compiled.as_text() or "")) < 300
