"""The first state of a program: the author's init, weights a model already holds, or weights given from outside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.program.saving import arrays_of, state_from
from cjax.program.sound import loses, not_finite
from cjax.program.state import Parts, State, store_leaves
from cjax.program.steps import make_adopt
from cjax.tree import leaf_names

PyTree = Any


def start(parts: Parts, init: Any, key: jax.Array, params: Any) -> State:
    """A fresh state; `params` (see `Program.init`) replace the parameters they name."""
    initial = parts.capture.initial
    if initial is None:
        state = init(key)
    else:
        shelves = list(parts.shelves)
        stored = [store_leaves(shelves[i], tree, parts.mesh) for i, tree in zip((0, 1, 3), initial, strict=True)]
        state = make_adopt(parts)(*stored, jax.device_put(key, parts.whole))
    return state if params is None else _with_params(parts, state, params)


def make_key(seed_or_key: Any) -> jax.Array:
    """A typed key, from a seed or a key of either form."""
    default = jax.eval_shape(lambda: jax.random.key(0)).dtype
    if isinstance(seed_or_key, int | np.integer):
        if not -(2**63) <= seed_or_key < 2**63:
            raise ValueError(f"init({seed_or_key}): a seed has 64 bits at most; write a smaller one, such as init(0).")
        return jax.random.key(seed_or_key)
    dtype, shape = getattr(seed_or_key, "dtype", None), np.shape(seed_or_key)
    if dtype == np.uint32 and len(shape) == 1:
        seed_or_key = jax.random.wrap_key_data(seed_or_key)
        dtype, shape = seed_or_key.dtype, seed_or_key.shape
    if dtype != default or shape:
        given = type(seed_or_key).__name__ if dtype is None else f"{dtype}{list(shape)}"
        raise ValueError(
            f"init takes a seed or one key of JAX's default kind ({default}), not {given}: init(0), or "
            "init(jax.random.key(0)). For another kind set jax_default_prng_impl before parallelize."
        )
    return seed_or_key


def _with_params(parts: Parts, state: State, params: Any) -> State:
    """Optimizer state starts from the given values too, for transformations that copy parameters."""
    arrays = arrays_of(state)
    wanted: dict[str, Any] = {}
    for tree in ("params", "frozen"):
        names, leaves = leaf_names(arrays[tree]), jax.tree.leaves(arrays[tree])
        wanted |= {name: (tree, i, leaf) for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))}
    given = _named(parts, params, wanted)
    problems = [f"{name}: this model has no such parameter" for name in given if name not in wanted]
    values: dict[str, dict[int, Any]] = {"params": {}, "frozen": {}}
    for name, value in given.items():
        if name not in wanted:
            continue
        tree, i, leaf = wanted[name]
        shape = tuple(getattr(value, "shape", leaf.shape if callable(value) else np.shape(value)))
        dtype = leaf.dtype if callable(value) else getattr(value, "dtype", np.asarray(value).dtype)
        if shape != leaf.shape:
            problems.append(f"{name}: {list(shape)} given, {list(leaf.shape)} needed")
        elif loses(dtype, leaf.dtype):
            problems.append(f"{name}: {dtype} given, {leaf.dtype} needed")
        elif callable(value):
            reader: Any = value
            try:
                array = jax.make_array_from_callback(leaf.shape, leaf.sharding, reader)
            except ValueError as error:
                problems.append(f"{name}: a callable gives the part of {list(leaf.shape)} at its index; {error}")
                continue
            if loses(array.dtype, leaf.dtype):
                problems.append(f"{name}: {array.dtype} given, {leaf.dtype} needed")
            values[tree][i] = array.astype(leaf.dtype)
        else:
            with np.errstate(over="ignore"):  # what is too large is infinite then, and told below
                values[tree][i] = jax.device_put(jnp.asarray(value, leaf.dtype), leaf.sharding)
    replaced = {name: values[tree][i] for name, (tree, i, _) in wanted.items() if i in values[tree]}
    problems += not_finite(replaced, parts.mesh)
    if problems:
        known = ", ".join(list(wanted)[:4])
        raise ValueError(
            "params do not fit this model:\n  " + "\n  ".join(problems) + f"\nIts names are such as {known}."
        )
    for tree, new in values.items():
        leaves, treedef = jax.tree.flatten(arrays[tree])
        arrays[tree] = jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(leaves)])
    fresh = state_from(parts, arrays)
    return make_adopt(parts)(fresh._params, fresh._frozen, fresh._carried, fresh._key)


def _named(parts: Parts, params: Any, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """`params` as `{path: value}`; a folder of another library's names goes through the tables of `cjax.models`."""
    if isinstance(params, str | Path):
        path = Path(params)
        has_config = ((path if path.is_dir() else path.parent) / "config.json").is_file()
        found = _read_safetensors(path, may_lack=has_config)
        return parts.readers(path) if has_config and not found.keys() & wanted.keys() else found
    if isinstance(params, Mapping) and all(isinstance(k, str) and "/" in k for k in params):
        return params
    if jax.tree_util.all_leaves([params]):
        raise TypeError(
            f"`params` is a {type(params).__name__}; give a tree of arrays, {{path: array}}, or a safetensors path."
        )
    return dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))


def _read_safetensors(path: Path, may_lack: bool) -> dict[str, Any]:
    """Each tensor as a callable of an index, so that a device reads its own part only; if it `may_lack`, a folder need
    not have any."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("reading safetensors needs: pip install 'cjax[weights]'") from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not (files or may_lack) or not all(f.exists() for f in files):
        what = " (it is a checkpoint: program.restore(path))" if (path / "checkpoint.json").is_file() else ""
        raise FileNotFoundError(f"no safetensors file at {path}{what}")
    found = {}
    for file in files:
        try:
            handle = safetensors.safe_open(str(file), framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file ({error}); copy or download it again.") from error
        for name in handle.keys():
            piece = handle.get_slice(name)
            found[name.replace(".", "/")] = _Slice(piece)
    return found


class _Slice:
    """A tensor in a file: its shape, and its values by index."""

    def __init__(self, piece: Any) -> None:
        self._piece = piece
        self.shape = tuple(piece.get_shape())

    def __call__(self, index: Any) -> Any:
        return self._piece[index]
