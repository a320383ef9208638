"""What one process holds, in a file that is there whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cjax.checkpoint.part import describe_part, read_part, remove_unfinished, unfinished, write_part

PIECES = [np.arange(12, dtype=np.float32).reshape(3, 4).T, np.array(7, np.int64), np.zeros((0, 3), np.int8)]


def test_the_bytes_come_back(tmp_path: Path) -> None:
    """Of arrays in any order in memory, of numbers, and of nothing."""
    write_part(tmp_path / "part", {"step": 3}, PIECES)
    said = describe_part(tmp_path / "part")
    assert said is not None and said["step"] == 3 and said["bytes"] == [48, 8, 0]
    for found, piece in zip(read_part(tmp_path / "part"), PIECES, strict=True):
        np.testing.assert_array_equal(found.view(piece.dtype).reshape(piece.shape), piece)
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize(
    "text", [b"", b"{}\n", b"3\n", b"notes of mine", b'{"bytes": [4]}\nabc', b'{"bytes": [4]}\nabcde']
)
def test_what_is_no_part_is_none(tmp_path: Path, text: bytes) -> None:
    assert describe_part(tmp_path / "part") is None
    (tmp_path / "part").write_bytes(text)
    assert describe_part(tmp_path / "part") is None


def test_one_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    write_part(tmp_path / "part", {"step": 1}, PIECES)
    with pytest.raises(TypeError):
        write_part(tmp_path / "part", {"step": object()}, PIECES)
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
    said = describe_part(tmp_path / "part")
    assert said is not None and said["step"] == 1


def test_what_a_dead_process_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    mine = unfinished(tmp_path / "part")
    mine.touch()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / mine.name.replace(str(os.getpid()), str(dead.pid))).touch()
    assert len(list(tmp_path.iterdir())) == 2
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
