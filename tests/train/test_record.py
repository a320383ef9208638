import errno
import json
import subprocess
import sys
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
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


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


def test_a_writer_on_a_full_disk_is_named_once_and_tried_again(tmp_path: Path):
    class Full(Kept):
        is_full = True
        forgot: tuple[int, ...] = ()

        def write(self, step: int, values: dict[str, Any]) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(step, values)

        def forget(self, step: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.forgot += (step,)

    full, kept, at = Full(), Kept(), At(tmp_path, 0)
    record = Record([JSONL("/dev/full"), full, kept], log_every=1)
    record.on_begin(at)
    for step in (1, 2):
        record.on_step(at, step, {"loss": 1.0})
    record.on_roll_back(at, 1)
    assert [note.split(": ")[0] for note in at.notes] == ["JSONL could not write", "Full could not write"]
    assert "No space left" in at.notes[0] and "/dev/full" in at.notes[0]
    full.is_full = False
    record.on_step(at, 3, {"loss": 1.0})
    record.on_end(at)
    assert full.forgot == (1,), "before it takes another line"
    assert [step for step, _ in full.lines] == [3] and [step for step, _ in kept.lines] == [1, 2, 3]


@pytest.mark.full
def test_a_line_is_there_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text("one\ntw")
    script = (
        "import resource, signal, sys; from pathlib import Path; from cjax.job.files import WholeLines\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "lines = WholeLines(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
        "try: lines.add('much too long')\n"
        "except OSError: lines.add('three')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert path.read_text() == "one\nthree\n"
