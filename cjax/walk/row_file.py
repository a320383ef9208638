"""A file of rows: which place of each is the newest, and whether what is read is what was written."""

import errno
import zlib
from collections.abc import Callable, Collection, Sequence

import numpy as np

from cjax.walk.direct import BLOCK, BlockFile

NOWHERE = "-"  # of a row that has no current place
# Powers of an odd number whose powers come round last: where a word of a block stands makes a difference too.
_WEIGHTS = np.multiply.accumulate(np.full(BLOCK // 8, 6364136223846793005, np.uint64))


def checksum(data: np.ndarray) -> int:
    """32 bits of whole blocks: another number, but for chance (one of 4 billion), where words of a block are others, or
    a block has moved. Ten times as fast as a CRC of all of it, which a disk would wait for: that is of a word each."""
    words = data.view(np.uint64).reshape(-1, len(_WEIGHTS))
    return zlib.crc32(np.einsum("ij,j->i", words, _WEIGHTS).tobytes())


class RowFile:
    """The rows of one kind of one stack that are on disk. `read` and `write` of one row are never called at once.

    Args:
        file: whose first block says what it is.
        row_bytes: whole blocks.
        places: of each row, 1 or 2.
        current: for each row "0" or "1", its place that is committed, or "-".
        before_write: called before each write, told whether what it writes over is committed.
        sums: checksums of what is committed; none of rows that were written when there were none yet.
    """

    def __init__(
        self, file: BlockFile, row_bytes: int, places: int, current: str, before_write: Callable[[bool], None],
        sums: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        self._file = file
        self._row_bytes = row_bytes
        self._places = places
        self._before_write = before_write
        self.current = list(current)
        self.newest = list(current)  # which `read` reads
        self._sums: dict[tuple[int, str], int | None] = {
            (row, place): known for row, (place, known) in enumerate(zip(current, sums, strict=False))
        }

    def read(self, row: int, into: np.ndarray) -> None:
        assert self.newest[row] != NOWHERE, f"row {row} of {self._file.path} was never put, or forgotten"
        self._file.read(self._place(row, self.newest[row]), into)
        known = self._sums.get((row, self.newest[row]))
        if known is not None and checksum(into) != known:
            raise OSError(
                errno.EIO,
                f"{self._file.path} is damaged: of row {row} the disk gives other bytes than were written (their "
                "checksum says so). What it held is lost: look after the disk, and restore a checkpoint, with another "
                "folder",
            )

    def write(self, row: int, data: np.ndarray) -> None:
        place = "1" if self._places == 2 and self.current[row] == "0" else "0"
        self._before_write(place == self.current[row])
        self.newest[row] = NOWHERE  # until all of it is there
        self._sums[row, place] = checksum(data)
        self._file.write(self._place(row, place), data)
        self.newest[row] = place

    def forget(self, row: int) -> None:
        self.newest[row] = NOWHERE

    def keep(self) -> None:
        """What is there now stays until the next call, or the next commit: what is put goes beside it."""
        self.current = list(self.newest)

    def take_back(self, rows: Collection[int]) -> None:
        """These are again what they were when they were kept or committed last."""
        for row in rows:
            self.newest[row] = self.current[row]

    @property
    def sums(self) -> list[int | None]:
        """The checksums of what is there now."""
        return [self._sums.get((row, place)) for row, place in enumerate(self.newest)]

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _place(self, row: int, place: str) -> int:
        return BLOCK + (row * self._places + int(place)) * self._row_bytes
