import json
from pathlib import Path

import pytest

from cjax.train.record import Record


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_after_the_resumed_step_and_half_lines_are_dropped(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    record = Record(tmp_path, step=2, tensorboard=False)
    record.write(3, {"loss": 1.5})
    assert steps(tmp_path) == [1, 2, 3], "a line is whole as soon as it is written"
    record.close()


def test_tensorboard_files(tmp_path: Path):
    pytest.importorskip("tensorboardX", reason="the extra `log` is not installed")
    record = Record(tmp_path, step=0, tensorboard=True)
    record.write(1, {"loss": 1.5, "aux": {"x": 2.0}})
    record.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes()


def test_without_a_folder_nothing_is_kept():
    record = Record(None, step=0, tensorboard=False)
    record.write(1, {"loss": 1.5})
    record.close()
