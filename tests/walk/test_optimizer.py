"""Optimizers row by row: as optax would have it on the user's own tree, or refused with what to write instead."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import no_compilation
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizers import OPTIMIZERS, Optimizer

from cjax.sharding.storage.optimizer import store_optimizer
from cjax.sharding.storage.storage import Slot, Storage, make_storage
from cjax.tree import PyTree, leaf_names
from cjax.walk.ends import in_rows
from cjax.walk.optimizer import Arrays, RowOptimizer

# Without most of XLA's optimizations, powers of a scalar differ by 1e-9 from one program to another.
EXACT = 1e-9
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
            value = on_host(slot.load(array))
            leaves.update(zip(slot.leaves, value if slot.is_stack else [value], strict=True))
        return storage.treedef.unflatten([leaves[i] for i in range(len(leaves))])


def on_host(array: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


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
    assert jax.tree.structure(here) == jax.tree.structure(there), what
    for name, a, b in zip(leaf_names(there), jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        a, b = on_host(a), on_host(b)
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


REFUSED = {"labelled by path": "not the same for the other layers"}  # only some layers of a stack have moments


# What differs in what it reads beside a leaf's own gradient: norms and factors of a leaf, of all, the loss, a branch.
FEW = ("lamb, as FusedLAMB", "lars, as Lars", "average of parameters", "adafactor", "muon", "novograd", "prodigy",
       "adaptive clipping", "on a plateau", "every second step")  # fmt: skip
# And what the table has not: numbers drawn for each layer, and a branch that asks whether all is finite.
MORE: dict[str, Callable[[], Optimizer]] = {
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}
TABLE = OPTIMIZERS | MORE
ALL = os.environ.get("CJAX_TEST_ALL") == "1"


@pytest.mark.full(
    "adafactor",
    "adaptive clipping",
    "average of parameters",
    "every second step",
    "if finite",
    "lars, as Lars",
    "muon",
    "novograd",
    "on a plateau",
    "prodigy",
)
@pytest.mark.parametrize("name", [name for name in TABLE if name not in REFUSED] if ALL else (*FEW, "if finite"))
def test_does_as_on_the_whole_tree(name: str) -> None:
    with jax.enable_x64(True):
        compare(TABLE[name]())


@pytest.mark.parametrize("name", REFUSED)
def test_says_what_it_can_not_do(name: str) -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match=REFUSED[name]):
        Walk(OPTIMIZERS[name](), tree(0))


def by_layer(params: PyTree) -> PyTree:
    """Another rate for one layer; state of the same kind."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "first" if "layer_0" in str(path) else "rest", params)


@pytest.mark.full
def test_state_under_the_names_of_layers_and_one_program_for_layers_that_differ_in_numbers() -> None:
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform({"first": optax.adamw(1e-1), "rest": optax.adamw(1e-2)}, by_layer),
        # In float32, so of values that no order of operations rounds.
        optax.inject_hyperparams(optax.scale)(step_size=optax.linear_schedule(1.0, 0.5, 4)),
    )
    with jax.enable_x64(True):
        walk = compare(optimizer)
        updates = {id(walk.rows._passes.programs["update", (0, layer)]) for layer in range(3)}
        assert len(updates) == 1, "layers differ in a number alone"
        with no_compilation():
            walk.step(gradients(tree(0), 5), 1.0)


def test_numbers_that_the_outside_draws_for_a_layer_are_drawn_in_its_own_program() -> None:
    """What is handed to it are keys, and not as many numbers as it has parameters."""
    shape = jax.eval_shape(lambda: jax.tree.map(jnp.float32, tree(0)))
    storage, stacks, specs = stored(shape, mesh_of(1))
    rows = RowOptimizer(MORE["noise"](), shape, storage, stacks, specs.__getitem__, mesh_of(1))
    for owner in ((0, 1), (1, 2)):
        piece = rows._passes.updates[owner]
        drawn = [eqn.outvars[0].aval.shape for eqn in piece.eqns if eqn.primitive.name == "random_bits"]
        assert (9, 10) in drawn or (4, 9, 10) in drawn
        assert all(
            jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) or v.aval.size == 1 for v in piece.reads_of("joint")
        )


def test_equal_layers_compile_once() -> None:
    """Encoder, decoder and outside: an init, an export and an update each, with none of the outside to export; and two
    joins."""
    params = jax.tree.map(np.float32, tree(0))
    walk = Walk(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), params)
    walk.step(jax.tree.map(np.float32, gradients(params, 0)), 1.0)
    jitted = walk.rows._jitted
    assert sorted(name for (name, _), _ in jitted) == [
        "export", "export", "init", "init", "init outside", "join", "join", "update", "update", "update outside"
    ]  # fmt: skip
    assert all(run._jit._cache_size() == 1 for run in jitted.values())


def row_optimizer(optimizer: optax.GradientTransformation) -> tuple[RowOptimizer, Any, Any, Any]:
    """On one device, with the shapes of the tree, how it is stored and placed."""
    shape = jax.eval_shape(lambda: jax.tree.map(jnp.float32, tree(0)))
    storage, stacks, specs = stored(shape, mesh_of(1))
    return RowOptimizer(optimizer, shape, storage, stacks, specs.__getitem__, mesh_of(1)), shape, storage, specs


# The fewest passes: one for all norms of gradients, another where a norm waits for a number of all layers.
ROUNDS = {
    "adamw, vectors not decayed": 1, "global clipping": 1, "lamb": 1, "lamb of optax": 2,
    "lamb, as FusedLAMB": 2, "novograd": 1, "every second step": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDS)
def test_takes_as_few_passes_as_can_be(name: str) -> None:
    rows, shape, storage, specs = row_optimizer(OPTIMIZERS[name]())
    assert rows.num_rounds == ROUNDS[name]
    assert rows.storage == store_optimizer(OPTIMIZERS[name](), shape, storage, specs.__getitem__, mesh_of(1)).storage
    assert rows.reads(1, 0, 0) == {"grads"} or "lamb" in name or name == "novograd"
    assert len(rows.slots[0]) == len(rows.slots[1]) or "novograd" in name


# Whether the layers of the encoder and of the decoder are updated each by itself. Of the decoder's, which are one leaf
# to their author, a trust ratio needs the norms of all.
ALONE = {
    "sgd": (True, True), "schedule": (True, True), "adamw, vectors not decayed": (True, True), "lion": (True, True),
    "every second step": (True, True), "global clipping": (False, False), "on a plateau": (False, False),
    "lamb": (True, False), "lamb, as FusedLAMB": (False, False), "prodigy": (False, False), "if finite": (False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_layers_that_need_nothing_of_others_are_told_from_those_that_do(name: str) -> None:
    rows = row_optimizer(TABLE[name]())[0]
    assert (rows.is_alone(0), rows.is_alone(1)) == ALONE[name]


def test_layers_that_are_alone_are_given_what_all_are() -> None:
    params = jax.tree.map(np.float32, tree(0))
    walk = Walk(TABLE["schedule"](), params)
    walk.step(jax.tree.map(np.float32, gradients(params, 0)), 1.0)
    around = (walk.params.outside(params), walk.outside_opt, walk.outside_params)
    known = walk.rows.join(0, {}, *around, jnp.float32(1.0), {})
    early = walk.rows.before(walk.outside_opt, walk.outside_params)
    assert bool(early.pop("finite")) and early.keys() == known.keys() and known
    jax.tree.map(np.testing.assert_array_equal, early, known)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    params = jax.tree.map(np.float32, tree(0))
    walk = Walk(optax.adam(1e-1), params, 1)
    walk.step(jax.tree.map(np.float32, gradients(params, 0)), 1.0)
    before = walk.trees()
    for loss, factor in ((1.0, np.float32(np.nan)), (np.inf, np.float32(1))):
        grads = jax.tree.map(np.float32, gradients(params, 1))
        grads["decoder"]["bias"][3, 2] *= factor
        joint = walk.step(grads, loss)
        assert not joint["finite"]
        jax.tree.map(np.testing.assert_array_equal, walk.trees(), before)
    assert walk.step(jax.tree.map(np.float32, gradients(params, 1)), 1.0)["finite"]


def test_gives_up_what_it_is_given() -> None:
    params = jax.tree.map(np.float32, tree(0))
    walk = Walk(optax.adam(1e-1), params, 1)
    grads = jax.tree.map(np.float32, gradients(params, 0))
    old = (*walk.row_params[1, 2], *walk.row_opt[0, 1], *walk.outside_params)
    walk.step(grads, 1.0)
    assert all(array.is_deleted() for array in old)


@pytest.mark.full
def test_state_is_in_parts_as_its_parameter_is() -> None:
    """ZeRO over 8 devices: what each of them has of a row is an eighth, padded."""
    with jax.enable_x64(True):
        walk = compare(optax.adamw(1e-2), num_devices=8, num_steps=1)
    kernel = next(a for a in walk.row_opt[1, 0] if a.ndim == 2)
    assert kernel.shape == (9, 16) and kernel.addressable_shards[0].data.shape == (9, 2)


# -- refused -----------------------------------------------------------------------------------------------------------
def mixed(params: PyTree) -> optax.GradientTransformation:
    """Each layer's update is that of all layers together."""

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        layers = updates["encoder"]
        mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *layers.values())
        return {**updates, "encoder": dict.fromkeys(layers, mean)}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def rotated(params: PyTree) -> optax.GradientTransformation:
    """The layers of an author's stack meet in a product."""

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        kernel = updates["decoder"]["kernel"]
        kernel = jnp.einsum("lab,lk->kab", kernel, jnp.ones((kernel.shape[0],) * 2, kernel.dtype))
        return {**updates, "decoder": {**updates["decoder"], "kernel": kernel}}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def big(layers: int) -> PyTree:
    """Kernels that are too large to be handed from layer to layer."""
    small = jax.tree.map(np.float32, tree(0))
    kernel = jax.ShapeDtypeStruct((200, 100), jnp.float32)
    for layer in small["encoder"].values():
        layer["kernel"] = kernel
    small["decoder"]["kernel"] = jax.ShapeDtypeStruct((4, 200, 100), jnp.float32)
    return jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), small))


@pytest.mark.parametrize("make", [mixed, rotated])
def test_large_things_of_several_layers_are_not_put_together(make: Callable[[PyTree], Optimizer]) -> None:
    shape = big(4)
    storage, stacks, specs = stored(shape, mesh_of(1))
    with pytest.raises(ValueError, match=r"float32\[.*200, 100\] of layer 0 of the stack of .*optax.adamw"):
        RowOptimizer(make(shape), shape, storage, stacks, specs.__getitem__, mesh_of(1))


@pytest.mark.parametrize("make", [mixed, rotated])
def test_small_ones_are(make: Callable[[PyTree], Optimizer]) -> None:
    with jax.enable_x64(True):
        compare(optax.chain(make(tree(0)), optax.sgd(1e-2)), num_steps=1)


def test_an_optimizer_that_prints_is_refused() -> None:
    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        jax.debug.print("{}", updates["head"])
        return updates, state

    with jax.enable_x64(True), pytest.raises(ValueError, match="jax.debug.print"):
        Walk(optax.GradientTransformation(lambda params: optax.EmptyState(), update), tree(0), 1)


def test_an_optimizer_that_goes_from_layer_to_layer_is_refused() -> None:
    """Each layer's rate is that of the one before, a little changed by it."""

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        rate, new = jnp.float32(1), {}
        for number in range(20):
            rate = jnp.tanh(rate * updates[f"{number:02}"].sum())
            new[f"{number:02}"] = updates[f"{number:02}"] * rate
        return new, state

    shape = {f"{number:02}": jax.ShapeDtypeStruct((3, 2), jnp.float32) for number in range(20)}
    storage = make_storage(shape, [tuple(range(20))], lambda i: P(None, None), {"data": 1}, lambda i: None)
    with pytest.raises(ValueError, match="10 passes over all layers"):
        RowOptimizer(
            optax.GradientTransformation(lambda params: optax.EmptyState(), update), shape, storage, [(0,)],
            lambda i: P(None, None), mesh_of(1),
        )  # fmt: skip
