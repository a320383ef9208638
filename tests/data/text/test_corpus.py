from pathlib import Path

import numpy as np
import pytest

from cjax.data import read_documents, read_token_file, standard_library


@pytest.mark.full
def test_the_standard_library_is_much_real_text_in_a_fixed_order():
    documents = standard_library()
    assert 8_000_000 <= sum(map(len, documents)) < 9_000_000
    assert documents == standard_library()
    assert any(b"class JSONDecoder" in document for document in documents)
    assert documents[:3] == standard_library(sum(map(len, documents[:3])))


def test_a_file_and_a_folder(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_bytes(b"first")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "empty").write_bytes(b"")
    assert read_documents(tmp_path / "b.txt") == [b"second"]
    assert read_documents(tmp_path) == [b"first", b"second"]


def test_token_files_are_mapped(tmp_path: Path):
    np.array([1, 50256, 7], "<u2").tofile(tmp_path / "train.bin")
    tokens = read_token_file(tmp_path / "train.bin")
    assert isinstance(tokens, np.memmap) and tokens.tolist() == [1, 50256, 7]


@pytest.mark.parametrize("content, message", [(b"", "0 bytes"), (b"abc", "3 bytes")])
def test_cut_token_files_are_refused(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_token_file(tmp_path / "train.bin")


def test_missing_and_empty_text_is_refused(tmp_path: Path):
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="empty.txt is empty"):
        read_documents(tmp_path / "empty.txt")
    with pytest.raises(FileNotFoundError, match="no file or folder .*gone"):
        read_documents(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="no token file .*gone.bin"):
        read_token_file(tmp_path / "gone.bin")
