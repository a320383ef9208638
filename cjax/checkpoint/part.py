"""What one process holds of a tree, in one file: bytes as they are in memory, behind a line that says what they are.

Quick to write and to read back by the same process under the same plan, and of no use to any other: a checkpoint is
for those.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cjax.checkpoint.replacing import sync
from cjax.job import check_current

_UNFINISHED = ".unfinished"


def write_part(path: Path, said: Mapping[str, Any], pieces: Sequence[np.ndarray]) -> None:
    """Writes a file: it is there whole, or not at all.

    Args:
        path: where.
        said: of it, in JSON's types.
        pieces: arrays of numbers.

    Raises:
        OSError: it could not be written.
        SupersededError: this process is of a job that has gone on without it.
    """
    part = unfinished(path)
    try:
        with open(part, "wb") as file:
            file.write(json.dumps({**said, "bytes": [piece.nbytes for piece in pieces]}).encode() + b"\n")
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        check_current()
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """What a file of this process is called until all of it is there."""
    return path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")


def describe_part(path: Path) -> dict[str, Any] | None:
    """What `write_part` was told of a file; None where it is no such file, or not all of one."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
            found = json.loads(line)
            whole = len(line) + sum(found["bytes"]) == os.fstat(file.fileno()).st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole else None


def read_part(path: Path) -> list[np.ndarray]:
    """The bytes of each piece."""
    with open(path, "rb") as file:
        sizes = json.loads(file.readline())["bytes"]
        return [np.frombuffer(file.read(size), np.uint8) for size in sizes]


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes left."""
    for file in folder.glob(f".*{_UNFINISHED}"):
        if not Path(f"/proc/{file.name.split('.')[-2]}").exists():
            file.unlink(missing_ok=True)
