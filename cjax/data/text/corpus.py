"""Where text comes from: a file, a folder, a token file, or the standard library of the Python that runs."""

import os
import zlib
from pathlib import Path

import numpy as np


def standard_library(max_bytes: int = 8_000_000) -> list[bytes]:
    """The source text of Python's own standard library: real text that is on every machine.

    Files come in an order that mixes them well and is the same everywhere; tests and installed packages are left out.

    Args:
        max_bytes: stop after about this much; None of the files is cut.

    Raises:
        FileNotFoundError: this Python comes without its sources.

    >>> len(standard_library(max_bytes=1))  # the first file, whole
    1
    """
    root = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not left_out.intersection(name.parts)]
    names.sort(key=lambda name: (zlib.crc32(name.as_posix().encode()), name.as_posix()))
    documents: list[bytes] = []
    total = 0
    for name in names:
        if total >= max_bytes:
            break
        documents.append((root / name).read_bytes())
        total += len(documents[-1])
    if not total:
        raise FileNotFoundError(f"this Python has no sources of its standard library in {root}; give a text file")
    return documents


def read_documents(path: str | Path) -> list[bytes]:
    """The bytes of a file, or of every file in a folder and below it, in the order of their names.

    Args:
        path: a file or a folder; hidden and empty files of a folder are left out.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: there is not a single byte.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "b.txt").write_text("second"), (Path(folder) / "a.txt").write_text("first")
    ...     documents = read_documents(folder)
    >>> documents
    [b'first', b'second']
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        documents = [content for file in files if (content := file.read_bytes())]
    elif path.is_file():
        documents = [path.read_bytes()]
    else:
        raise FileNotFoundError(f"there is no file or folder {path}")
    if not any(documents):
        raise ValueError(f"{path} is empty; training needs text")
    return documents


def read_token_file(path: str | Path) -> np.ndarray:
    """The tokens of a `.bin` file of little-endian uint16, as nanoGPT writes them; mapped, not read.

    Args:
        path: of the file.

    Returns:
        uint16[tokens].

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is empty, or cut in the middle of a token.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.array([15496, 995], "<u2").tofile(f"{folder}/train.bin")
    ...     tokens = read_token_file(f"{folder}/train.bin").tolist()
    >>> tokens
    [15496, 995]
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no token file {path}")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ValueError(f"{path} has {size} bytes; a token file holds two bytes a token, and at least one token")
    return np.memmap(path, "<u2", mode="r")
