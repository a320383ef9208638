from pathlib import Path

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from cjax.data import BPE, Bytes, Numbers, read_bpe, standard_library
from cjax.data.text import vocabulary


@pytest.fixture(scope="module")
def text() -> str:
    return b"\n".join(standard_library(300_000)).decode() + "\n\n  caf\u00e9 \u4f60\u597d\n\tend"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text: str) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder), "small")
    return folder


def test_bytes_there_and_back():
    tokens = Bytes().encode(["h\u00e9llo".encode(), b"x"])
    assert tokens.tolist() == [104, 195, 169, 108, 108, 111, 10, 120]
    assert Bytes().decode(tokens) == "h\u00e9llo\nx"
    assert Bytes().decode(tokens[:2]) == "h\ufffd"


def test_bpe_there_and_back(folder: Path, text: str):
    bpe = read_bpe(folder)
    tokens = bpe.encode([text.encode()])
    assert bpe.size == 600 and tokens.dtype == np.uint16 and tokens.max() < 600
    assert len(tokens) < 0.6 * len(text.encode())
    assert bpe.decode(tokens) == text


def test_encoding_in_pieces_changes_no_token(folder: Path, text: str, monkeypatch):
    bpe = read_bpe(folder)
    whole = bpe.encode([text.encode()])
    monkeypatch.setattr(vocabulary, "_piece_size", 300)
    assert len(list(vocabulary._pieces(text))) > 50
    np.testing.assert_array_equal(bpe.encode([text.encode()]), whole)


def test_documents_are_set_apart(folder: Path):
    bpe = read_bpe(folder)
    assert bpe.decode(bpe.encode([b"import os", b"class A"])) == "import os<|endoftext|>class A"


def test_numbers_print_as_numbers():
    assert Numbers(70).decode(np.array([3, 69])) == "3 69"
    with pytest.raises(ValueError, match="needs a vocabulary"):
        Numbers(70).encode([b"x"])


def test_missing_vocabulary_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no vocabulary folder .*nowhere"):
        read_bpe(tmp_path / "nowhere")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="one merges.txt, but has 0 of them; it holds: vocab.json"):
        read_bpe(tmp_path)
    with pytest.raises(FileNotFoundError, match="no vocabulary file .*merges.txt"):
        BPE(tmp_path / "vocab.json", tmp_path / "merges.txt")


@pytest.mark.parametrize(
    ("vocab", "merges"), [("{", "#version: 0.2\n"), ("[" * 9999, "a b\n"), ('{"a": 0}', "a b c\n")]
)
def test_files_that_are_no_vocabulary_are_named(vocab: str, merges: str, tmp_path: Path):
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ValueError, match="vocab.json and .*merges.txt are no byte-pair encoding"):
        read_bpe(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": "x"}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match="vocab.json holds no token"):
        read_bpe(tmp_path)
