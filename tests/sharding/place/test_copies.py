"""Tied weights as a copy on each device: the same values and gradients, one sum, whatever reads them."""

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

ROWS, LENGTH, WIDTH, VOCAB = 8, 16, 8, 24


class Tied(nn.Module):
    """Two lookups in a table, and a product with it transposed, in a loop over positions inside of a checkpoint."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.param("table", nn.initializers.normal(1.0), (VOCAB, WIDTH))
        x = jnp.tanh(nn.Dense(WIDTH)(table[tokens]))
        x = x * jnp.take(table, tokens[:, ::-1], axis=0, mode="fill")

        @jax.checkpoint
        def turn(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.nn.logsumexp(part @ table.T, axis=-1).sum(), None

        parts = jnp.moveaxis(x.reshape(-1, LENGTH // 4, 4, WIDTH), 2, 0)
        return jax.lax.scan(turn, jnp.zeros(()), parts)[0] / tokens.size


class Headed(nn.Module):
    """A lookup, and a product with another weight, in a loop over positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jnp.tanh(nn.Embed(VOCAB, WIDTH)(tokens))
        kernel = self.param("kernel", nn.initializers.normal(1.0), (WIDTH, VOCAB))

        def turn(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.nn.logsumexp(part @ kernel, axis=-1).sum(), None

        parts = jnp.moveaxis(x.reshape(-1, LENGTH // 4, 4, WIDTH), 2, 0)
        return jax.lax.scan(turn, jnp.zeros(()), parts)[0] / tokens.size


class Biased(nn.Module):
    """Biases of pairs of positions, looked up in a table once and read by all layers; written as authors may."""

    repeats: bool = False  # for each example, before it is added

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        distance = np.minimum(np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)), 5)
        table = self.param("biases", nn.initializers.normal(1.0), (6, 2))
        bias = 2.0 * jnp.tanh(jnp.moveaxis(table[distance], -1, 0))[None]
        bias = jnp.broadcast_to(bias, (len(tokens), *bias.shape[1:])) if self.repeats else bias
        for _ in range(3):
            q, k, v = (nn.DenseGeneral((2, WIDTH // 2))(x) for _ in range(3))
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
            x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1))(jnp.einsum("bhqk,bkhd->bqhd", weights, v))
        return jnp.square(x).mean() + table.sum() * 0.1


def loss(model: Any, batch: Any) -> jax.Array:
    return model(batch["tokens"])


@pytest.mark.full(
    "net0-data=4",
    "net3-zero=1/2",
    "net4-data=2 tensor=2 zero=1",
    "net5-data=4 zero=3/2 remat=block",
    "net6-data=4 microbatches=2 zero=3",
    "net7-data=2 sequence=all_to_all:2",
)
@pytest.mark.parametrize(
    ("net", "plan"),
    [(Tied(), "data=4"), (Tied(), "data=2 tensor=2 zero=1"), (Tied(), "data=4 zero=3/2"), (Tied(), "zero=1/2"),
     (Biased(), "data=2 tensor=2 zero=1"), (Biased(), "data=4 zero=3/2 remat=block"),
     (Biased(repeats=True), "data=4 microbatches=2 zero=3"), (Biased(), "data=2 sequence=all_to_all:2"),
     (Headed(), "data=4 zero=3/2"), (Headed(), "data=2 tensor=2 zero=1")],
)  # fmt: skip
def test_gradients_are_those_of_one_device(net: nn.Module, plan: str) -> None:
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))}
    found = []
    for text, num in (("data=1", 1), (plan, 4)):
        program = cjax.parallelize(net, loss, optax.sgd(0.1), batch, text, devices=jax.devices()[:num])
        found.append(jax.tree.map(np.asarray, program.value_and_grad(begin(program), batch)))
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.full("False")
@pytest.mark.parametrize("repeats", [False, True])
def test_what_is_summed_of_biases_is_the_gradient_of_their_table(repeats: bool) -> None:
    batch = {"tokens": np.zeros((ROWS, LENGTH), int)}
    program = cjax.parallelize(
        Biased(repeats), loss, optax.sgd(0.1), batch, "data=4", devices=jax.devices()[:4]
    )  # fmt: skip
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    num = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(Biased().init, jax.random.key(0), **batch)))
    summed = sum(each.count * sum(int(np.prod(s.dims)) for s in each.shapes) for each in facts.select("all-reduce"))
    assert num <= summed <= num + 8, "and the loss, and the gradient's norm; the biases of all pairs are 512"


def test_biases_of_an_exchange_have_their_tables_gradient_summed() -> None:
    """By devices that have other examples and those that have other positions; layers read the biases of all pairs."""
    batch = {"tokens": np.zeros((ROWS, LENGTH), int)}
    program = cjax.parallelize(
        Biased(), loss, optax.sgd(0.1), batch, "data=2 sequence=all_to_all:2", devices=jax.devices()[:4]
    )  # fmt: skip
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    pairs = [s.dims for each in facts.collectives for s in each.shapes if np.prod(s.dims) == 2 * LENGTH * LENGTH]
    assert not pairs, "of all pairs of positions and both heads"


@pytest.mark.parametrize(("net", "whole"), [(Tied(), 0), (Headed(), 1)])
def test_a_tables_gradient_is_scattered_in_its_group_first(net: nn.Module, whole: int) -> None:
    """A sum over all devices that one group is to have parts of is one that XLA makes whole, and cuts: in float32 that
    of a table that is looked up alone."""
    batch = {"tokens": np.zeros((ROWS, LENGTH), int)}
    program = cjax.parallelize(
        net, loss, optax.sgd(0.1), batch, "data=4 zero=3/2", devices=jax.devices()[:4]
    )  # fmt: skip
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    over_all = [s.dims for each in facts.collectives if len(each.axes) == 2 for s in each.shapes]
    assert sum(np.prod(dims) >= VOCAB * WIDTH for dims in over_all) == whole, over_all
