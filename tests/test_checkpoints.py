"""Models x plans: what is saved under one plan is what another reads, bit by bit."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from contract import UNDER_ALL, is_key, on_host, program_of
from plans import cover
from zoo import MODELS

from cjax.program.saving import arrays_of, shapes_of, state_from

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
NAMES = list(UNDER_ALL)
# Each once the plan of the run that saves, once of the one that takes over; the second half cuts layers into stages.
ANY = (
    "data=8 -> tensor=4 zero=1",
    "zero=3 -> data=4 tensor=2 zero=2",
    "zero=3/4 remat=block -> zero=1",
    "tensor=8 -> zero=3 microbatches=2",
    "tensor=2d:4 zero=3 -> data=8",
    "tensor=2.5d:8/2 zero=1 -> tensor=3d:8",
    "tensor=3d:8 -> tensor=2d:4",
    "zero=2 precision=bfloat16 -> data=4 tensor=2 precision=float16",
)
STAGES = (
    "pipeline=1f1b:2 microbatches=4 zero=3 -> tensor=8",
    "tensor=2.5d:8/2 -> pipeline=zero_bubble:2 microbatches=4 tensor=2 zero=1",
    "data=2 tensor=4 zero=3 -> pipeline=gpipe:2 microbatches=2 tensor=2",
)
DEEPER = (
    "pipeline=interleaved:2/2 microbatches=4 -> pipeline=1f1b:4 microbatches=8 tensor=2",
    "pipeline=zero_bubble:2/2 microbatches=4 zero=3 -> tensor=2d:4 zero=3",
)


# Left to the full run: each of their two sides moves in another pair too.
ALIKE = (
    "tensor=2d:4 zero=3 -> data=8",
    "tensor=3d:8 -> tensor=2d:4",
    "pipeline=1f1b:2 microbatches=4 zero=3 -> tensor=8",
    "data=2 tensor=4 zero=3 -> pipeline=gpipe:2 microbatches=2 tensor=2",
    "zero=3 -> data=4 tensor=2 zero=2",
    "pipeline=zero_bubble:2/2 microbatches=4 zero=3 -> tensor=2d:4 zero=3",
)
# By default these: every kind of state that a model carries, and of `cjax.models`, which carry parameters alone, two.
CHOSEN = ["linen_part_frozen", "nnx_llama", "linen_lstm", "nnx_conv", "nnx_scan", "linen_masked_mean"]


def pairs() -> list[tuple[str, str]]:
    names = NAMES if ALL else CHOSEN
    blocks = {name: MODELS[name].blocks for name in names if name in MODELS and MODELS[name].blocks}
    layered, deep = list(blocks), [name for name, found in blocks.items() if found == (4,)]
    products = ((names, ANY), (layered, STAGES), (deep, DEEPER))
    if ALL:
        return [(name, moves) for names, table in products for name in names for moves in table]
    # Of many models a few are enough for the few moves between stages.
    found = {pair for names, table in products for pair in cover(names[:: len(ANY) // len(table)], table, 1)}
    return sorted((name, moves) for name, moves in found if moves not in ALIKE)


def drawn(shapes: Any) -> Any:
    """Random bits for all that a state holds, so that no two elements are taken for each other."""
    rng = np.random.default_rng(0)

    def one(shape: Any) -> jax.Array:
        if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
            seeds = rng.integers(0, 2**31, shape.shape).astype(np.uint32)
            return jax.device_put(jax.vmap(jax.random.key)(seeds.reshape(-1)).reshape(shape.shape), shape.sharding)
        numbers = rng.standard_normal(shape.shape) if shape.dtype.kind == "f" else rng.integers(0, 100, shape.shape)
        return jax.device_put(numbers.astype(shape.dtype), shape.sharding)

    return jax.tree.map(one, shapes)


@pytest.mark.full(
    "linen_lstm-tensor=8 -> zero=3 microbatches=2",
    "linen_masked_mean-tensor=2.5d:8/2 -> pipeline=zero_bubble:2 microbatches=4 tensor=2 zero=1",
    "linen_part_frozen-tensor=2.5d:8/2 zero=1 -> tensor=3d:8",
    "linen_part_frozen-zero=2 precision=bfloat16 -> data=4 tensor=2 precision=float16",
    "nnx_scan-zero=3/4 remat=block -> zero=1",
)
@pytest.mark.parametrize(("name", "moves"), pairs())
def test_a_run_moves_between_plans(name: str, moves: str, tmp_path: Path) -> None:
    """Parameters, frozen ones, the model state, all state of the optimizer, keys, and the scale of the loss."""
    here, there = (program_of(name, plan, wide=False) for plan in moves.split(" -> "))
    wanted = drawn(shapes_of(here._composed))
    here.save(tmp_path / "run", state_from(here._composed, wanted))
    restored = there.restore(tmp_path / "run")
    given = arrays_of(restored)
    jax.tree.map(np.testing.assert_array_equal, on_host(given), on_host(wanted))
    placed = jax.tree.map(
        lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), restored, there._composed.state_shardings
    )
    assert all(jax.tree.leaves(placed))
    assert any(is_key(leaf) for leaf in jax.tree.leaves(given)) and len(jax.tree.leaves(given)) > 8
