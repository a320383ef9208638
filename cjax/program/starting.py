"""The first state of a program: the author's init, weights a model already holds, or weights given from outside."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cjax.mesh import is_compile_only
from cjax.program.composed import Composed
from cjax.program.keep import load_slot, members, store_slot
from cjax.program.sound import Sound, loses
from cjax.program.state import State
from cjax.program.steps import make_adopt, make_init, make_trees
from cjax.tree import kind_of, leaf_names


class Starter:
    """First states of one program; each of its functions is compiled once."""

    def __init__(self, composed: Composed) -> None:
        self._composed = composed
        self._init, self._trees, self._adopt = make_init(composed), make_trees(composed), make_adopt(composed)

    def __call__(self, key: jax.Array, params: Any) -> State:
        """A fresh state; `params` (see `Program.init`) replace the parameters they name.

        The optimizer's state is made last, of the values that it starts from, and given values take the place of the
        model's own one slot at a time: beside the state, no more than one slot is held.
        """
        composed, initial = self._composed, self._composed.capture.initial
        if initial is None and params is None:
            return self._init(key)
        given = {} if params is None else given_values(composed, params)
        shelves = (composed.shelves.params, composed.shelves.frozen, composed.shelves.model_state)
        stored: list[list[Any]] = [[None] * len(shelf.slots) for shelf in shelves]
        if initial is None:
            stored = [list(arrays) for arrays in self._trees(key)]
        problems: list[str] = []
        for tree, (shelf, arrays) in enumerate(zip(shelves, stored, strict=True)):
            placements = members(shelf, shelf.leaf_shardings(composed.mesh))
            own = members(shelf, initial[tree]) if initial is not None else None
            for place, (slot, placed) in enumerate(zip(shelf.slots, placements, strict=True)):
                values = [given.get((tree, leaf)) for leaf in slot.leaves]
                if own is None and not any(values):
                    continue
                old, arrays[place] = arrays[place], None
                if own is not None:
                    leaves = own[place]
                else:
                    leaves = values if all(values) else load_slot(slot, old, placed, composed.mesh)
                del old
                leaves = [
                    leaf if value is None else value.placed(sharding, problems)
                    for leaf, value, sharding in zip(leaves, values, placed, strict=True)
                ]
                if not problems:
                    arrays[place] = store_slot(slot, leaves, placed, composed.mesh)
        refuse_values(problems, composed)
        return self._adopt(*map(tuple, stored), jax.device_put(key, composed.whole))


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


@dataclass(frozen=True)
class _Value:
    """A given value of one parameter: an array, or a callable of an index."""

    name: str
    value: Any
    shape: tuple[int, ...]
    dtype: Any

    def placed(self, sharding: Any, problems: list[str]) -> Any:
        """The value on its devices; what it holds, and what a callable gives, may be `problems`."""
        sound, reader = Sound(self.dtype), self.value
        if isinstance(reader, jax.Array):
            array = jax.device_put(reader.astype(self.dtype), sharding)
            sound.look((), array)
        elif not callable(reader):
            array = jax.device_put(sound.look((), np.asarray(reader)), sharding)
        else:
            try:
                array = jax.make_array_from_callback(
                    self.shape, sharding, lambda index: sound.look(index, np.asarray(reader(index)))
                )
            except ValueError as error:
                problems.append(f"{self.name}: a callable gives the part of {list(self.shape)} at its index; {error}")
                return None
        problems += [f"{self.name}: {text}" for text in sound.problems(self.shape)]
        return array


def given_values(composed: Composed, params: Any) -> dict[tuple[int, int], _Value]:
    """The given values by tree (params, frozen) and leaf; what does not fit is listed at once."""
    wanted = _wanted(composed)
    given = _named(composed, params, wanted)
    problems = [f"{name}: this model has no such parameter" for name in given if name not in wanted]
    values = {}
    for name in [name for name in given if name in wanted]:
        value, (tree, i, leaf, _) = given[name], wanted[name]
        shape = tuple(getattr(value, "shape", leaf.shape if callable(value) else np.shape(value)))
        dtype = leaf.dtype if callable(value) else getattr(value, "dtype", np.asarray(value).dtype)
        if shape != leaf.shape:
            problems.append(f"{name}: {list(shape)} given, {list(leaf.shape)} needed")
        elif not callable(value) and loses(dtype, leaf.dtype):
            problems.append(f"{name}: {dtype} given, {leaf.dtype} needed")
        else:
            values[tree, i] = _Value(name, value, leaf.shape, leaf.dtype)
    if problems:
        for tree, i, _, sharding in wanted.values():
            if (tree, i) in values and callable(values[tree, i].value):
                values[tree, i].placed(sharding, problems)
    refuse_values(problems, composed)
    return values


def _wanted(composed: Composed) -> dict[str, tuple[int, int, Any, Any]]:
    """Parameters by name: tree, leaf, shape and placement."""
    found = {}
    for tree, shelf in enumerate((composed.shelves.params, composed.shelves.frozen)):
        shapes, placed = shelf.leaf_shapes(), jax.tree.leaves(shelf.leaf_shardings(composed.mesh))
        for i, (name, leaf) in enumerate(zip(leaf_names(shapes), jax.tree.leaves(shapes), strict=True)):
            found[name] = (tree, i, leaf, placed[i])
    return found


def refuse_values(problems: list[str], composed: Composed) -> None:
    if problems:
        known = ", ".join(list(_wanted(composed))[:4])
        raise ValueError(
            "params do not fit this model:\n  " + "\n  ".join(problems) + f"\nIts names are such as {known}."
        )


def _named(composed: Composed, params: Any, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """`params` as `{path: value}`; a folder of another library's names goes through the tables of `cjax.models`."""
    if isinstance(params, str | Path):
        path = Path(params)
        has_config = ((path if path.is_dir() else path.parent) / "config.json").is_file()
        found = _read_safetensors(path, may_lack=has_config)
        readers = composed.given.readers
        return readers(path) if readers and has_config and not found.keys() & wanted.keys() else found
    if isinstance(params, Mapping) and all(isinstance(k, str) and "/" in k for k in params):
        return params
    if jax.tree_util.all_leaves([params]):
        raise TypeError(
            f"`params` is {kind_of(params)}; give a tree of arrays, {{path: array}}, or a safetensors path."
        )
    return dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))


def _read_safetensors(path: Path, may_lack: bool) -> dict[str, Any]:
    """Each tensor as a callable of an index, so that a device reads its own shard only; if it `may_lack`, a folder need
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


def must_run(mesh: Mesh, what: str) -> None:
    """Raises ValueError where the devices of a program are not here."""
    if is_compile_only([mesh.devices.flat[0]]):
        kind = mesh.devices.flat[0].device_kind
        raise ValueError(
            f"{what} needs devices that are here; this program is for {mesh.size} x {kind}, to compile only. "
            "Use report() and lower(), or program.replan(plan, jax.devices()) to run on what is here."
        )
