"""JAX's kernels for Hopper cards: traced as they are called here, and compiled for a card that is absent. What they
give is tried where a card is (`tests/test_gpu_experts.py`)."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.jax_compat.kernels import by_group, is_hopper, of_groups
from cjax.mesh import compile_lowered, resolve_devices

ROWS, GROUPS, IN, OUT = 384, 5, 256, 640


def arrays(*shapes: tuple[int, ...], sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
    found = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return [*found, jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=sharding)]


def test_hopper_cards_are_told_by_what_they_can() -> None:
    def card(platform: str, **facts: str) -> Any:
        return types.SimpleNamespace(platform=platform, **facts)

    assert is_hopper(card("gpu", compute_capability="9.0")) and is_hopper(card("cuda", compute_capability="9.0"))
    assert not is_hopper(card("gpu", compute_capability="8.0")) and not is_hopper(card("gpu"))
    assert not is_hopper(card("rocm", compute_capability="9.0")) and not is_hopper(jax.devices("cpu")[0])


def test_they_take_what_is_handed_to_them() -> None:
    card: Any = types.SimpleNamespace(core_count=132)
    for turned in (False, True):
        weights = (GROUPS, OUT, IN) if turned else (GROUPS, IN, OUT)
        made = jax.eval_shape(lambda *ins: by_group(*ins, turned), *arrays((ROWS, IN), weights))  # noqa: B023
        assert made.shape == (ROWS, OUT) and made.dtype == jnp.bfloat16
    made = jax.eval_shape(lambda *ins: of_groups(*ins, card), *arrays((ROWS, IN), (ROWS, OUT)))
    assert made.shape == (GROUPS, IN, OUT) and made.dtype == jnp.bfloat16


@pytest.mark.aot
def test_they_compile_for_a_card_that_is_not_here() -> None:
    (device,) = resolve_devices("h100:1")
    alone = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    assert is_hopper(device)

    def both(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = by_group(rows, weights, sizes, False)
        return made, of_groups(rows, made, sizes, device)

    given = arrays((ROWS, IN), (GROUPS, IN, OUT), sharding=alone)
    lowered = jax.jit(both).trace(*given).lower(lowering_platforms=("cuda",))
    text = compile_lowered(lowered, [device]).as_text()
    assert text is not None and text.count('custom_call_target="mosaic_gpu') == 2
