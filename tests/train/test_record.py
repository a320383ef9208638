import json
from pathlib import Path
from typing import Any

import pytest

from cjax.train import JSONL
from cjax.train.record import Record, writers_of


class Kept:
    """The least that a writer is."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.is_closed = False

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class At:
    """Of a `Training`, what a record reads."""

    def __init__(self, folder: Path | None, step: int) -> None:
        self.folder, self.step = folder, step


def test_every_writer_gets_every_line_and_skipped_steps_are_always_written(tmp_path: Path):
    kept = Kept()
    record, at = Record([JSONL(tmp_path / "m.jsonl"), kept], log_every=2), At(tmp_path, 0)
    record.on_begin(at)
    for step in range(1, 5):
        record.on_step(at, step, {"loss": step / 2, "skipped": int(step == 3), "aux": {"x": 1}})
    record.on_evaluate(at, 4, {"validation_loss": 0.5})
    record.on_end(at)
    assert [step for step, _ in kept.lines] == [2, 3, 4, 4] and kept.is_closed
    assert kept.lines[1][1] == {"loss": 1.5, "skipped": 1, "aux/x": 1}
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, **values} for step, values in kept.lines]


def test_what_can_not_be_written_to_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="write.step, values"):
        writers_of(tmp_path, False, [print])
    with pytest.raises(TypeError, match="write.step, values"):
        writers_of(tmp_path, False, [Kept])
    with pytest.raises(ValueError, match="tensorboard=True needs a folder"):
        writers_of(None, True, [])
    assert writers_of(None, False, []) == []
