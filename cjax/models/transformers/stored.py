"""Tensors in safetensors files: their headers, and parts of them read when they are asked for.

Read, not mapped into memory: pages of a mapped file count as the process's own until the system takes them back, and a
model that is larger than the memory would seem to be in it.
"""

import json
import math
import os
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_BLOCK = 1 << 26  # bytes that are read at a time where only a part of each row is wanted


class _OpenFile:
    """A file that is open as long as one of its tensors is known."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)

    def read(self, size: int, start: int) -> bytes:
        return os.pread(self.number, size, start)


class StoredTensor:
    """A tensor in a file; indexed by a slice for each dimension, it reads these parts."""

    def __init__(self, file: _OpenFile, name: str, dtype: Any, shape: tuple[int, ...], start: int) -> None:
        self._file, self._name, self.dtype, self.shape, self._start = file, name, np.dtype(dtype), shape, start

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        if not self.shape:
            return self._rows(0, 1).reshape(())
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        first, *inner = index
        start, stop, _ = first.indices(self.shape[0])
        stop = max(start, stop)
        if all(part.indices(size) == (0, size, 1) for part, size in zip(inner, self.shape[1:], strict=True)):
            return self._rows(start, stop).reshape(stop - start, *self.shape[1:])
        sizes = [len(range(*part.indices(size))) for part, size in zip(inner, self.shape[1:], strict=True)]
        found = np.empty([stop - start, *sizes], self.dtype)
        step = max(1, _BLOCK // max(1, self._row_bytes))
        for at in range(start, stop, step):
            rows = self._rows(at, min(at + step, stop)).reshape(-1, *self.shape[1:])
            found[at - start : at - start + len(rows)] = rows[(slice(None), *inner)]
        return found

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def _rows(self, start: int, stop: int) -> np.ndarray:
        data: Any = np.empty((stop - start) * self._row_bytes, np.uint8)
        done, view = 0, memoryview(data)
        while done < len(data):
            num = os.preadv(self._file.number, [view[done:]], self._start + start * self._row_bytes + done)
            if not num:
                raise ValueError(
                    f"{self._file.path} ends within {self._name}: it was cut short since it was opened; copy or "
                    "download it again, and open the folder anew."
                )
            done += num
        return data.view(self.dtype)


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file that is known to be whole.

    Raises:
        ValueError: a kind of numbers that NumPy has not.
    """
    file = _OpenFile(path)
    length = int.from_bytes(file.read(8, 0), "little")
    header = json.loads(file.read(length, 8))
    header.pop("__metadata__", None)
    if others := sorted({entry["dtype"] for entry in header.values()} - _DTYPES.keys()):
        raise ValueError(f"{path} holds numbers of kind {', '.join(others)}; there are {', '.join(_DTYPES)}")
    return {
        name: StoredTensor(
            file, name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }
