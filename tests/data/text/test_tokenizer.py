from pathlib import Path

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from cjax.data import Tokenizer, read_tokenizer, standard_library, train_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##believ", "##able", "cafe", "the", ",", "!"]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path / "vocab.txt"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(standard_library(200_000), 600, num_sentinels=20)


def test_word_pieces_of_uncased_text(vocab: Path):
    tokenizer = read_tokenizer(vocab)
    (tokens,) = tokenizer.encode_each(["The UNBELIEVABLE caf\u00e9, xyz!"])
    assert [WORDS[token] for token in tokens] == ["the", "un", "##believ", "##able", "cafe", ",", "[UNK]", "!"]
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens, skip_special=True) == "the unbelievable cafe,!"
    assert (tokenizer.pad, tokenizer.unknown, tokenizer.begin, tokenizer.end, tokenizer.mask) == (0, 1, 2, 3, 4)
    assert tokenizer.special == (0, 1, 2, 3, 4) and tokenizer.sentinels == () and tokenizer.size == len(WORDS)
    assert tokenizer.continues().nonzero()[0].tolist() == [6, 7]
    (cased,) = read_tokenizer(vocab, lowercase=False).encode_each(["The"])
    assert cased.tolist() == [1]


def test_word_pieces_are_those_of_the_library(tmp_path: Path):
    text = b"\n".join(standard_library(100_000)).decode()
    trained = train_tokenizer([text], 500, kind="wordpiece")
    names = [trained._tokenizer.id_to_token(token) for token in range(trained.size)]
    (tmp_path / "vocab.txt").write_text("\n".join(names))
    theirs = BertWordPieceTokenizer(str(tmp_path / "vocab.txt")).encode(text, add_special_tokens=False).ids
    assert len(set(theirs)) > 200
    for tokenizer in (trained, read_tokenizer(tmp_path)):
        np.testing.assert_array_equal(tokenizer.encode_each([text])[0], theirs)


def test_a_tokenizer_json_is_read_as_it_was_written(tmp_path: Path, bpe: Tokenizer):
    again = read_tokenizer(bpe.save(tmp_path).parent)
    text = "def caf\u00e9(x):\n\treturn  x"
    np.testing.assert_array_equal(again.encode_each([text])[0], bpe.encode_each([text])[0])
    assert again.decode(again.encode_each([text])[0]) == text
    assert (again.sentinels, again.special, again.size) == (bpe.sentinels, bpe.special, bpe.size)


def test_what_a_json_says_of_truncation_and_padding_is_not_done(tmp_path: Path, bpe: Tokenizer):
    inner = read_tokenizer(bpe.save(tmp_path))._tokenizer
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    inner.save(str(tmp_path / "tokenizer.json"))
    lengths = [len(tokens) for tokens in read_tokenizer(tmp_path).encode_each(["import os, sys, re, json", "x"])]
    assert lengths[0] > 4 and lengths[1] == 1


def test_own_bpe_has_t5s_special_tokens(bpe: Tokenizer):
    assert bpe.size == 600 and (bpe.pad, bpe.end, bpe.unknown) == (0, 1, 2)
    assert bpe.sentinels == tuple(range(599, 579, -1))
    assert bpe.decode([bpe.sentinels[0], bpe.sentinels[19]]) == "<extra_id_0><extra_id_19>"
    tokens = bpe.encode([b"import os", b"class A"])
    assert tokens.dtype == np.uint16 and bpe.decode(tokens) == "import os</s>class A"
    continues = bpe.continues()
    (tokens,) = bpe.encode_each(["an unfathomable\nthing"])
    words = [bpe.decode([token]) for token in tokens]
    for word, goes_on in zip(words, continues[tokens], strict=True):
        assert goes_on == word[0].isalpha(), word
    assert not continues[list(bpe.special)].any()


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, vocab: Path, bpe: Tokenizer):
    with pytest.raises(FileNotFoundError, match="no file .*nowhere"):
        read_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="should hold tokenizer.json or vocab.txt; it holds: nothing"):
        read_tokenizer(tmp_path / "empty")
    (tmp_path / "broken.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match="broken.json is no tokenizer"):
        read_tokenizer(tmp_path / "broken.json")
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\nthe")
    with pytest.raises(ValueError, match=r"lacks \[SEP\], \[MASK\]"):
        read_tokenizer(vocab)
    vocab.write_text("\n".join([*WORDS, "the"]))
    with pytest.raises(ValueError, match="'the' twice, again in line 13"):
        read_tokenizer(vocab)
    with pytest.raises(ValueError, match="no token for 'mask', such as"):
        bpe.need("end", "mask")
    with pytest.raises(ValueError, match="bpe vocabulary of 260 tokens has no room .* take 269"):
        train_tokenizer(["text"], 260, num_sentinels=10)
    with pytest.raises(ValueError, match="no text"):
        train_tokenizer([" \n"], 600)
