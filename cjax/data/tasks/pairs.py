"""Pairs of a source and a target text, for models that read one and write the other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cjax.data.dataset import Dataset, Rows, hold_out
from cjax.data.tables import Column, read_columns, read_lines
from cjax.data.text.packing import pad, present, room, row_length
from cjax.data.text.tokenizer import Tokenizer

IGNORED = -100  # the label of positions that don't count, as in cjax.models and in most prepared data
Paths = tuple[str | Path, str | Path]


def read_pairs(
    path: str | Path | Paths, *, columns: Sequence[Column] = ("source", "target"), encoding: str = "utf-8"
) -> list[tuple[str, str]]:
    r"""Pairs of texts from where they lie.

    Args:
        path: a `.tsv`, `.csv` or `.jsonl` table; or two files, whose lines correspond.
        columns: of a table: source and target, by name or by number.
        encoding: of the files.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: what can't be read, with the numbers of the lines, or two files of unequal length.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     english, german = Path(folder) / "train.en", Path(folder) / "train.de"
    ...     _ = english.write_text("one\ntwo"), german.write_text("eins\nzwei")
    ...     pairs = read_pairs((english, german))
    >>> pairs
    [('one', 'eins'), ('two', 'zwei')]
    """
    if not isinstance(path, tuple):
        if len(columns) != 2:
            raise ValueError(f"columns={tuple(columns)}; name two, a source and a target")
        return [(source, target) for source, target in read_columns(path, columns, encoding)]
    sources, targets = (read_lines(one, encoding) for one in path)
    if len(sources) != len(targets):
        longer = path[0] if len(sources) > len(targets) else path[1]
        raise ValueError(
            f"{path[0]} has {len(sources)} lines and {path[1]} has {len(targets)}; line i of one belongs to line i of "
            f"the other, so that line {min(len(sources), len(targets)) + 1} of {longer} and on belong to none"
        )
    return list(zip(sources, targets, strict=True))


def pair_data(
    data: str | Path | Paths | Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    source_length: int | None = None,
    target_length: int | None = None,
    held_out: float = 0.05,
    columns: Sequence[Column] = ("source", "target"),
    encoding: str = "utf-8",
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Dataset:
    """Pairs of texts as batches `{"source", "present", "inputs", "targets"}`, for `cjax.models.t5_loss`.

    `source` is int32[rows, source length] and ends with the tokenizer's end token, then padding, where `present`,
    bool of the same shape, is False. `targets` is int32[rows, target length], ends likewise, and is -100 behind the
    end; `inputs` are the same tokens one later, 0 first.

    Args:
        data: a path or two, which `read_pairs` reads, or pairs in memory.
        tokenizer: with a token for the end.
        batch_size: rows of the global batch.
        source_length, target_length: tokens of a row, the end included; longer texts lose theirs but the end token,
            as `num_cut` counts. None takes the longest, rounded up to a multiple of 8.
        held_out: the share that is kept for validation, chosen by a hash of the source.
        columns, encoding: see `read_pairs`.
        seed: order of the training samples.
        shard: `(index, count)` of this process.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: what can't be read, or a length without room for text.

    >>> from cjax.data import train_tokenizer
    >>> pairs = [(f"{i} + {i}", f"{2 * i}") for i in range(20)]
    >>> data = pair_data(pairs, train_tokenizer(["0123456789 +"], 300), batch_size=4)
    >>> {name: array.shape for name, array in next(data.batches()).items()}
    {'source': (4, 8), 'present': (4, 8), 'inputs': (4, 8), 'targets': (4, 8)}
    """
    if isinstance(data, str | Path) or (isinstance(data, tuple) and isinstance(data[0], str | Path)):
        data = read_pairs(data, columns=columns, encoding=encoding)  # type: ignore[arg-type]
    pairs: list[tuple[str, str]] = list(data)  # type: ignore[arg-type]
    if not pairs:
        raise ValueError("there are no pairs; give at least two, one to train on and one to hold out")
    if empty := [number for number, pair in enumerate(pairs) if not all(text.strip() for text in pair)]:
        raise ValueError(f"{len(empty)} pair(s) have an empty text, the first is number {empty[0]}")
    sources, targets = (tokenizer.encode_each(texts) for texts in zip(*pairs, strict=True))
    source_length = source_length or row_length(max(map(len, sources)) + 1)
    target_length = target_length or row_length(max(map(len, targets)) + 1)
    spaces = room(source_length, 1), room(target_length, 1)
    num_cut = sum(len(a) > spaces[0] or len(b) > spaces[1] for a, b in zip(sources, targets, strict=True))
    (end,) = tokenizer.need("end")
    made = [
        encoder_decoder(
            np.append(a[: spaces[0]], end), np.append(b[: spaces[1]], end), source_length, target_length, tokenizer.pad
        )
        for a, b in zip(sources, targets, strict=True)
    ]
    rows = Rows({name: np.stack([sample[name] for sample in made]) for name in made[0]})
    kept = hold_out([source for source, _ in pairs], held_out)
    sequence = source_length + target_length
    return Dataset(
        rows.take(~kept), rows.take(kept), batch_size, seed, shard, sequence=sequence, num_cut=num_cut
    )  # fmt: skip


def encoder_decoder(
    source: np.ndarray, target: np.ndarray, source_length: int, target_length: int, pad_id: int | None
) -> dict[str, np.ndarray]:
    """What an encoder reads and a decoder is to write, padded: see `pair_data`.

    >>> made = encoder_decoder(np.array([7, 1]), np.array([8, 9, 1]), 3, 4, pad_id=0)
    >>> {name: array.astype(int).tolist() for name, array in made.items()}
    {'source': [7, 1, 0], 'present': [1, 1, 0], 'inputs': [0, 8, 9, 0], 'targets': [8, 9, 1, -100]}
    """
    return {
        "source": pad(source, source_length, pad_id or 0),
        "present": present(source, source_length),
        "inputs": pad(np.append(0, target[:-1]), target_length),
        "targets": pad(target, target_length, IGNORED),
    }
