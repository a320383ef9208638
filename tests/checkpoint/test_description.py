import os
from pathlib import Path

import numpy as np
import pytest
from forked import Forks

from cjax.checkpoint import Checkpointer, inspect, restore, save
from cjax.checkpoint.description import check_files, check_same


def test_a_summary_says_what_is_there(tmp_path: Path, state: dict):
    save(tmp_path / "c", state, {"step": 7, "plan": "tensor=2 zero=1", "data": {"samples": 64}})
    summary = inspect(tmp_path / "c")
    assert (summary.step, summary.plan, summary.meta["data"]) == (7, "tensor=2 zero=1", {"samples": 64})
    assert summary.arrays["params/kernel"].shape == (8, 12)
    assert summary.arrays["params/bias"].dtype == "bfloat16"
    assert summary.arrays["key"].dtype == "key<fry>"
    assert summary.arrays["carried/a.b/1"].num_bytes == 0
    assert (
        sum(array.num_bytes for name, array in summary.arrays.items() if name.startswith("params")) == 8 * 12 * 4 + 24
    )
    text = str(summary)
    for part in ("step        7", "tensor=2 zero=1, on 8 devices", "params/kernel", "float32[8, 12]", "384 bytes"):
        assert part in text


def test_the_folder_of_a_run_shows_its_latest(tmp_path: Path):
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        for step in (2, 10):
            checkpoints.save(step, {"w": np.ones(3)}, {})
    assert inspect(tmp_path).step == inspect(tmp_path / "checkpoints").step == 10
    assert inspect(tmp_path / "checkpoints" / "2").step == 2


def test_the_folder_of_a_run_is_restored_from_its_latest(tmp_path: Path):
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        for step in (2, 10):
            checkpoints.save(step, {"w": np.full(3, step)}, {"of": step})
    for folder, step in ((tmp_path, 10), (tmp_path / "checkpoints", 10), (tmp_path / "checkpoints" / "2", 2)):
        tree, meta = restore(folder, {"w": np.zeros(3, int)})
        assert tree["w"][0] == meta["of"] == step


def test_no_devices_are_needed(tmp_path: Path, forks: Forks):
    save(tmp_path / "c", {"w": np.ones(3)}, {"step": 3})
    code = (
        "import sys; from cjax.checkpoint import inspect; from jax._src import xla_bridge;"
        "print(inspect(sys.argv[1]).step, xla_bridge.backends_are_initialized())"
    )
    ran = forks.run(["-c", code, str(tmp_path / "c")], os.environ)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["3", "False"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"crc32": 1, "content": {}}', "\x00\x01"])
def test_a_damaged_description_is_refused(tmp_path: Path, content: str):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "checkpoint.json").write_text(content)
    with pytest.raises(ValueError, match="checkpoint.json is damaged"):
        inspect(tmp_path / "c")


def test_each_byte_of_each_file_counts_and_processes_share_the_reading(tmp_path: Path):
    save(tmp_path / "c", {"w": np.arange(4096.0), "b": np.ones(3)}, {})
    summary = inspect(tmp_path / "c")
    assert len(summary.files) > 2
    for number, name in enumerate(summary.files):
        file = tmp_path / "c" / name
        sound = file.read_bytes()
        file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with pytest.raises(ValueError, match="nothing was restored") as error:
            check_files(summary)
        assert f"{name} was altered: its checksum differs" in str(error.value)
        for part in range(2):  # each file is read by one of them
            if part == number % 2:
                with pytest.raises(ValueError, match="was altered"):
                    check_files(summary, part, 2)
            else:
                check_files(summary, part, 2)
        file.unlink()
        with pytest.raises(ValueError, match="is missing"):
            check_files(summary)
        file.write_bytes(sound)
    check_files(summary)


def test_a_checkpoint_with_more_than_the_model_has_is_of_another_model(tmp_path: Path):
    save(tmp_path / "c", {"params": {"w": np.ones(3), "b": np.ones(2)}, "step": 1}, {})
    summary = inspect(tmp_path / "c")
    wanted = {name: info for name, info in summary.arrays.items() if name != "params/b"}
    with pytest.raises(ValueError, match="only the checkpoint has  params/b float64"):
        check_same(summary, wanted, ())
    check_same(summary, summary.arrays, ())
    check_same(summary, {name: info for name, info in wanted.items() if name != "params/w"}, ("params",))


def test_a_missing_one_names_its_neighbours(tmp_path: Path):
    save(tmp_path / "good", {"w": np.ones(3)}, {})
    (tmp_path / "bad.unfinished").mkdir()
    with pytest.raises(FileNotFoundError, match="there is also: good.*was cut off"):
        inspect(tmp_path / "bad")
