import itertools
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cjax.data import Labelled, Tokenizer, labelled_data, read_labelled, read_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return read_tokenizer(path)


def names(row: np.ndarray) -> str:
    return " ".join(WORDS[token] for token in row)


def test_rows_are_padded_and_cut(tokenizer: Tokenizer):
    data = labelled_data(Labelled(["a b", "c d e f"], ["x", "y"]), tokenizer, batch_size=2, sequence=5, held_out=0)
    rows = [data.train[0], data.train[1]]
    assert [names(row["inputs"]) for row in rows] == ["[CLS] a b [SEP] [PAD]", "[CLS] c d e [SEP]"]
    assert [row["present"].tolist() for row in rows] == [[True] * 4 + [False], [True] * 5]
    assert (data.num_cut, data.sequence, data.classes) == (1, 5, ("x", "y"))
    batch = next(data.batches())
    assert (batch["inputs"].dtype, batch["labels"].dtype, batch["present"].dtype) == (np.int32, np.int32, bool)
    assert sorted(batch) == ["inputs", "labels", "present"]
    whole = labelled_data(Labelled(["a b", "c d e f g h i"], ["x", "y"]), tokenizer, batch_size=2, held_out=0)
    assert whole.sequence == 16 and whole.num_cut == 0


@pytest.mark.parametrize(
    "first, second, wanted",
    [
        ("a b", "c", "[CLS] a b [SEP] c [SEP] [PAD] [PAD]"),
        ("a b c d e", "f g h i", "[CLS] a b c [SEP] f g [SEP]"),
        ("a", "f g h i j", "[CLS] a [SEP] f g h i [SEP]"),
        ("a b c d e", "f", "[CLS] a b c d [SEP] f [SEP]"),
    ],
)
def test_pairs_tell_their_parts_apart(tokenizer: Tokenizer, first: str, second: str, wanted: str):
    examples = Labelled([first, "a"], ["0", "1"], [second, "b"])
    row = labelled_data(examples, tokenizer, batch_size=2, sequence=8, held_out=0).train[0]
    assert names(row["inputs"]) == wanted
    assert row["present"].tolist() == [word != "[PAD]" for word in wanted.split()]
    behind = wanted.split().index("[SEP]") + 1
    assert row["types"].tolist() == [int(i >= behind and word != "[PAD]") for i, word in enumerate(wanted.split())]


def test_tables_and_class_files(tmp_path: Path):
    (tmp_path / "a.tsv").write_text("a b\tc\t10\nd\te\t9\n")
    pairs = read_labelled(tmp_path / "a.tsv", columns=(0, 1, 2))
    assert (pairs.texts, pairs.seconds, pairs.classes) == (("a b", "d"), ("c", "e"), ("9", "10"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/pos.txt", "a\nb\n")
        archive.writestr("x/neg.txt", "c\n")
    found = read_labelled(tmp_path / "a.zip")
    assert sorted(zip(found.texts, found.labels, strict=True)) == [("a", "pos"), ("b", "pos"), ("c", "neg")]
    with pytest.raises(ValueError, match="name two, a text and a label"):
        read_labelled(tmp_path / "a.tsv", columns=("label",))


def test_held_out_is_of_every_class_and_never_trained_on(tokenizer: Tokenizer):
    texts = [" ".join(pair) for pair in itertools.permutations("abcdefghij", 2)]
    examples = Labelled(texts, ["x"] * 60 + ["y"] * 30)
    data = labelled_data(examples, tokenizer, batch_size=3, held_out=0.1, seed=1)
    held_out = [data.held_out[index] for index in range(9)]
    assert sorted(int(row["labels"]) for row in held_out) == [0] * 6 + [1] * 3
    trained = {names(data.train[index]["inputs"]) for index in range(81)}
    assert trained.isdisjoint(names(row["inputs"]) for row in held_out)
    backwards = Labelled(texts[::-1], examples.labels[::-1])
    other = labelled_data(backwards, tokenizer, batch_size=3, held_out=0.1, seed=2)
    assert trained == {names(other.train[index]["inputs"]) for index in range(81)}


def test_held_out_may_be_other_data(tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "dev.tsv").write_text("text\tlabel\na b c d e f g h i j\ty\n")
    examples = Labelled(["a", "b"], ["x", "y"])
    data = labelled_data(examples, tokenizer, batch_size=1, held_out=tmp_path / "dev.tsv")
    assert len(data.train) == 2 and data.num_cut == 1
    assert int(data.held_out[0]["labels"]) == 1 and data.held_out[0]["inputs"].shape == (8,)
    with pytest.raises(ValueError, match=r"held out has the classes \['z'\]"):
        labelled_data(examples, tokenizer, batch_size=1, held_out=Labelled(["a"], ["z"]))


def test_what_cannot_be_learned_is_refused(tokenizer: Tokenizer):
    good = Labelled(["a", "b"], ["x", "y"])
    with pytest.raises(ValueError, match="2 tokens has no room .* at least 3"):
        labelled_data(good, tokenizer, batch_size=1, sequence=2, held_out=0)
    with pytest.raises(ValueError, match="one class, 'x'"):
        labelled_data(Labelled(["a", "b"], ["x", "x"]), tokenizer, batch_size=1)
    with pytest.raises(ValueError, match="class x has 1 different example.*held_out=0"):
        labelled_data(good, tokenizer, batch_size=1)
    with pytest.raises(ValueError, match="1 texts, 2 labels were given"):
        Labelled(["a"], ["x", "y"])
    with pytest.raises(ValueError, match="batch_size is 3, and there are 2"):
        labelled_data(good, tokenizer, batch_size=3, held_out=0)
