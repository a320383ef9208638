"""Folders of weights as Hugging Face lays them out: config.json, and safetensors in one file or in several."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cjax.models.transformers.stored import StoredTensor, tensors_in

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".msgpack", ".h5")


def read_json(path: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        FileNotFoundError: no such folder or file, with what is there.
        ValueError: it is no JSON.
    """
    if not path.exists():
        raise FileNotFoundError(f"no such folder: {path}; give the folder that save_pretrained wrote")
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    if not file.is_file():
        there = ", ".join(sorted(other.name for other in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"no config.json in {folder}, but {there}; give the folder that save_pretrained wrote")
    return parse_json(file)


def parse_json(file: Path) -> dict[str, Any]:
    """The object that a file of JSON holds.

    Raises:
        ValueError: it is no JSON, or no object.
    """
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # ValueError also of bytes that are no text
        raise ValueError(f"{file} is no JSON ({error}); copy or download it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, and should an object {{...}}; copy it again.")
    return found


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor by its name; what is not indexed is not read.

    Raises:
        FileNotFoundError: no safetensors file, or one of several is missing.
        ValueError: only pickled weights, or a file that is damaged.
    """
    safetensors = _library()
    tensors: dict[str, StoredTensor] = {}
    for file in _files(path):
        try:
            with safetensors.safe_open(str(file), framework="numpy"):  # its header is sound, and the file as long
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} is no whole safetensors file ({error}; {file.stat().st_size:,} bytes are there); "
                "copy or download it again."
            ) from error
        tensors |= tensors_in(file)
    return tensors


def _files(path: Path) -> list[Path]:
    if path.suffix in _PICKLES:
        raise ValueError(_refuse_pickle(path))
    if path.is_file():
        return [path]
    if (path / _INDEX).is_file():
        weight_map = parse_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(
                f"{path / _INDEX} should say of each tensor in which file it is, as "
                '{"weight_map": {"name": "model-00001-of-00002.safetensors", ...}}; copy or download it again.'
            )
        files = sorted({path / name for name in weight_map.values()})
        if missing := [file.name for file in files if not file.is_file()]:
            raise FileNotFoundError(f"{path} lacks {', '.join(missing)}, which {_INDEX} names; copy them too.")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        if pickles := sorted(file for file in path.glob("*") if file.suffix in _PICKLES):
            raise ValueError(_refuse_pickle(pickles[0]))
        raise FileNotFoundError(f"no safetensors file in {path}")
    if len(files) > 1 and (path / "model.safetensors") in files:
        return [path / "model.safetensors"]
    return files


def _refuse_pickle(file: Path) -> str:
    return (
        f"{file} is not a safetensors file, and reading a pickle may run any program inside it. Where you trust it, "
        f"convert it with transformers: AutoModel.from_pretrained({str(file.parent)!r}).save_pretrained('converted'), "
        "with the class named in config.json's `architectures` in the place of AutoModel"
    )


def write_folder(
    path: Path, config: Mapping[str, Any], sizes: Mapping[str, int], tensors: Iterator[tuple[str, np.ndarray]],
    max_bytes: int,
) -> None:  # fmt: skip
    """Writes config.json and the tensors, one file's worth of them in memory at a time.

    Args:
        path: a folder without weights, or one to be made.
        config: what config.json says.
        sizes: bytes of each tensor, in the order of `tensors`.
        tensors: names and arrays.
        max_bytes: of a file; a larger tensor has one for itself.

    Raises:
        FileExistsError: there are weights already.
    """
    save_file = _library("numpy").save_file
    if old := sorted(path.glob("*.safetensors*")):
        raise FileExistsError(f"{path} holds weights already ({old[0].name}); name another folder, or remove them")
    path.mkdir(parents=True, exist_ok=True)
    files = _share(sizes, max_bytes)
    total, weight_map = sum(sizes.values()), {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        held = dict(next(tensors) for _ in names)
        unfinished = path / f"{file}.unfinished"
        save_file(held, unfinished, metadata={"format": "pt"})  # transformers refuses files that don't say so
        unfinished.rename(path / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / _INDEX).write_text(json.dumps(index, indent=2))
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _share(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def _library(part: str | None = None) -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("reading and writing safetensors needs: pip install 'cjax[weights]'") from error
    return getattr(safetensors, part) if part else safetensors
