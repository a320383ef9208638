"""Between the user's trees and stored arrays: checked leaf by leaf, moved slot by slot."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cjax.mesh import compiler_options
from cjax.sharding.storage.storage import Slot, Storage
from cjax.tree import PyTree, leaf_names
from cjax.walk.stores import HOST, moved

Arrays = tuple[jax.Array, ...]


def members(storage: Storage, tree: PyTree) -> Sequence[list[Any]]:
    """The leaves of `tree` that each slot holds."""
    leaves = storage.treedef.flatten_up_to(tree)
    return [[leaves[i] for i in slot.leaves] for slot in storage.slots]


def check_fits(storage: Storage, tree: PyTree, what: str) -> PyTree:
    """`tree` in the containers that `storage` knows.

    Raises:
      ValueError: it is another tree; every missing, unknown and differing leaf is listed.
    """

    def told(tree: PyTree) -> dict[str, str]:
        leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        texts = [f"{jax.dtypes.canonicalize_dtype(x.dtype, True)}{list(x.shape)}" for x in leaves]
        return dict(zip(leaf_names(tree), texts, strict=True))

    given, needed = told(tree), told(storage.leaf_shapes())
    lines = [f"{name}: {text} is missing" for name, text in needed.items() if name not in given]
    lines += [f"{name}: not known here" for name in given if name not in needed]
    lines += [f"{n}: {given[n]} given, {t} needed" for n, t in needed.items() if given.get(n, t) != t]
    if lines:
        instead = "Give the tree of a program of this model, with the same optimizer and `wrt`."
        raise ValueError("\n  ".join([f"{what} of another model, optimizer or `wrt`:", *lines]) + f"\n{instead}")
    leaves = dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
    return jax.tree.unflatten(storage.treedef, [leaves[name] for name in needed])


def store_leaves(storage: Storage, tree: PyTree, mesh: Mesh) -> Arrays:
    """Stored arrays of a concrete tree, slot by slot: beside it, and what is stored, one slot is all that exists."""
    return store_members(storage, members(storage, tree), mesh)


def store_members(storage: Storage, leaves: Sequence[list[Any]], mesh: Mesh) -> Arrays:
    """The same of the leaves of each slot, whose lists are emptied: what nobody else has is freed on the way."""
    placements = members(storage, storage.leaf_shardings(mesh))
    found = []
    for slot, own, placed in zip(storage.slots, leaves, placements, strict=True):
        found.append(store_slot(slot, own, placed, mesh))
        own.clear()
    return tuple(found)


def store_slot(slot: Slot, leaves: Sequence[Any], placed: Sequence[NamedSharding], mesh: Mesh) -> jax.Array:
    """The stored array of a slot, which shares no memory with the leaves; `placed` says where these are first."""
    arrays = [put(leaf, sharding) for leaf, sharding in zip(leaves, placed, strict=True)]
    stored = _gatherer(alike(slot), NamedSharding(mesh, slot.stored_spec), mesh)(*arrays)
    # Waited for: JAX may read NumPy's arrays where they lie, and their owner may write to them once this returned.
    return jax.block_until_ready(stored)


def put(leaf: Any, placed: NamedSharding) -> jax.Array:
    """A leaf where it is to be, which may be the leaf itself."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return jax.device_put(leaf, placed)
    if leaf.sharding.memory_kind == HOST:
        assert isinstance(leaf.sharding, NamedSharding)
        (leaf,) = moved((leaf,), [NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)])
    if leaf.sharding.is_equivalent_to(placed, leaf.ndim):
        return leaf
    # With options of ours, and one at a time: processes that take the collectives of several such programs in other
    # orders wait for each other for ever, and of JAX's own program nobody knows.
    assert isinstance(placed.mesh, Mesh)
    return jax.block_until_ready(mover(placed, placed.mesh)(leaf))


@functools.lru_cache(maxsize=1024)
def mover(placed: NamedSharding, mesh: Mesh) -> Any:
    """A program that only places an array."""
    return jax.jit(lambda x: x, out_shardings=placed, compiler_options=compiler_options(mesh))


def load_slot(slot: Slot, array: jax.Array, placed: Sequence[NamedSharding], mesh: Mesh) -> list[jax.Array]:
    """The leaves of a slot, in the user's shapes."""
    return _scatterer(alike(slot), tuple(placed), mesh)(array)


def alike(slot: Slot) -> Slot:
    """`slot` without the names of its leaves: slots that are kept in the same way are equal."""
    return dataclasses.replace(slot, leaves=tuple(range(len(slot.leaves))))


@functools.lru_cache(maxsize=1024)
def _gatherer(slot: Slot, sharding: NamedSharding, mesh: Mesh) -> Any:
    """From a slot's leaves to its stored array: one program for all that are kept in the same way."""

    def gather(*leaves: jax.Array) -> jax.Array:
        return slot.store(jnp.stack(leaves) if slot.is_stack else jnp.copy(leaves[0]))

    return jax.jit(gather, out_shardings=sharding, compiler_options=compiler_options(mesh))


@functools.lru_cache(maxsize=1024)
def _scatterer(slot: Slot, placed: tuple[NamedSharding, ...], mesh: Mesh) -> Any:
    """From a slot's stored array to its leaves."""

    def scatter(stored: jax.Array) -> list[jax.Array]:
        array = slot.load(stored)
        return [array[i] for i in range(len(slot.leaves))] if slot.is_stack else [array]

    return jax.jit(scatter, out_shardings=list(placed), compiler_options=compiler_options(mesh))
