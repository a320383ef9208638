import contextlib
import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cjax.train import JSONL, MLflow, Prometheus, TensorBoard, WandB, Writer
from cjax.train.writers import flat

VALUES = {"loss": 1.5, "aux": {"x": 2}, "how": "well"}


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_after_the_resumed_step_and_half_lines_are_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    with contextlib.closing(JSONL(path)) as writer:
        writer.begin(tmp_path, 2)
        writer.write(3, {"loss": math.nan})
        assert steps(path) == [1, 2, 3], "a line is whole as soon as it is written"
        assert path.read_text().splitlines()[-1] == '{"step": 3, "loss": "nan"}'
        writer.forget(1)
        writer.write(2, {})
        assert steps(path) == [1, 2]


def test_tensorboard_files(tmp_path: Path):
    pytest.importorskip("tensorboardX", reason="the extra `log` is not installed")
    writer = TensorBoard()
    writer.begin(tmp_path, 0)
    writer.write(1, VALUES)
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes() and b"aux/x" in file.read_bytes()
    with pytest.raises(ValueError, match="TensorBoard has no place.*folder="):
        TensorBoard().begin(None, 0)


def test_a_writer_of_a_second_run_writes_into_the_second_folder(tmp_path: Path):
    pytest.importorskip("tensorboardX", reason="the extra `log` is not installed")
    writer, numbers = TensorBoard(), Prometheus(tmp_path / "run.prom")
    for name, loss in (("first", 1.5), ("second", 2.5)):
        writer.begin(tmp_path / name, 0)
        writer.write(1, {name: loss})
        writer.forget(0)
        writer.write(1, {name: loss})
        writer.close()
        numbers.begin(tmp_path / name, 0)
        numbers.write(1, {name: loss})
    for name, other in (("first", "second"), ("second", "first")):
        text = b"".join(file.read_bytes() for file in (tmp_path / name / "tensorboard").iterdir())
        assert name.encode() in text and other.encode() not in text
    assert "second" in (tmp_path / "run.prom").read_text() and "first" not in (tmp_path / "run.prom").read_text()


def test_numbers_of_prometheus_whose_names_look_alike_are_told_apart(tmp_path: Path):
    path = tmp_path / "run.prom"
    writer = Prometheus(path)
    for _ in range(2):
        writer.write(1, {"a/b": 1, "a_b": 2, "a.b": 3})
    lines = path.read_text().splitlines()
    helped = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# HELP")}
    numbers = {helped[line.split()[0]]: float(line.split()[1]) for line in lines if line[0] != "#"}
    assert numbers == {"step": 1, "a/b": 1, "a_b": 2, "a.b": 3}
    assert set(helped) == {"cjax_step", "cjax_a_b", "cjax_a_b_2", "cjax_a_b_3"}


def test_prometheus_sees_whole_files_of_the_latest_numbers(tmp_path: Path, monkeypatch):
    path = tmp_path / "textfile" / "run.prom"
    writer = Prometheus(path, {"run": 'the "first"'})
    writer.write(4, {"tokens/s": 1000.5, "validation_loss": 3})
    before = path.stat().st_ino
    writer.write(5, {"tokens/s": math.inf, "aux": {"x": math.nan}})
    assert path.stat().st_ino != before and list(path.parent.iterdir()) == [path]
    parser = pytest.importorskip("prometheus_client.parser")
    text = path.read_text()
    found = {f.name: f.samples[0] for f in parser.text_string_to_metric_families(text)}
    assert set(found) == {"cjax_step", "cjax_tokens_s", "cjax_validation_loss", "cjax_aux_x"}
    assert found["cjax_step"].value == 5 and found["cjax_validation_loss"].value == 3
    assert found["cjax_tokens_s"].value == math.inf and math.isnan(found["cjax_aux_x"].value)
    assert found["cjax_step"].labels == {"run": 'the "first"'}
    with pytest.raises(ValueError, match="end in .prom"):
        Prometheus(tmp_path / "run.txt")


def test_wandb_is_offline_and_is_told_the_step_as_a_number(tmp_path: Path, monkeypatch):
    """W&B's seam, so that no suite waits for its service; the package itself is tried by hand."""
    told: list[Any] = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: told.append((name, step_metric)),
        log=told.append,
        finish=lambda: told.append("finish"),
    )
    fake = types.SimpleNamespace(init=lambda **options: told.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = WandB("mine", name="first")
    writer.begin(tmp_path, 0)
    writer.write(3, VALUES)
    writer.close()
    assert told[0] == {"dir": str(tmp_path), "project": "mine", "mode": "offline", "name": "first"}
    assert told[1:] == [("*", "step"), {"step": 3, "loss": 1.5, "aux/x": 2.0}, "finish"]


def test_mlflow_writes_into_the_runs_folder(tmp_path: Path, monkeypatch):
    told: list[Any] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            told.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> None: ...

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, number: str, run_name: str | None) -> Any:
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run of {number}"))

        def log_metric(self, *what: Any, step: int) -> None:
            told.append((*what, step))

        def set_terminated(self, run: str) -> None:
            told.append(run)

    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", types.SimpleNamespace(MlflowClient=Client))
    writer = MLflow("mine")
    writer.begin(tmp_path, 0)
    writer.write(3, {**VALUES, "a:b": 1})
    writer.close()
    assert told == [
        (tmp_path / "mlflow").as_uri(),
        ("run of 7", "loss", 1.5, 3),
        ("run of 7", "aux/x", 2.0, 3),
        ("run of 7", "a_b", 1.0, 3),
        "run of 7",
    ]


@pytest.mark.parametrize(
    "make, name, extra",
    [(TensorBoard, "tensorboardX", "log"), (WandB, "wandb", "wandb"), (MLflow, "mlflow.tracking", "mlflow")],
)
def test_what_is_not_installed_is_said_with_how_to_install_it(make: Any, name: str, extra: str, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'pip install "cjax\[{extra}\]"'):
        make("mine")


def test_all_are_writers(tmp_path: Path):
    assert isinstance(JSONL(tmp_path / "x"), Writer) and isinstance(Prometheus(tmp_path / "x.prom"), Writer)


def test_a_fresh_run_takes_no_file_of_anothers(tmp_path: Path):
    path, folder = tmp_path / "log.jsonl", tmp_path / "run"
    path.write_text('{"step": 1, "loss": 3.5}\n{"step": 2}\n')
    for place in (None, folder):
        with pytest.raises(FileExistsError, match=rf"{path} has the lines of another run.*another path.*rm {path}"):
            JSONL(path).begin(place, 0)
    assert steps(path) == [1, 2]
    JSONL(path).begin(folder, 1)
    assert steps(path) == [1], "one that goes on drops what is behind it"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.25}\n')
    with pytest.raises(FileExistsError):
        JSONL(path).begin(folder, 0)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n{"step": 2')
    for own in (path, folder / "metrics.jsonl"):  # as it begins again after a kill before its first checkpoint
        JSONL(own).begin(folder, 0)
        assert steps(own) == []


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path):
    link, path = tmp_path / "link.jsonl", tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    link.symlink_to(path)
    JSONL(link).begin(None, 1)
    assert link.is_symlink() and steps(path) == [1]
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.closing(JSONL(tmp_path / "pipe")) as writer:
        writer.begin(None, 0)
        writer.write(1, {})
        assert (tmp_path / "pipe").is_fifo() and os.read(reader, 99) == b'{"step": 1}\n'
    os.close(reader)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        JSONL(tmp_path).begin(None, 0)


def test_numbers_of_numpy_and_jax_are_numbers(tmp_path: Path):
    values = {"a": np.float32(1.5), "b": np.array(2), "c": {"d": jnp.float32(np.nan)}, "e": np.int64(3)}
    with contextlib.closing(JSONL(tmp_path / "m.jsonl")) as writer:
        writer.write(1, values)
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert line == {"step": 1, "a": 1.5, "b": 2, "c": {"d": "nan"}, "e": 3}
    assert {name: found for name, found in flat(values).items() if name != "c/d"} == {"a": 1.5, "b": 2.0, "e": 3.0}
