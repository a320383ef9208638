"""First values row by row: the author's own, to the bit, and never more of them at a time than a row."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cjax
from cjax.mesh import build_mesh
from cjax.sharding.place.model import ModelStorage, store_model
from cjax.sharding.storage.storage import Slot
from cjax.trace.author.capture import Capture, capture
from cjax.trace.source import TraceSource
from cjax.tree import PyTree
from cjax.walk.birth import RowBirth
from cjax.walk.layer_slots import layer_slot, num_layers
from cjax.walk.unstack import size_of

NUM, WIDTH = 3, 10


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        shift = self.param("shift", nn.initializers.truncated_normal(0.1), (WIDTH,))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))) + shift, None


class LinenUnrolled(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(NUM):
            x, _ = LinenBlock()(x)
        return nn.Dense(5)(x)


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=NUM)
        return nn.Dense(5)(blocks(name="blocks")(x, None)[0])


class LinenAtOnce(nn.Module):
    """One draw for the kernels of all layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(0.1), (NUM, WIDTH, WIDTH))
        bias = self.param("bias", nn.initializers.zeros, (NUM, WIDTH))
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0] + w[1]), None), x, (kernel, bias))[0]


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NNXUnrolled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(NUM)])
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NNXMapped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.vmap(lambda rngs: NNXBlock(rngs), in_axes=0, out_axes=0)(rngs.split(NUM))
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        x, _ = jax.lax.scan(lambda x, s: (nnx.merge(graph, s)(x), None), x, state)
        return self.head(x)


class Chained(nnx.Module):
    """Each layer's key is split off the one before; the last layer's is the last."""

    def __init__(self, rngs: nnx.Rngs):
        key, blocks = rngs.params(), []
        for _ in range(NUM):
            key, own = jax.random.split(key)
            blocks.append(NNXBlock(nnx.Rngs(own)))
        self.blocks = nnx.List(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def mean(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def prepared(
    model: Any, plan: str = "data=2 zero=3 tensor=2", num_devices: int = 4
) -> tuple[Capture, ModelStorage, Any]:
    batch = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    captured = capture(model, mean, batch)
    mesh = build_mesh(cjax.Plan.parse(plan).resolve(num_devices).axis_sizes(), jax.devices()[:num_devices])
    trace = TraceSource(captured, batch).read()
    return captured, store_model(captured, trace, cjax.Plan.parse(plan).resolve(num_devices), mesh), mesh


def stack_of(storage: ModelStorage) -> tuple[int, ...]:
    """The slots of the parameters that hold layers."""
    slots = storage.params.slots
    return tuple(i for i, slot in enumerate(slots) if slot.is_stack or (len(slot.shape) > 1 and slot.shape[0] == NUM))


def assert_bits(slot: Slot, given: jax.Array, wanted: object) -> None:
    np.testing.assert_array_equal(np.asarray(slot.load(given)), np.asarray(wanted))


def born(model: Any, **kwargs: Any) -> tuple[RowBirth, ModelStorage, tuple[int, ...], jax.Array]:
    """A birth of which every value was compared."""
    captured, storage, mesh = prepared(model, **kwargs)
    stack, slots, key = stack_of(storage), storage.params.slots, jax.random.key(7)
    birth = RowBirth(captured, storage, {"params": [stack]}, mesh)
    wanted: PyTree = jax.tree.leaves(jax.jit(captured.init)(key)[0])
    assert stack and all(num_layers(slots[i]) == NUM for i in stack)
    for layer in range(NUM):
        for i, array in zip(stack, birth.init_row("params", 0, layer, key), strict=True):
            own = wanted[slots[i].leaves[layer]] if slots[i].is_stack else wanted[slots[i].leaves[0]][layer]
            assert_bits(layer_slot(slots[i]), array, own)
            assert array.sharding.spec == layer_slot(slots[i]).stored_spec
    outside = [i for i in range(len(slots)) if i not in stack]
    for i, array in zip(outside, birth.init_outside(key)[0], strict=True):
        assert_bits(slots[i], array, wanted[slots[i].leaves[0]])
    return birth, storage, stack, key


def largest(birth: RowBirth, key: jax.Array) -> int:
    """Bytes of the largest value that a row's program makes."""
    return max(size_of(v) for piece in birth._plan(key).rows.values() for eqn in piece.eqns for v in eqn.outvars)


APART: dict[str, Callable[[], Any]] = {
    "linen, unrolled": LinenUnrolled,
    "linen, scanned": LinenScanned,
    "nnx, unrolled": lambda: lambda rngs: NNXUnrolled(rngs=rngs),
    "nnx, mapped": lambda: lambda rngs: NNXMapped(rngs=rngs),
}


@pytest.mark.full("linen, scanned", "nnx, mapped")
@pytest.mark.parametrize("name", APART)
def test_rows_are_the_authors_values(name: str) -> None:
    birth, storage, stack, key = born(APART[name]())
    assert largest(birth, key) == 4 * 2 * WIDTH * WIDTH, "a kernel of one layer"
    planned = birth._plan(key)
    assert len({id(program) for program in planned.programs.values()}) == 1
    assert {name[0] for name in birth._jitted} >= {"params", "outside"}
    assert all(run._cache_size() == 1 for run in birth._jitted.values())


@pytest.mark.full
def test_keys_that_hang_on_each_other() -> None:
    """The last layer needs a split of the chain that nobody else reads: a program of its own."""
    birth, *_, key = born(lambda rngs: Chained(rngs=rngs))
    assert len({id(program) for program in birth._plan(key).programs.values()}) <= 2
    assert largest(birth, key) == 4 * 2 * WIDTH * WIDTH


def test_a_leaf_that_is_made_in_one_piece_is_cut() -> None:
    birth, *_, key = born(LinenAtOnce())
    assert largest(birth, key) == NUM * 4 * WIDTH * WIDTH
    assert len({id(program) for program in birth._plan(key).programs.values()}) == 1


def test_another_key_gives_other_values_and_compiles_nothing() -> None:
    birth, storage, stack, key = born(APART["linen, unrolled"](), plan="data=1", num_devices=1)
    other = jax.random.key(8)
    with jax.checking_leaks():
        row = birth.init_row("params", 0, 1, other)
    assert all(run._cache_size() == 1 for run in birth._jitted.values())
    assert not np.array_equal(row[-1], birth.init_row("params", 0, 1, key)[-1])


def test_keys_of_another_kind() -> None:
    """rbg, whose bits depend on shapes: a row's are those that the whole init draws."""
    captured, storage, mesh = prepared(LinenUnrolled(), "data=1", 1)
    stack, key = stack_of(storage), jax.random.key(0, impl="rbg")
    birth = RowBirth(captured, storage, {"params": [stack]}, mesh)
    wanted = jax.tree.leaves(jax.jit(captured.init)(key)[0])
    for i, array in zip(stack, birth.init_row("params", 0, 2, key), strict=True):
        assert_bits(layer_slot(storage.params.slots[i]), array, wanted[storage.params.slots[i].leaves[2]])
