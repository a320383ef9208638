"""One file that says what was committed: the step, which half of each row's place is current, and small arrays.

It is written beside its name and renamed when it is on the disk: what has the name is whole. A checksum at its end
tells a file that the disk has changed since.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cjax.walk.direct import explained, free, shown

MAGIC = b"cjax commit 1\n"
_LENGTH = 8  # bytes that say how long the text behind them is
_DIGEST = hashlib.sha256


@dataclass(frozen=True)
class Committed:
    """What was committed, but for the small arrays.

    Args:
        step: after which it was.
        number: of the commit: it tells states of one step apart, of which a run may have several.
        identity: the program's, as JSON.
        run: the name, drawn at random, that all files of this state carry, those of all processes.
        halves: for each file of rows, a letter a row: "0" or "1", the half that holds it, "-" if there is none.
        note: what whoever runs the program says of this step, in JSON's types.
        sums: for each file of rows, the checksum of each row; none of rows that were written without.
    """

    step: int
    number: int
    identity: str
    run: str
    halves: Mapping[str, str]
    note: Mapping[str, Any] = field(default_factory=dict)
    sums: Mapping[str, Sequence[int | None]] = field(default_factory=dict)


def write_record(path: Path, record: Committed, small: Mapping[str, np.ndarray]) -> None:
    """Writes a record; returns when it is on the disk.

    Raises:
        OSError: it can't be written.
    """
    arrays = {name: np.asarray(array) for name, array in small.items()}
    infos = [[name, array.dtype.name, array.shape] for name, array in arrays.items()]
    text = json.dumps({**asdict(record), "arrays": infos}).encode()
    digest = _DIGEST()
    size = record_bytes(record, small)
    with explained(f"{path} can't be written: it takes {shown(size)}, {free(path.parent)}"), open(path, "wb") as file:
        for part in (MAGIC, len(text).to_bytes(_LENGTH, "little"), text, *map(_as_bytes, arrays.values())):
            digest.update(part)
            file.write(part)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())


def record_bytes(record: Committed, small: Mapping[str, np.ndarray]) -> int:
    """How many bytes it takes on the disk, or a few more."""
    infos = sum(len(name) + 100 for name in small)
    text = len(json.dumps(asdict(record))) + infos
    return len(MAGIC) + _LENGTH + text + sum(np.asarray(x).nbytes for x in small.values()) + _DIGEST().digest_size


def look(path: Path) -> Committed | None:
    """What a record says, without its arrays; None where there is none that can be read."""
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            known = json.loads(file.read(int.from_bytes(file.read(_LENGTH), "little")))
    except (OSError, ValueError):
        return None
    known.pop("arrays")
    return Committed(**known)


def records_in(parent: Path, process: int) -> list[tuple[Path, Committed]]:
    """The folders in `parent` in which this process has committed something, and what."""
    found = [(path.parent, look(path)) for path in sorted(parent.glob(f"*/commit.{process}"))]
    return [(folder, record) for folder, record in found if record is not None]


def read_record(path: Path) -> tuple[Committed, dict[str, np.ndarray]]:
    """What `write_record` wrote.

    Raises:
        ValueError: the file is damaged.
        OSError: it can't be read.
    """
    with explained(f"{path} can't be read"):
        data = np.fromfile(path, np.uint8)
    body, end = data[: -_DIGEST().digest_size], data[-_DIGEST().digest_size :]
    if not is_record(path) or _DIGEST(body.data).digest() != end.tobytes():
        raise ValueError(
            f"{path} is damaged: it says which rows of the files beside it are current, so what these hold is lost: "
            "restore a checkpoint, with another folder"
        )
    place = len(MAGIC) + _LENGTH
    length = int.from_bytes(body[len(MAGIC) : place].tobytes(), "little")
    known = json.loads(body[place : place + length].tobytes())
    place += length
    small = {}
    for name, dtype, shape in known.pop("arrays"):
        kind = jnp.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        # A copy, which begins where numbers of its kind may begin.
        small[name] = np.frombuffer(body[place : place + size].tobytes(), kind).reshape(shape).copy()
        place += size
    return Committed(**known), small


def is_record(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _as_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
