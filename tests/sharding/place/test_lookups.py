"""Lookups that are not the partitioner's: the same values and gradients, and what they move."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from starts import begin

import cjax
from cjax.audit import Audit, audit
from cjax.mesh import compile_lowered

ROWS, LENGTH, WIDTH, VOCAB = 8, 16, 8, 24
MANY = 301  # more than a step looks up, and nothing divides them


class Language(nn.Module):
    """An attention between a table and the same table as classifier, and what a loss picks from the logits."""

    vocab: int = VOCAB

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(self.vocab, WIDTH)
        x = table(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        logits = jax.nn.log_softmax(table.attend(x))
        return -jax.numpy.take_along_axis(logits, tokens[:, ::-1, None], axis=-1).mean()


def loss(model: Any, batch: Any) -> jax.Array:
    return model(batch["tokens"])


def program(net: nn.Module, plan: str, num: int) -> cjax.Program:
    batch = {"tokens": np.zeros((ROWS, LENGTH), int)}
    return cjax.parallelize(net, loss, optax.sgd(0.1), batch, plan, devices=jax.devices()[:num])


def facts(net: nn.Module, plan: str, num: int) -> Audit:
    made = program(net, plan, num)
    return audit(compile_lowered(made.lower(), list(made.mesh.devices.flat)), made.mesh)


@pytest.mark.parametrize(
    ("vocab", "plan", "num"),
    [(VOCAB, "data=2 tensor=2 sequence=gather", 4), (MANY, "data=2 tensor=2d:4", 8), (MANY, "tensor=2.5d:8/2", 8),
     (MANY, "data=2 tensor=2d:4 microbatches=2 zero=1", 8),
     (MANY, "data=2 sequence=ring:2 pipeline=2 microbatches=2 zero=1", 8)],
)  # fmt: skip
def test_gradients_are_those_of_one_device(vocab: int, plan: str, num: int) -> None:
    batch = {"tokens": np.random.default_rng(0).integers(0, vocab, (ROWS, LENGTH))}
    found = []
    for text, devices in (("data=1", 1), (plan, num)):
        made = program(Language(vocab), text, devices)
        found.append(jax.tree.map(np.asarray, made.value_and_grad(begin(made), batch)))
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_between_split_positions_a_table_is_summed_once_and_logits_stay() -> None:
    """Its gradient over `data`, with all others; what is looked up over `tensor`, of which each keeps its positions."""
    found = facts(Language(), "data=2 tensor=2 sequence=gather", 4).collectives
    kinds = {each.kind for each in found if sum(np.prod(s.dims) for s in each.shapes) > ROWS * LENGTH}
    assert "all-to-all" not in kinds and "collective-permute" not in kinds
    summed = [s.dims for each in found if "data" in each.axes for s in each.shapes]
    assert [dims for dims in summed if np.prod(dims) >= VOCAB * WIDTH // 2] == [(VOCAB // 2, WIDTH)]


@pytest.mark.parametrize(("vocab", "moves_rows"), [(MANY, True), (VOCAB, False)])
def test_a_grid_moves_the_rows_or_the_table_whichever_is_less(vocab: int, moves_rows: bool) -> None:
    found = facts(Language(vocab), "tensor=2d:4", 4).select("collective-permute")
    sizes = [int(np.prod(s.dims)) for each in found for s in each.shapes]
    of_rows, of_table = ROWS * LENGTH * WIDTH // 4, -(-vocab // 2) * WIDTH // 2
    assert (sizes.count(of_rows) == 2) == moves_rows and (sizes.count(of_table) == 2) != moves_rows


class InOrder(nn.Module):
    """All tokens, in an order of their own, and the best of each example."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = nn.Dense(self.width)(nn.Dense(WIDTH)(x)).reshape(-1, self.width)
        order = jax.numpy.argsort(tokens[:, 0])
        best = tokens[:, 0].reshape(len(x), -1).argmax(1) + jax.numpy.arange(len(x)) * x.shape[1]
        made = nn.Dense(self.width)(jax.numpy.tanh(tokens[order]))
        return made[jax.numpy.argsort(order)].var() + nn.Dense(1)(jax.numpy.tanh(tokens[best])).mean()


@pytest.mark.parametrize(
    ("width", "plan"), [(WIDTH, "data=4"), (WIDTH, "data=2 tensor=2d:4"), (9, "data=2 tensor=2d:4")]
)
def test_rows_are_put_in_order_and_back(width: int, plan: str) -> None:
    """Of features that a grid does not divide, too."""
    x = np.random.default_rng(0).normal(size=(ROWS, 6, 3)).astype(np.float32)
    programs = [
        cjax.parallelize(InOrder(width), lambda m, x: m(x), optax.sgd(0.1), x, text, devices=jax.devices()[:num])
        for text, num in ((plan, 4 if plan == "data=4" else 8), ("data=1", 1))
    ]
    mine, theirs = (each.value_and_grad(begin(each), x) for each in programs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), mine, theirs)
    if plan == "data=4":
        gathered = programs[0].lower().as_text().count("stablehlo.all_gather")
        assert gathered == 2, "but not for the few that are found where they are"
