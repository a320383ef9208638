"""Optimizers row by row: as optax would have it on the user's own tree, or refused with what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizers import OPTIMIZERS, Optimizer

from cjax.sharding.storage.storage import Slot, Storage, make_storage
from cjax.tree import PyTree, leaf_names
from cjax.walk.ends import in_rows
from cjax.walk.optimizer import Arrays, RowOptimizer

EXACT = 1e-12
P = PartitionSpec


def tree(seed: int) -> PyTree:
    """An encoder of 3 layers and a decoder of 4 that its author stacked, and what is around them; odd shapes."""
    rng = np.random.default_rng(seed)

    def layer(*lead: int) -> PyTree:
        return {"bias": rng.normal(size=(*lead, 7)), "kernel": rng.normal(size=(*lead, 9, 10)),
                "scale": rng.normal(size=lead)}  # fmt: skip

    encoder = {f"layer_{n}": layer() for n in range(3)}
    return {"decoder": layer(4), "embed": rng.normal(size=(11, 9)), "encoder": encoder, "head": rng.normal(size=(5,))}


def mesh_of(num: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num]), ("data",))


def stored(shape: PyTree, mesh: Mesh) -> tuple[Storage, list[tuple[int, ...]], list[PartitionSpec]]:
    """As ZeRO keeps it: the last dim but for the stack's over the data axis, padded. And the slots of both stacks."""
    names, leaves = leaf_names(shape), jax.tree.leaves(shape)
    groups = [tuple(i for i, n in enumerate(names) if n.startswith("encoder") and n.endswith(part))
              for part in ("bias", "kernel", "scale")]  # fmt: skip
    lead = [1 if name.startswith("decoder") else 0 for name in names]
    specs = [
        P(*[None] * (leaf.ndim - 1), "data") if leaf.ndim > first else P(*[None] * leaf.ndim)
        for leaf, first in zip(leaves, lead, strict=True)
    ]
    storage = make_storage(shape, groups, specs.__getitem__, dict(mesh.shape), lambda i: None)
    slots = [[n for n, slot in enumerate(storage.slots) if names[slot.leaves[0]].startswith(part)]
             for part in ("encoder", "decoder")]  # fmt: skip
    return storage, [tuple(of) for of in slots], specs


class Here:
    """A tree as rows: what a walk would hold."""

    def __init__(self, storage: Storage, stacks: list[tuple[int, ...]], mesh: Mesh):
        self.laid, self.mesh = in_rows(storage, stacks), mesh
        self.num_layers = (3, 4)

    def rows(self, tree: PyTree) -> dict[tuple[int, int], Arrays]:
        leaves = self.laid.storage.treedef.flatten_up_to(tree)
        return {
            (k, layer): tuple(
                self.put(slot, leaves[self.laid.storage.slots[i].leaves[layer]] if not apart
                         else leaves[self.laid.storage.slots[i].leaves[0]][layer])
                for i, slot, apart in zip(rows.slots, rows.of_layer, rows.apart, strict=True)
            )
            for k, rows in enumerate(self.laid.stacks) for layer in range(self.num_layers[k])
        }  # fmt: skip

    def put(self, slot: Slot, leaf: object) -> jax.Array:
        return jax.device_put(slot.store(jnp.asarray(leaf)), NamedSharding(self.mesh, slot.stored_spec))

    def outside(self, tree: PyTree) -> Arrays:
        arrays = self.laid.storage.store(tree)
        slots = self.laid.storage.slots
        return tuple(
            jax.device_put(jnp.array(arrays[i]), NamedSharding(self.mesh, slots[i].stored_spec))
            for i in self.laid.outside
        )

    def tree(self, rows: dict[tuple[int, int], Arrays], outside: Arrays) -> PyTree:
        storage = self.laid.storage
        leaves: dict[int, object] = {}
        for k, of in enumerate(self.laid.stacks):
            for place, (i, slot, apart) in enumerate(zip(of.slots, of.of_layer, of.apart, strict=True)):
                own = [np.asarray(slot.load(rows[k, layer][place])) for layer in range(self.num_layers[k])]
                found = (
                    {storage.slots[i].leaves[0]: np.stack(own)}
                    if apart
                    else zip(storage.slots[i].leaves, own, strict=True)
                )
                leaves.update(found)
        for i, array in zip(self.laid.outside, outside, strict=True):
            slot = storage.slots[i]
            value = np.asarray(slot.load(array))
            leaves.update(zip(slot.leaves, value if slot.is_stack else [value], strict=True))
        return storage.treedef.unflatten([leaves[i] for i in range(len(leaves))])


class Walk:
    """An optimizer row by row, over a tree."""

    def __init__(self, optimizer: Optimizer, params: PyTree, num_devices: int = 2):
        shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        mesh = mesh_of(num_devices)
        storage, stacks, specs = stored(shape, mesh)
        self.rows = RowOptimizer(optimizer, shape, storage, stacks, specs.__getitem__, mesh)
        self.params, self.opt = Here(storage, stacks, mesh), Here(self.rows.storage, list(self.rows.slots), mesh)
        self.row_params, self.outside_params = self.params.rows(params), self.params.outside(params)
        self.row_opt = {key: self.rows.init_row(*key, row) for key, row in self.row_params.items()}
        self.outside_opt = self.rows.init_outside(self.outside_params)

    def step(self, grads: PyTree, loss: float) -> dict[str, jax.Array]:
        rows, given, outside = self.rows, self.params.rows(grads), self.params.outside(grads)
        around = (outside, self.outside_opt, self.outside_params)
        value = jnp.float32(loss)
        joint = rows.join(0, {}, *around, value, {})
        for number in range(1, rows.num_rounds + 1):
            exports = {
                key: rows.export(number, *key, given[key], self.row_opt[key], self.row_params[key], joint)
                for key in given
            }
            joint = rows.join(number, exports, *around, value, joint)
        for key in given:
            old = given[key], self.row_opt[key], self.row_params[key]
            self.row_params[key], self.row_opt[key] = rows.update_row(*key, *old, joint)
        self.outside_params, self.outside_opt = rows.update_outside(*around, value, joint)
        return joint

    def trees(self) -> tuple[PyTree, PyTree]:
        return self.params.tree(self.row_params, self.outside_params), self.opt.tree(self.row_opt, self.outside_opt)


def gradients(params: PyTree, step: int) -> PyTree:
    rng = np.random.default_rng(100 + step)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape) * 10 ** rng.uniform(-2, 2), params)


def assert_same(here: PyTree, there: PyTree, what: str) -> None:
    assert jax.tree.structure(here) == jax.tree.structure(there)
    for name, a, b in zip(leaf_names(there), jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype, (what, name, a.dtype, b.dtype)
        if not np.array_equal(a, b):
            assert np.linalg.norm(a - b) <= EXACT * np.linalg.norm(b), (what, name)


def compare(optimizer: Optimizer, num_devices: int = 2, num_steps: int = 3) -> Walk:
    params = tree(0)
    walk = Walk(optimizer, params, num_devices)
    there = optimizer.init(params)
    more = jax.jit(optax.with_extra_args_support(optimizer).update)
    assert_same(walk.trees()[1], there, "first state")
    for step in range(num_steps):
        grads, loss = gradients(params, step), 2.5 + step
        joint = walk.step(grads, loss)
        assert np.isclose(joint["norm"], optax.tree.norm(grads), rtol=1e-12)
        updates, there = more(grads, there, params, value=jnp.float32(loss))
        params = optax.apply_updates(params, updates)
        mine = walk.trees()
        assert_same(mine[0], params, f"parameters, step {step}")
        assert_same(mine[1], there, f"state, step {step}")
    return walk


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_does_as_on_the_whole_tree(name: str) -> None:
    with jax.enable_x64(True):
        compare(OPTIMIZERS[name]())
