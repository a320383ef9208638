"""Texts, or pairs of texts, each with a class: read, split, and made into rows for BERT."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cjax.data.dataset import Dataset, Rows, hold_out
from cjax.data.tables import Column, read_class_files, read_columns
from cjax.data.text.packing import room, row_length
from cjax.data.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Labelled:
    """Texts and their labels.

    Attributes:
        texts: one for each example.
        labels: the name of each example's class.
        seconds: a second text for each, or None.

    Raises:
        ValueError: no example, or other numbers of texts, labels and second texts.

    >>> Labelled(["fine", "awful"], ["good", "bad"]).classes
    ('bad', 'good')
    """

    texts: Sequence[str]
    labels: Sequence[str]
    seconds: Sequence[str] | None = None

    def __post_init__(self) -> None:
        counts = {len(self.texts), len(self.labels), len(self.labels if self.seconds is None else self.seconds)}
        if len(counts) != 1 or not self.texts:
            seconds = "" if self.seconds is None else f" and {len(self.seconds)} second texts"
            raise ValueError(
                f"{len(self.texts)} texts, {len(self.labels)} labels{seconds} were given; each example needs all"
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in order: of numbers if all are, otherwise of the alphabet."""
        names = set(self.labels)
        return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))


def read_labelled(
    path: str | Path, *, columns: Sequence[Column] = ("text", "label"), encoding: str = "utf-8"
) -> Labelled:
    r"""Texts with labels from where they lie.

    Args:
        path: a `.tsv`, `.csv` or `.jsonl` table; or a folder or `.zip` with a text file for each class, an example on
            each line, and the file's name (without `.txt`) that of the class.
        columns: of a table: the text, maybe a second text, and the label, by name or by number.
        encoding: of the files.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: what can't be read, with the numbers of the lines; see `cjax.data.tables`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "films.tsv").write_text("text\tlabel\nfine\tgood\nawful\tbad")
    ...     found = read_labelled(Path(folder) / "films.tsv")
    >>> found.texts, found.labels
    (('fine', 'awful'), ('good', 'bad'))
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".zip":
        files = read_class_files(path, encoding)
        texts = [line for lines in files.values() for line in lines]
        return Labelled(texts, [name for name, lines in files.items() for _ in lines])
    if len(columns) not in (2, 3):
        raise ValueError(f"columns={tuple(columns)}; name two, a text and a label, or three, two texts and a label")
    *texts, labels = zip(*read_columns(path, columns, encoding), strict=True)
    return Labelled(texts[0], labels, texts[1] if len(texts) == 2 else None)


def labelled_data(
    data: str | Path | Labelled,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence: int | None = None,
    held_out: float | str | Path | Labelled = 0.1,
    columns: Sequence[Column] = ("text", "label"),
    encoding: str = "utf-8",
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Dataset:
    """Labelled texts as batches `{"inputs", "present", "labels"}`, for `cjax.models.classes_loss`.

    `inputs` is int32[rows, sequence], `[CLS] text [SEP]` and padding; `present` is bool[rows, sequence], False for
    padding; `labels` is int32[rows]. For pairs, `[CLS] text [SEP] second [SEP]`, and `types` is 1 from the second on.

    Args:
        data: a path, which `read_labelled` reads, or texts in memory.
        tokenizer: with tokens for begin and end.
        batch_size: rows of the global batch.
        sequence: tokens of a row; longer texts lose their end (of a pair, the longer one), as `num_cut` counts. None
            takes the longest, rounded up to a multiple of 8.
        held_out: the share of each class that is kept for validation, chosen by a hash of the text; or other data.
        columns: see `read_labelled`.
        encoding: see `read_labelled`.
        seed: order of the training samples.
        shard: `(index, count)` of this process.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: what can't be read, one class alone, classes in `held_out` that are in no training data, or a
            sequence without room for text.

    >>> from cjax.data import train_tokenizer
    >>> texts = ["a fine film", "a dull film", "fine work", "dull work"]
    >>> examples = Labelled(texts, ["good", "bad", "good", "bad"])
    >>> data = labelled_data(examples, train_tokenizer(texts, 40, kind="wordpiece"), batch_size=2, held_out=0.5)
    >>> data.classes, next(data.batches())["inputs"].shape
    (('bad', 'good'), (2, 8))
    """
    read = data if isinstance(data, Labelled) else read_labelled(data, columns=columns, encoding=encoding)
    if len(read.classes) < 2:
        raise ValueError(f"all examples are of one class, {read.labels[0]!r}; there is nothing to tell apart")
    train, num_cut = _rows(read, read.classes, tokenizer, sequence)
    sequence = train.arrays["inputs"].shape[1]
    if isinstance(held_out, float | int):
        both = zip(read.texts, read.seconds or read.texts, strict=True)
        kept = hold_out(["\n".join(texts) for texts in both], held_out, read.labels)
        train, validation = train.take(~kept), train.take(kept)
    else:
        if not isinstance(held_out, Labelled):
            held_out = read_labelled(held_out, columns=columns, encoding=encoding)
        validation, more_cut = _rows(held_out, read.classes, tokenizer, sequence)
        num_cut += more_cut
    return Dataset(train, validation, batch_size, seed, shard, sequence=sequence, classes=read.classes, num_cut=num_cut)


def _rows(data: Labelled, classes: tuple[str, ...], tokenizer: Tokenizer, sequence: int | None) -> tuple[Rows, int]:
    """All examples as padded rows, and how many were cut."""
    if unknown := sorted(set(data.labels) - set(classes)):
        raise ValueError(f"what is held out has the classes {unknown}, of which there is no example to train on")
    begin, end = tokenizer.need("begin", "end")
    texts = [tokenizer.encode_each(data.texts)]
    if data.seconds is not None:
        texts.append(tokenizer.encode_each(data.seconds))
    num_special = 1 + len(texts)
    lengths = np.array([[len(text) for text in column] for column in texts])
    length = row_length(int(lengths.sum(0).max()) + num_special) if sequence is None else sequence
    space = room(length, num_special)
    inputs = np.full([len(data.texts), length], tokenizer.pad or 0, np.int32)
    types = np.zeros_like(inputs)
    for row, example in enumerate(zip(*texts, strict=True)):
        place = 1
        inputs[row, 0] = begin
        for number, (text, kept) in enumerate(zip(example, _kept(lengths[:, row], space), strict=True)):
            inputs[row, place : place + kept] = text[:kept]
            inputs[row, place + kept] = end
            types[row, place : place + kept + 1] = number
            place += kept + 1
    totals = lengths.sum(0)
    number_of = {name: number for number, name in enumerate(classes)}
    arrays = {
        "inputs": inputs,
        "present": np.arange(length) < (np.minimum(totals, space) + num_special)[:, None],
        "labels": np.array([number_of[label] for label in data.labels], np.int32),
    }
    return Rows(arrays if data.seconds is None else arrays | {"types": types}), int((totals > space).sum())


def _kept(lengths: np.ndarray, space: int) -> list[int]:
    """How much of each text fits: of a pair, the longer one is cut first."""
    if lengths.sum() <= space:
        return lengths.tolist()
    if len(lengths) == 1:
        return [space]
    first, second = lengths.tolist()
    if first <= space // 2:
        return [first, space - first]
    second = min(second, space // 2)
    return [space - second, second]
