"""`checkpoint.json`: what a checkpoint holds and what each of its files should contain. Needs no devices."""

import dataclasses
import importlib.metadata
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE_NAME = "checkpoint.json"
UNFINISHED, REPLACED, REMOVED = ".unfinished", ".replaced", ".removed"  # see `replacing`


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One stored array.

    Attributes:
        shape: the logical one, whatever the plan it was written under.
        dtype: its name; `key<fry>` for random keys.
        num_bytes: its size, before compression.

    >>> print(ArrayInfo((2, 3), "float32", 24))
    float32[2, 3]
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a checkpoint holds.

    Attributes:
        path: its folder.
        step: the step after which it was written.
        plan: text of the plan that it was written under; empty if there was none.
        arrays: what is stored, by path name.
        meta: what was given to `save`, with versions and the number of devices at the time.
        files: size in bytes and CRC-32 of every file below it.

    >>> kept = {"params/w": ArrayInfo((3, 4), "float32", 48), "step": ArrayInfo((), "int32", 4)}
    >>> Summary(Path("runs/mine"), step=10, plan="tensor=4", arrays=kept, meta={}, files={}).num_bytes
    52
    """

    path: Path
    step: int
    plan: str
    arrays: Mapping[str, ArrayInfo]
    meta: Mapping[str, Any]
    files: Mapping[str, tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, before compression."""
        return sum(info.num_bytes for info in self.arrays.values())

    def __str__(self) -> str:
        width = max((len(name) for name in self.arrays), default=0)
        lines = [
            f"checkpoint  {self.path}",
            f"step        {self.step}",
            f"plan        {self.plan or 'none'}, on {self.meta['num_devices']} devices",
            f"written by  cjax {self.meta['cjax']}, jax {self.meta['jax']}",
            f"arrays      {len(self.arrays)}, together {self.num_bytes / 2**20:,.1f} MiB",
        ]
        lines += [f"  {name:{width}}  {info}  {info.num_bytes:,} bytes" for name, info in self.arrays.items()]
        return "\n".join(lines)


def describe(path: Path, step: int, arrays: Mapping[str, ArrayInfo], meta: Mapping[str, Any]) -> Summary:
    """The description of a checkpoint that is about to be written; `files` are added when they are there.

    Raises:
        ValueError: `meta` can't be kept as JSON.
    """
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`meta` is kept as JSON, which this is not ({error}): {meta!r:.200}") from error
    versions = {"cjax": _version("cjax"), "jax": _version("jax"), **meta}
    return Summary(path, step, str(meta.get("plan", "")), arrays, versions, {})


def write_description(folder: Path, summary: Summary) -> None:
    """Writes `checkpoint.json` into `folder`, with the checksums of every file that is below it now."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    content = {
        "step": summary.step,
        "meta": summary.meta,
        "arrays": {name: [list(a.shape), a.dtype, a.num_bytes] for name, a in summary.arrays.items()},
        "files": {name: [(folder / name).stat().st_size, _checksum(folder / name)] for name in names},
    }
    text = json.dumps(content)
    with open(folder / FILE_NAME, "w") as file:
        # The description is checked like the rest: a changed digit in it would move the data position.
        json.dump({"crc32": zlib.crc32(text.encode()), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())


def read_description(path: Path) -> Summary:
    """The description of the checkpoint in the folder `path`.

    Raises:
        FileNotFoundError: there is none, with those that are nearby.
        ValueError: it is damaged.
    """
    file = path / FILE_NAME
    if not file.is_file():
        if path.is_dir() and any(entry.name != FILE_NAME for entry in path.iterdir()):
            what = (
                f"{path} holds no whole checkpoint: {FILE_NAME} is missing, so it is a part of one, or something else"
            )
        else:
            what = f"there is no checkpoint in {path}"
        raise FileNotFoundError(f"{what}{_nearby(path)}")
    content = _content(file)
    if content is None:
        raise ValueError(f"{file} is damaged; this checkpoint can't be trusted{_nearby(path)}")
    arrays = {name: ArrayInfo(tuple(shape), dtype, size) for name, (shape, dtype, size) in content["arrays"].items()}
    files = {name: (size, crc) for name, (size, crc) in content["files"].items()}
    meta = content["meta"]
    return Summary(path, content["step"], str(meta.get("plan", "")), arrays, meta, files)


def _content(file: Path) -> dict[str, Any] | None:
    """What a description says; None if it is damaged."""
    try:
        outer = json.loads(file.read_bytes())
        content = outer["content"]
        return content if zlib.crc32(json.dumps(content).encode()) == outer["crc32"] else None
    except (ValueError, KeyError, TypeError, RecursionError):  # whatever a changed byte can make of JSON
        return None


def is_whole(path: Path) -> bool:
    """Whether a folder holds a checkpoint to the last file. Their bytes are not read; `check_files` does."""
    content = _content(path / FILE_NAME) if (path / FILE_NAME).is_file() else None
    if content is None:
        return False
    files = ((path / name, size) for name, (size, _) in content["files"].items())
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def folder_of(path: Path) -> Path:
    """The folder that holds the checkpoint called `path`: itself, or, where it was being replaced when its process was
    killed, the new one if that is whole, or else the old one."""
    if (path / FILE_NAME).is_file():
        return path
    aside = (path.with_name(path.name + ending) for ending in (UNFINISHED, REPLACED))
    return next((other for other in aside if is_whole(other)), path)


def check_same(summary: Summary, wanted: Mapping[str, ArrayInfo], ignore: Sequence[str]) -> None:
    """Raises ValueError, with every difference, unless the checkpoint holds what is wanted and nothing else."""
    stored = {name: info for name, info in summary.arrays.items() if name.split("/")[0] not in ignore}
    lines = [f"  only the model has       {name} {info}" for name, info in wanted.items() if name not in stored]
    lines += [f"  only the checkpoint has  {name} {info}" for name, info in stored.items() if name not in wanted]
    for name, info in wanted.items():
        if name in stored and (stored[name].shape, stored[name].dtype) != (info.shape, info.dtype):
            lines.append(f"  they differ in           {name}: {info} in the model, {stored[name]} in the checkpoint")
    if lines:
        raise ValueError(
            f"the checkpoint {summary.path} is of another model or optimizer:\n" + "\n".join(lines) + "\n"
            f"build the model and the optimizer as they were; `cjax inspect {summary.path}` lists what it holds"
        )


def check_files(summary: Summary, part: int = 0, num_parts: int = 1) -> None:
    """Raises ValueError, with every file concerned, if the files are not what was written.

    Args:
        summary: the description.
        part: which share of the files to read, of `num_parts`: processes divide them.
        num_parts: see `part`.
    """
    problems = []
    for name in list(summary.files)[part::num_parts]:
        size, crc = summary.files[name]
        file = summary.path / name
        if not file.is_file():
            problems.append(f"  {name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"  {name} has {file.stat().st_size:,} bytes of {size:,}")
        elif _checksum(file) != crc:
            problems.append(f"  {name} was altered: its checksum differs")
    if problems:
        raise ValueError(
            f"the checkpoint {summary.path} is damaged, and nothing was restored:\n"
            + "\n".join(problems)
            + _nearby(summary.path)
        )


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that have a whole checkpoint in `folder`, in order."""
    found = {file.parent.name for file in folder.glob(f"*/{FILE_NAME}")}
    # The old one went aside, so the new one was whole. One that is whole without that never had its name.
    aside = {name.removesuffix(REPLACED) for name in (file.name for file in folder.glob(f"*{REPLACED}"))}
    found |= {name for name in aside if folder_of(folder / name).exists()}
    return sorted(int(name) for name in found if name.isdecimal())


def as_folder(path: str | Path) -> Path:
    """Where a path leads, `~` too.

    Raises:
        ValueError: it is the address of a bucket, say.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ValueError(
            f"{str(path)!r} is an address, and runs and checkpoints are folders of a file system: mount the bucket, "
            "and give the path where it is mounted"
        )
    return Path(path).expanduser().absolute()


def inspect(path: str | Path) -> Summary:
    """What a checkpoint holds; of the folder of a run, its latest. Needs no devices and no model.

    Args:
        path: the folder of a checkpoint, of several, or of a run.

    Raises:
        FileNotFoundError: no checkpoint there, with those that are nearby.
        ValueError: its description is damaged.

    `cjax.checkpoint.save` has an example.
    """
    return read_description(folder_of(latest(as_folder(path))))


def latest(path: Path) -> Path:
    """Of the folder of a run, or of several checkpoints, that of the last one; `path` otherwise."""
    for folder in (path, path / "checkpoints"):
        if steps := checkpoint_steps(folder):
            return folder / str(steps[-1])
    return path


def _nearby(path: Path) -> str:
    """The end of a message: what else could be restored."""
    found = (file.parent.name for file in path.parent.glob(f"*/{FILE_NAME}"))
    others = {name.removesuffix(REPLACED).removesuffix(UNFINISHED) for name in found if not name.endswith(REMOVED)}
    whole = (name for name in others if (folder_of(path.parent / name) / FILE_NAME).is_file() and name != path.name)
    names = ", ".join(sorted(whole, key=lambda name: (len(name), name)))
    text = f"; in {path.parent} there is also: {names}" if names else f"; there is no other in {path.parent}"
    if path.with_name(path.name + UNFINISHED).exists():
        text += " (the writing of this one was cut off)"
    return text


def _checksum(file: Path) -> int:
    crc = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
