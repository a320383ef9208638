"""What experts are sent out of the whole batch is shared by the devices that share the batch."""

import itertools
import os
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
from cjax.sharding.layout.layout import make_layout
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
ROWS, LENGTH, WIDTH, EXPERTS, INNER = 8, 6, 20, 3, 28


class Mixture(nn.Module):
    """Tokens of the whole batch, so many to each expert: sent by products, to one or to two, by adding to seats, or
    chosen by experts."""

    how: str = "products"
    room: int = 24

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up = self.param("up", nn.initializers.normal(0.3), (EXPERTS, WIDTH, INNER))
        down = self.param("down", nn.initializers.normal(0.3), (EXPERTS, INNER, WIDTH))
        tokens = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(nn.Dense(EXPERTS)(tokens))

        def made(sent: jax.Array) -> jax.Array:
            return jnp.einsum("ecf,efd->ecd", jnp.tanh(jnp.einsum("ecd,edf->ecf", sent, up)), down)

        if self.how == "chosen":
            best, which = jax.lax.top_k(gates.T, self.room)
            back = made(tokens[which]) * best[..., None]
            return x + jnp.zeros_like(tokens).at[which].add(back).reshape(x.shape)
        expert = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
        seat = (jnp.cumsum(expert, 0) * expert).sum(-1).astype(int) - 1
        if self.how == "products":
            to = expert[..., None] * jax.nn.one_hot(seat, self.room)[:, None]
            sent = jnp.einsum("nec,nd->ecd", to, tokens)
            return x + jnp.einsum("nec,ecd->nd", to * gates[..., None], made(sent)).reshape(x.shape)
        if self.how == "two each":
            best, which = jax.lax.top_k(gates, 2)
            chosen = jax.nn.one_hot(which, EXPERTS)
            seat = (jnp.cumsum(chosen.reshape(-1, EXPERTS), 0).reshape(chosen.shape) - 1).astype(int)
            seats = jax.nn.one_hot(seat, self.room)
            sent = jnp.einsum("nec,nd->ecd", jnp.einsum("nke,nkec->nec", chosen, seats), tokens)
            to = jnp.einsum("nk,nke,nkec->nec", best, chosen, seats)
            return x + jnp.einsum("nec,ecd->nd", to, made(sent)).reshape(x.shape)
        at = jnp.where(seat < self.room, expert.argmax(-1) * self.room + seat, EXPERTS * self.room)
        sent = jnp.zeros((EXPERTS * self.room + 1, WIDTH)).at[at].add(tokens)[:-1]
        back = made(sent.reshape(EXPERTS, self.room, WIDTH)).reshape(-1, WIDTH)
        back = jnp.concatenate([back, jnp.zeros((1, WIDTH))])[at] * gates.max(-1, keepdims=True)
        return x + back.reshape(x.shape)


class Layers(nn.Module):
    how: str = "products"
    room: int = 24

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = Mixture(self.how, self.room)(nn.LayerNorm()(x))
        return nn.Dense(WIDTH)(x)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


BATCH = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
STYLES = ("products", "two each", "seats", "chosen")
PLANS = ("data=4", "zero=3", "data=2 tensor=3", "zero=1 remat=block", "data=4 microbatches=2 loss=microbatch")
PAIRS = [(how, PLANS[(start + 2 * at) % len(PLANS)]) for start, how in enumerate(STYLES) for at in range(2)]


def program_of(how: str, plan: str, room: int = 24, num: int | None = None) -> Any:
    num = num or (6 if "tensor" in plan else 4)
    return cjax.parallelize(Layers(how, room), loss, optax.sgd(0.1), BATCH, plan, devices=jax.devices()[:num])


@pytest.mark.full(
    "chosen-data=4",
    "chosen-zero=1 remat=block",
    "seats-data=2 tensor=3",
    "seats-data=4 microbatches=2 loss=microbatch",
    "two each-zero=1 remat=block",
    "two each-zero=3",
    "products-data=4",
)
@pytest.mark.parametrize(("how", "plan"), list(itertools.product(STYLES, PLANS)) if ALL else PAIRS)
def test_gradients_are_those_of_one_device(how: str, plan: str) -> None:
    given, num_parts = program_of(how, plan), 2 if "microbatches" in plan else 1
    alone = program_of(how, "data=1" if num_parts == 1 else "microbatches=2 loss=microbatch", num=1)
    mine, theirs = (p.value_and_grad(begin(p), BATCH) for p in (given, alone))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("how", STYLES)
def test_each_device_multiplies_its_share(how: str) -> None:
    """By four, but for sums over all examples that say who is sent where."""
    shared, alone = program_of(how, "data=4"), program_of(how, "data=1", num=1)
    flops = [audit(program.lower().compile(), program.mesh).flops for program in (shared, alone)]
    assert flops[0] == pytest.approx(flops[1] / 4, rel=0.01)


@pytest.mark.full("products")
@pytest.mark.parametrize("how", ["products", "two each"])
def test_examples_travel_and_no_rows(how: str) -> None:
    """All examples to all devices, and what comes back to their own, each way; the other kinds are of gradients, and of
    who is sent where, which is found out anew."""
    program = program_of(how, "data=4")
    facts = audit(program.lower().compile(), program.mesh)
    assert not facts.select("all-to-all")
    sizes = [max(int(np.prod(s.dims)) for s in c.shapes) for c in facts.collectives if c.kind != "all-reduce"]
    assert max(sizes) == ROWS * LENGTH * WIDTH < EXPERTS * 24 * WIDTH


@pytest.mark.full("products-5-14816", "two each-5-13339")
@pytest.mark.parametrize(
    ("how", "times", "most"), [("products", 5, 14816), ("two each", 5, 13339), ("seats", 1, 2587), ("chosen", 5, 24992)]
)
def test_scores_are_whole_and_their_gradient_is_reduced_for_nobody(how: str, times: int, most: int) -> None:
    """Where the experts are split, each layer reduces what they made, and the gradient of what they were sent; one more
    is of what comes before the layers. Added up in seats, tokens of the whole batch are whole."""
    program = program_of(how, "data=2 tensor=3")
    facts = audit(program.lower().compile(), program.mesh)
    tokens, sums = ROWS // 2 * LENGTH * WIDTH, facts.select("all-reduce", ("tensor",))
    assert sum(c.count * sum(np.prod(s.dims) >= tokens for s in c.shapes) for c in sums) == times
    assert facts.moved(axes=("tensor",)) <= most, "scores, or what is found in them, move more often"


def test_what_devices_do_not_divide_is_kept_whole_and_said() -> None:
    notes = program_of("products", "data=4", room=25)._composed.storage.layout.notes
    assert any("25 rows that all examples make" in note and "as many as 4 divides" in note for note in notes)
    assert not program_of("products", "data=4")._composed.storage.layout.notes


class Plain(nn.Module):
    """Weights multiply what examples make together, the mean of all of their patches; and a table that no example has a
    part in."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(nn.Conv(WIDTH, (3,), (3,))(x))
        table = nn.Dense(WIDTH)(jnp.sin(jnp.arange(16.0)[:, None] * jnp.arange(5.0)))
        return nn.Dense(WIDTH)(x) + nn.Dense(WIDTH)(x.mean(0)).mean(0) + table.mean(0)


def test_positions_and_tables_are_no_such_rows() -> None:
    source = TraceSource(capture(Plain(), loss, BATCH), jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype))
    layout = make_layout(source.read(), {"data": 2}, {})
    assert not layout.rows and not layout.notes
