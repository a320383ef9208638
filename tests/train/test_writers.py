import contextlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cjax.train import JSONL, MLflow, Prometheus, TensorBoard, WandB, Writer

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
