"""First states of programs from values on the host: none of it is compiled.

Whether a program's own init makes the author's numbers is a question of its own (tests/test_contract.py); whatever
begins with them could begin with others as well.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.optim import LossScale, init_noise
from cjax.program import Program
from cjax.program.state import Arrays, State
from cjax.program.steps import make_adopt
from cjax.sharding.storage.storage import Storage
from cjax.tree import PyTree, leaf_names

Trees = tuple[PyTree, PyTree, PyTree]  # params, frozen, model_state


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def drawn(shapes: PyTree, seed: int, near: float = 0.0, share: float = 1.0) -> PyTree:
    """Numbers for a tree of shapes: in matrices of a size that keeps activations as large as they are, in vectors about
    `near` or, where that is zero, about what scales and biases are; other keys for each, and counts of zero. All that
    is random is multiplied by `share`."""
    rng = np.random.default_rng(seed)

    def one(name: str, shape: Any) -> Any:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            seeds = rng.integers(0, 2**31, shape.shape)
            return jax.vmap(jax.random.key)(seeds.reshape(-1)).reshape(shape.shape)
        if not jnp.issubdtype(shape.dtype, jnp.inexact):
            return np.zeros(shape.shape, shape.dtype)
        about = near or ("scale" in name.lower())
        spread = share * 0.1 if about or len(shape.shape) < 2 else share * np.prod(shape.shape) ** -0.25
        found = about + spread * rng.standard_normal(shape.shape)
        if jnp.issubdtype(shape.dtype, jnp.complexfloating):
            found = found + 1j * spread * rng.standard_normal(shape.shape)
        return found.astype(shape.dtype)

    leaves = [one(name, leaf) for name, leaf in zip(leaf_names(shapes), jax.tree.leaves(shapes), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def stored(shelf: Storage, mesh: Any, leaves: Sequence[Any]) -> Arrays:
    """The leaves of a tree as a program keeps them."""
    arrays = []
    for slot, sharding in zip(shelf.slots, shelf.shardings(mesh), strict=True):
        picked = [leaves[i] for i in slot.leaves]
        stack = jnp.stack if any(map(is_key, picked)) else np.stack
        array = slot.store(stack(picked) if slot.is_stack else picked[0])
        arrays.append(jax.device_put(_copy(array), sharding))
    return tuple(arrays)


def _copy(array: Any) -> Any:
    """A step is given the state's memory, which is not to be that of the values."""
    return jax.random.wrap_key_data(np.array(jax.random.key_data(array))) if is_key(array) else np.array(array)


def start(program: Program, trees: Trees, *, moments: bool) -> State:
    """The state that begins with these values; with `moments`, all that the optimizer keeps is zero at first, else its
    own init is asked, which is compiled."""
    parts = program._composed
    if parts.walker is not None:
        return _start_of_walk(program, trees, moments)
    shelves = (parts.shelves.params, parts.shelves.frozen, parts.shelves.model_state)
    held = [stored(shelf, program.mesh, jax.tree.leaves(tree)) for shelf, tree in zip(shelves, trees, strict=True)]
    key = jax.device_put(jax.random.key(0), parts.whole)
    if not moments:
        return make_adopt(parts)(*held, key)

    def zeros(leaf: Any) -> Any:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    small = (np.int32(0), (parts.scaling or LossScale()).init(), init_noise())
    step, scaling, noise = jax.tree.map(lambda x: jax.device_put(np.array(x), parts.whole), small)
    params, frozen, model_state = held
    opt = jax.tree.map(zeros, parts.state_shape._opt)
    return State(step, params, frozen, opt, model_state, key, scaling, noise, parts.shelves)


def _start_of_walk(program: Program, trees: Trees, moments: bool) -> State:
    """The same for a program whose layers have rows."""
    parts = program._composed
    params, frozen, model_state = trees
    small = {"step": np.int32(0), "key": jax.random.key(0), "loss_scale": (parts.scaling or LossScale()).init()}
    if moments:
        opt = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parts.shelves.opt.leaf_shapes())
    else:
        opt = jax.jit(parts.given.optimizer.init)(jax.tree.map(np.asarray, params))
    state = {"params": params, "frozen": frozen, "carried": model_state, "opt_state": opt, "noise_scale": init_noise()}
    return program.from_arrays(state | small)


def first_values(program: Program) -> Trees:
    """Numbers drawn for a program's model, the same under every plan; what an instance holds, as it is."""
    capture = program._composed.capture
    if capture.initial is not None:
        return capture.initial
    return values_for(capture.params_shape, capture.frozen_shape, capture.model_state_shape)


def values_for(params: PyTree, frozen: PyTree, model_state: PyTree, share: float = 1.0) -> Trees:
    return drawn(params, 0, share=share), drawn(frozen, 1, share=share), drawn(model_state, 2, near=1.0, share=share)


def begin(program: Program, *, moments: bool = True) -> State:
    """In place of `program.init(0)`, where a test is about what comes after it."""
    return start(program, first_values(program), moments=moments)
