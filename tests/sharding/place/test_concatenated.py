"""What is put one behind another along split positions comes together as on one device, by rows of neighbours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from starts import begin

import cjax
from cjax.audit import audit
from cjax.planner.reading.readings import Readings
from cjax.sharding.place.concatenated import Neighbours, neighbours
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

ROWS, PATCHES, WIDTH = 4, 12, 8  # 3 patches on each of 4 devices, and 4 positions


def found_by(plan: Neighbours, lengths: tuple[int, ...]) -> list[int]:
    """The result's rows, each a number of its own, as devices would put them together."""
    wanted = np.split(np.arange(1, 1 + sum(lengths)), np.cumsum(lengths)[:-1])
    parts = [
        np.split(np.pad(x, (0, -len(x) % plan.size)), plan.size) if split else [x] * plan.size
        for x, split in zip(wanted, plan.split, strict=True)
    ]
    rows = []
    for device in range(plan.size):
        have = [part[device] for part in parts]
        for sent in plan.sent:
            source = device - sent.step
            there = parts[sent.operand][source] if 0 <= source < plan.size else 0 * parts[sent.operand][0]
            have.append(there[: sent.rows] if sent.step < 0 else there[-sent.rows :])
        rows += np.concatenate([*have, [0]])[plan.rows[device]].tolist()
    return rows


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.sampled_from([2, 3, 4, 8]))
def test_every_row_comes_once_and_nothing_behind_the_last(lengths: list[int], size: int) -> None:
    plan = neighbours(1, "sequence", size, lengths)
    if plan is not None:
        total = sum(lengths)
        assert found_by(plan, tuple(lengths)) == [*range(1, total + 1), *[0] * (-total % size)]
    else:
        assert any(n >= size for n in lengths), "of what is whole everywhere, nothing has to be sent"


@pytest.mark.parametrize(("lengths", "rows"), [((1, 64), {-1: 6}), ((64, 1), {-1: 7}), ((3, 64), {-1: 4, 1: 2})])
def test_sends_no_more_rows_than_a_neighbour_needs(lengths: tuple[int, ...], rows: dict[int, int]) -> None:
    plan = neighbours(1, "sequence", 8, lengths)
    assert plan is not None
    assert {sent.step: sent.rows for sent in plan.sent} == rows


def test_what_comes_from_further_away_is_left_to_the_compiler() -> None:
    assert neighbours(1, "sequence", 4, [8, 8]) is None


class Tokens(nn.Module):
    """Tokens in front of patches, two behind them, and attention: a small vision transformer."""

    front: int

    @nn.compact
    def __call__(self, patches: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(patches)
        around = self.param("around", nn.initializers.normal(1.0), (1, self.front + 2, WIDTH))
        around = jnp.broadcast_to(around, (len(x), *around.shape[1:]))
        x = jnp.concatenate([around[:, : self.front], x, around[:, self.front :]], axis=1)
        x = x + nn.MultiHeadDotProductAttention(4)(x)
        return nn.Dense(1)(x.mean(1))


def loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["patches"]) - batch["wanted"]) ** 2).mean()


def batch_of() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    patches, wanted = random.normal(size=(ROWS, PATCHES, 5)), random.normal(size=(ROWS, 1))
    return {"patches": patches.astype(np.float32), "wanted": wanted.astype(np.float32)}


@pytest.mark.parametrize(
    ("plan", "front"),
    [
        ("data=2 sequence=all_to_all:4", 3),  # to both neighbours
        pytest.param("data=2 sequence=all_to_all:4", 1, marks=pytest.mark.full),
        pytest.param("data=2 tensor=4 sequence=gather", 1, marks=pytest.mark.full),
    ],
)
def test_gradients_are_one_devices(plan: str, front: int) -> None:
    found, batch = [], batch_of()
    for text, devices in (("data=1", jax.devices()[:1]), (plan, jax.devices())):
        program = cjax.parallelize(Tokens(front), loss, optax.sgd(0.1), batch, text, devices=devices)
        found.append(jax.tree.map(np.asarray, program.value_and_grad(begin(program), batch)))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6), *found)


def test_a_step_sends_what_neighbours_need_there_and_back() -> None:
    program = cjax.parallelize(Tokens(1), loss, optax.sgd(0.1), batch_of(), "data=2 sequence=all_to_all:4")
    facts = audit(program.lower().compile(), program.mesh)
    plan = neighbours(1, "sequence", 4, [1, PATCHES, 2])
    assert plan is not None
    row = ROWS // 2 * WIDTH * 4  # bytes of a position on a device
    assert facts.moved("collective-permute", ["sequence"]) == 2 * row * sum(sent.rows for sent in plan.sent) > 0
    # Queries, keys, values and results, there and back, each but for the part that stays; examples stay together.
    assert facts.moved("all-to-all", ["sequence"]) == 8 * 3 / 4 * row * 4
    assert facts.moved("all-gather") == 0, "each device adds up its own patches' part of a gradient"
    split = Readings(TraceSource(capture(Tokens(1), loss, batch_of()), batch_of())).split(program.plan)
    told = sum(move.elements for some in split.moves for move in some if move.kind == "collective-permute")
    assert told * 4 / 2 == facts.moved("collective-permute"), "float32, in two copies"
