"""Weights in Hugging Face's folders: read into our models, or by parts, and written for transformers to read."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cjax.models.sizes import change
from cjax.models.transformers import config as config_json
from cjax.models.transformers import layout
from cjax.models.transformers.folder import open_tensors, read_json, write_folder
from cjax.models.transformers.stored import StoredTensor
from cjax.models.transformers.tables import Row, WeightTable, tables

Model = TypeVar("Model", bound=nnx.Module)
Sharding = jax.sharding.Sharding
Shardings = Sharding | Callable[[str, tuple[int, ...]], Sharding] | None
_MAX_BYTES = 5_000_000_000  # of a file, as transformers has it


class TensorReader:
    """An array of our model in a file: call it with slices, one for each dimension, and only those are read.

    Attributes:
        shape: of the array.
        dtype: in the file.
        stored: the tensor that it is all or a part of.
    """

    def __init__(self, row: Row, shape: tuple[int, ...], stored: StoredTensor) -> None:
        self._row, self.shape, self.stored = row, shape, stored
        self.dtype = stored.dtype

    @property
    def num_inputs(self) -> int | None:
        """How many of its first dimensions a product sums over; None of what is no matrix."""
        groups = layout.parse(self._row.dims).stored
        ours = layout.parse(self._row.dims).ours
        mine = next(group for group in groups if ours[0] in group)
        return sum(name in mine for name in ours) if len(groups) == 2 and len(ours) > 1 else None

    def __call__(self, index: Any) -> np.ndarray:
        return self.of(self.stored, index, True)

    def of(self, stored: Any, index: Any, checks: bool) -> np.ndarray:
        """The same, of what was read of the tensor already.

        Raises:
            ValueError: there is NaN in it, if it `checks`.
        """
        part = layout.read(layout.parse(self._row.dims), self._row.part, self.shape, index, stored)
        if checks and np.isnan(part).any():
            raise ValueError(f"{self._row.theirs} holds NaN: its file is damaged, or its training had failed")
        return part

    def __repr__(self) -> str:
        return f"Reader({self._row.theirs}, shape={list(self.shape)})"


def read_whole(readers: Sequence[TensorReader], checks: bool = True) -> list[np.ndarray]:
    """All of some arrays; a tensor that several are parts of is read once.

    Raises:
        ValueError: a file that was cut short; NaN, if it `checks`.
    """
    tensors: dict[int, np.ndarray] = {}
    found = []
    for reader in readers:
        if id(reader.stored) not in tensors:
            tensors[id(reader.stored)] = reader.stored[(slice(None),) * len(reader.stored.shape)]
        found.append(reader.of(tensors[id(reader.stored)], (slice(None),) * len(reader.shape), checks))
    return found


def load(
    path: str | Path,
    kind: type[Model] = nnx.Module,
    *,
    shardings: Shardings = None,
    seed: int = 0,
    **overrides: Any,
) -> Model:
    """The model that a folder of transformers holds, in float32 and without dropout.

    Args:
        path: the folder, with config.json and safetensors in one file or in several.
        kind: our class that it must be, such as `BERT`; any if not given.
        shardings: where the arrays go: for all, or by path and shape. Each device reads its own shard alone.
        seed: for parameters that the folder doesn't have, because `overrides` ask for another head.
        overrides: fields of the model's config, such as `dropout=0.1`, or `head="classes", num_classes=5`.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: of another architecture, damaged or pickled, or its tensors aren't those of its config: all are
            listed.

    >>> import tempfile
    >>> from cjax.models import GPT, gpt
    >>> model = GPT(gpt("gpt-mini", num_layers=1), rngs=nnx.Rngs(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, model)
    ...     again = load(folder, GPT)
    ...     config, values = config_of(folder), readers(folder)
    >>> again.config == config == model.config
    True
    >>> values["token_embed/embedding"].shape
    (256, 192)
    """
    table, config, found = _open(Path(path))
    if not issubclass(table.kind, kind):
        raise ValueError(
            f"{path} holds a {table.kind.__name__} ({table.model_type}), not a {kind.__name__}; give another folder, "
            f"or load(path, {table.kind.__name__})"
        )
    build = functools.partial(_build, table, change(config, overrides), seed)
    graph, state = nnx.split(nnx.eval_shape(build))
    wanted = {"/".join(map(str, names)): (names, variable) for names, variable in nnx.to_flat_state(state)}
    problems = [
        f"{name}: {list(found[name].shape)} given, {list(variable.shape)} needed"
        for name, (_, variable) in wanted.items()
        if name in found and found[name].shape != tuple(variable.shape)
    ]
    if problems:
        raise ValueError(f"what is in {path} has other sizes than you ask for:\n  " + "\n  ".join(problems))
    missing = [name for name in wanted if name not in found]
    if layers := [name for name in missing if isinstance(wanted[name][1], nnx.Param) and re.search(r"/\d+/", name)]:
        raise ValueError(f"{path} has fewer layers than you ask for: {layers[0]} is in none of its files")
    fresh = _fresh(build, missing)
    flat = []
    for name, (names, variable) in wanted.items():
        value = fresh[name] if name in fresh else _placed(found[name], variable.dtype, name, shardings)
        flat.append((names, variable.replace(value)))
    model: Any = nnx.merge(graph, nnx.from_flat_state(flat))
    return model


def readers(path: str | Path) -> dict[str, TensorReader]:
    """Every parameter of the model in a folder, as something that reads a part of it when called.

    `program.init(params=readers(path))` puts each onto its devices without ever holding it whole. The model must be of
    the sizes that `config_of` gives; it may have parameters that the folder doesn't, which `init` then makes.

    Args:
        path: the folder, with config.json and safetensors in one file or in several.

    Raises:
        FileNotFoundError, ValueError: as `load` does.

    `cjax.models.load` has an example.
    """
    return _open(Path(path))[2]


def opened(path: str | Path) -> tuple[type, Any, dict[str, TensorReader]]:
    """What a folder holds: our class, its sizes, and `readers`.

    Raises:
        FileNotFoundError, ValueError: as `load` does.
    """
    table, config, found = _open(Path(path))
    return table.kind, config, found


def config_of(path: str | Path) -> Any:
    """The sizes of the model in a folder: a `GPTConfig`, `BERTConfig`, `ViTConfig`, `T5Config` or `LlamaConfig`.

    Args:
        path: the folder, with config.json and the weights.

    Raises:
        FileNotFoundError: no config.json there.
        ValueError: of a model that we don't have, or a kind of it; every reason is listed.

    `cjax.models.load` has an example.
    """
    return _open(Path(path))[1]


def save(path: str | Path, model: nnx.Module, *, max_bytes: int = _MAX_BYTES) -> None:
    """Writes a folder that `load` and transformers' `from_pretrained` read.

    Args:
        path: a folder without weights, or one to be made.
        model: a GPT, BERT, ViT, T5 or Llama.
        max_bytes: of a file; beyond, there are several and an index. As much is held in memory at a time.

    Raises:
        FileExistsError: there are weights already.
        ValueError: a model that transformers doesn't have.

    `cjax.models.load` has an example.
    """
    table = next((table for table in tables if table.kind is type(model)), None)
    if table is None:
        kinds = ", ".join(table.kind.__name__ for table in tables)
        raise ValueError(f"save knows how transformers stores {kinds}; this is a {type(model).__name__}")
    config: Any = model.config  # type: ignore[attr-defined]
    architecture = config_json.architecture(table, config)
    params = {name: variable[...] for name, variable in _flat(model).items()}
    stored: dict[str, dict[int, tuple[Row, str]]] = {}
    for name in params:
        row, theirs = _row_of(table, name)
        for copy in (theirs, *row.copies):
            copy = copy.removeprefix(table.prefix) if architecture in table.bare else copy
            stored.setdefault(copy, {})[row.part] = (row, name)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for theirs, parts in stored.items():
            row = next(iter(parts.values()))[0]
            pieces = {part: np.asarray(params[name]) for part, (_, name) in parts.items()}
            yield theirs, layout.write(layout.parse(row.dims), pieces)

    sizes = {theirs: sum(params[name].nbytes for _, name in parts.values()) for theirs, parts in stored.items()}
    write_folder(Path(path), config_json.write(table, config, architecture), sizes, tensors(), max_bytes)


def _build(table: WeightTable, config: Any, seed: int) -> nnx.Module:
    return table.kind(config, rngs=nnx.Rngs(seed))


def _flat(model: nnx.Module) -> dict[str, Any]:
    """The parameters by path."""
    return {"/".join(map(str, names)): leaf for names, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _open(path: Path) -> tuple[WeightTable, Any, dict[str, TensorReader]]:
    """What the folder holds: all of its own model's parameters, or an error that lists all that is wrong."""
    json = read_json(path)
    table, configs = config_json.read(json, path)
    tensors = open_tensors(path)
    wrong: list[str] = []
    for config in configs:
        config_json.check_layers(table, config, json, tensors, path)
        found, problems = _match(table, config, tensors)
        if not problems:
            return table, config, found
        wrong = wrong or problems
    raise ValueError(
        f"the tensors in {path} are not those of the {table.kind.__name__} in its config.json:\n  "
        + "\n  ".join(dict.fromkeys(wrong))
    )


def _match(table: WeightTable, config: Any, tensors: dict[str, Any]) -> tuple[dict[str, TensorReader], list[str]]:
    """Where each parameter is, and what is wrong."""
    has_prefix = any(name.startswith(table.prefix) for name in tensors)
    found, used, problems = {}, set(), []
    for name, variable in _flat(nnx.eval_shape(functools.partial(_build, table, config, 0))).items():
        row, theirs = _row_of(table, name)
        names = [theirs, *row.copies, *([row.or_else] if row.or_else else [])]
        names = [n if has_prefix else n.removeprefix(table.prefix) for n in names]
        used.update(names)
        given = next((n for n in names if n in tensors), None)
        needed = layout.parse(row.dims).stored_shape(variable.shape)
        if given is None:
            problems.append(f"{names[0]}: missing, {list(needed)} needed")
        elif tuple(tensors[given].get_shape()) != needed:
            problems.append(f"{given}: {tensors[given].get_shape()} given, {list(needed)} needed")
        else:
            found[name] = TensorReader(row, tuple(variable.shape), tensors[given])
    ignored = re.compile("|".join(table.ignored) or "(?!)")
    problems += [f"{name}: not of this model" for name in tensors if name not in used and not ignored.fullmatch(name)]
    return found, problems


def _row_of(table: WeightTable, name: str) -> tuple[Row, str]:
    """The row of a parameter of ours, with its name in the file."""
    number = next((part for part in name.split("/") if part.isdigit()), "")
    pattern = re.sub(r"/\d+/", "/{i}/", name)
    row = next((row for row in table.rows if row.ours == pattern), None)
    assert row is not None, f"{table.kind.__name__}'s table has no row for {name}"
    filled = dataclasses.replace(
        row,
        theirs=row.theirs.replace("{i}", number),
        copies=tuple(copy.replace("{i}", number) for copy in row.copies),
    )
    return filled, filled.theirs


def _fresh(build: Callable[[], nnx.Module], names: list[str]) -> dict[str, Any]:
    """What the author's init gives for some of the leaves; XLA leaves out the rest."""
    if not names:
        return {}

    def make() -> dict[str, Any]:
        flat = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(build()))}
        return {name: flat[name][...] for name in names}

    return jax.jit(make)()


def _placed(reader: TensorReader, dtype: Any, name: str, shardings: Shardings) -> jax.Array:
    whole = (slice(None),) * len(reader.shape)
    if shardings is None:
        return jnp.asarray(reader(whole), dtype)
    sharding = shardings if isinstance(shardings, Sharding) else shardings(name, reader.shape)
    return jax.make_array_from_callback(reader.shape, sharding, lambda index: reader(index).astype(dtype))
