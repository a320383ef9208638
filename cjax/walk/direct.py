"""Files read and written past the page cache, where the file system can: memory is then what the buffers are."""

import contextlib
import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK = 4096  # what O_DIRECT wants addresses, places in a file and sizes to be multiples of
# The file system, or what is under it, has no such thing as O_DIRECT.
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)


def whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def buffer(num_bytes: int) -> np.ndarray:
    """Whole blocks of memory that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, whole_blocks(num_bytes)), np.uint8)


class BlockFile:
    """A file that is there, open for reading and writing whole blocks. Threads may share it.

    Args:
        path: the file.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = _open(path)
        # Also where nobody closes it, and not while a thread has it.
        self._close = weakref.finalize(self, os.close, self._handle)

    def read(self, place: int, into: np.ndarray) -> None:
        """Fills a buffer of whole blocks.

        Raises:
            OSError: the disk can't read it, or the file ends before.
        """
        done = 0
        while done < into.size:
            with explained(f"{self.path} can't be read"):
                count = os.preadv(self._handle, [into.data[done:]], place + done)
            if count == 0:
                raise cut_short(self.path, place + into.size)
            done += count // BLOCK * BLOCK or count

    def write(self, place: int, data: np.ndarray) -> None:
        """Writes a buffer of whole blocks.

        Raises:
            OSError: the disk is full, or can't write it.
        """
        done = 0
        while done < data.size:
            with explained(f"{self.path} can't be written: {data.size - done:,} bytes are left to write"):
                count = os.pwritev(self._handle, [data.data[done:]], place + done)
                if count == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count // BLOCK * BLOCK or count  # or the rest would begin within a block

    def sync(self) -> None:
        """Returns when all that was written is on the disk."""
        with explained(f"{self.path} can't be written"):
            os.fdatasync(self._handle)

    def close(self) -> None:
        self._close()


def allocate(path: Path, num_bytes: int, first: bytes) -> None:
    """Makes a file of a size, whose place on the disk is its own from then on, or none.

    Args:
        path: where no file is.
        num_bytes: its size.
        first: what it begins with, so that a file of ours is known by it from its first moment.

    Raises:
        OSError: there is no place for it.
    """
    with explained(f"{path} can't be made: it takes {shown(num_bytes)}, {free(path.parent)}"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.pwrite(handle, first, 0)
            # Without it a full disk would be found out in the middle of a step.
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)


def sync_names(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """An OSError says what it means: the number stays, and with it the kind of error."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, f"{what} ({reason})") from error


def cut_short(path: Path, needed: int) -> OSError:
    return OSError(
        errno.EIO,
        f"{path} was cut short: it has {path.stat().st_size:,} bytes where {needed:,} are needed. What it held is "
        "lost: restore a checkpoint, with another folder",
    )


def free(folder: Path) -> str:
    try:
        return f"{shown(shutil.disk_usage(folder).free)} are free in {folder}"
    except OSError:
        return f"{folder} is not there"


def shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    with explained(f"{path} can't be opened"):
        try:
            handle = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            return os.open(path, flags)
        try:
            os.preadv(handle, [buffer(BLOCK).data], 0)  # some file systems refuse here
        except OSError as error:
            os.close(handle)
            if error.errno not in _NOT_DIRECT:
                raise
            return os.open(path, flags)
        return handle
