"""Files that are whole or are not there, wherever a process is killed and whenever the power goes."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a file: it has its old text, or all of the new one. On the disk before it has its name."""
    unnamed = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unnamed, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unnamed, path)
    except OSError:
        unnamed.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Flushes the names in a folder to the disk, where its file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # network file systems keep names by themselves, and refuse
    finally:
        os.close(handle)


class WholeLines:
    """A file that lines are added to: each is there whole, or not at all. What a kill left of a last one is dropped.

    Args:
        path: of the file; one that is no regular file, such as `/dev/stdout`, is written to as it is.
    """

    def __init__(self, path: Path):
        self._path = path
        if path.is_file():
            text = path.read_bytes()
            if not text.endswith(b"\n") and text:
                os.truncate(path, text.rfind(b"\n") + 1)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # nothing of a line waits in memory

    def add(self, line: str) -> None:
        """One more.

        Raises:
            OSError: it could not be written, and nothing of it is there.
        """
        before, rest = os.fstat(self._file.fileno()).st_size, f"{line}\n".encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if self._path.is_file():
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def append_line(path: Path, values: dict[str, Any]) -> None:
    """One more line of JSON, on the disk when this returns. What a power cut left of the last one does not join it."""
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(values).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file, or something else in it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of one a line; what a kill or a power cut left of one is not there."""
    try:
        lines = path.read_text(errors="replace").split("\n")[:-1]
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line if line.startswith("{") else ""))
    return found
