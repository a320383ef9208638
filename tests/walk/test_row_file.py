"""What the checksum of a row tells."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cjax.walk.direct import BLOCK
from cjax.walk.row_file import checksum


@given(st.data())
def test_a_checksum_tells_what_disks_do(data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    whole = rng.integers(0, 2**64, 4 * BLOCK // 8, dtype=np.uint64)
    blocks, known = whole.reshape(4, -1), checksum(whole.view(np.uint8))

    def changed(change: Callable[[np.ndarray], None]) -> None:
        other = blocks.copy()
        change(other)
        assert checksum(other.reshape(-1).view(np.uint8)) != known

    at, bit = int(rng.integers(BLOCK // 8)), np.uint64(1) << np.uint64(rng.integers(64))

    def one_bit(x: np.ndarray) -> None:
        x[1, at] ^= bit

    def a_sector_of_zeros(x: np.ndarray) -> None:
        x[2, 64:128] = 0

    def two_blocks_for_each_other(x: np.ndarray) -> None:
        x[[0, 3]] = x[[3, 0]]

    def two_words_for_each_other(x: np.ndarray) -> None:
        x[1, [at, (at + 1) % (BLOCK // 8)]] = x[1, [(at + 1) % (BLOCK // 8), at]]

    def a_block_that_came_late(x: np.ndarray) -> None:
        x[3] = rng.integers(0, 2**64, BLOCK // 8, dtype=np.uint64)

    for change in (
        one_bit,
        a_sector_of_zeros,
        two_blocks_for_each_other,
        two_words_for_each_other,
        a_block_that_came_late,
    ):
        changed(change)
