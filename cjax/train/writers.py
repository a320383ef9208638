"""Where the numbers of a run go: objects with `write(step, values)` and `close()`. Those here; any other will do."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from cjax.job.files import WholeLines, write_whole
from cjax.tree import leaf_names


@runtime_checkable
class Writer(Protocol):
    """What `fit(..., log=[...])` takes.

    One that also has `begin(folder, step)` is told, before the first line, the folder of the run (None where there is
    none) and the step it goes on from; one that has `forget(step)` is told when a run goes back to an older step.
    """

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Values are numbers, or trees of them."""
        ...

    def close(self) -> None:
        """Called once, when the run has ended."""
        ...


class JSONL:
    """One JSON object a line; `fit` has one at `metrics.jsonl` of the run's folder.

    Args:
        path: of the file. When a run goes on, lines of later steps, which a killed run left behind, are dropped: they
            are about to be written again. A run that begins at step 0 takes no file that has another's lines.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = JSONL(f"{folder}/mine.jsonl")  # as in fit(..., log=[log])
    ...     log.begin(None, step=0)
    ...     log.write(1, {"loss": np.float32(0.5)})
    ...     log.close()
    ...     print(Path(f"{folder}/mine.jsonl").read_text().strip())
    {"step": 1, "loss": 0.5}
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._file: WholeLines | None = None

    def begin(self, folder: Path | None, step: int) -> None:
        """Called before the first line, with the folder of the run and the step it goes on from.

        Raises:
            IsADirectoryError, FileExistsError: the path is a folder, or a file with the lines of another run.
        """
        if self._path.is_dir():
            raise IsADirectoryError(
                f"{self._path} is a folder, and JSONL writes a file: JSONL({self._path}/NAME.jsonl)"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0:
            self._refuse_anothers(folder)
        self.forget(step)

    def _refuse_anothers(self, folder: Path | None) -> None:
        own = None if folder is None else folder / "metrics.jsonl"
        text = self._path.read_text() if self._path.is_file() else ""
        if not text or (own is not None and own.resolve() == self._path.resolve()):
            return
        # A run that was killed before its first checkpoint begins at step 0 again. Its file has the lines that the one
        # in its folder has.
        if own is not None and own.is_file() and own.read_text().startswith(text.split("\n")[0]):
            return
        raise FileExistsError(
            f"{self._path} has the lines of another run, and this one begins at step 0: give JSONL another path, or "
            f"remove it: rm {self._path}"
        )

    def forget(self, step: int) -> None:
        """Drops the lines of steps after this one: the run went back to it."""
        self.close()
        if self._path.exists() and not self._path.is_file():
            return  # what went down a pipe, or to a terminal, stays there
        path = self._path.resolve()  # a link stays one
        kept = [line for line in _whole_lines(path) if _step_of(path, line) <= step]
        text = "".join(line + "\n" for line in kept)
        if not path.exists() or path.read_text() != text:
            write_whole(path, text)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds one line; whoever reads the file meanwhile sees whole lines."""
        if self._file is None:
            # One line at a time: whoever follows the file, or is left with it after a crash, sees whole lines.
            self._file = WholeLines(self._path)
        self._file.add(json.dumps({"step": step, **jax.tree.map(_in_words, dict(values))}))

    def close(self) -> None:
        """Closes the file; another `write` opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


class TensorBoard:
    """TensorBoard's event files.

    Args:
        folder: where they go; `tensorboard` in the folder of the run if not given.

    Raises:
        ImportError: tensorboardX is not installed; it says what to type.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = TensorBoard(folder)  # as in fit(..., log=[log])
    ...     log.write(1, {"loss": 0.5})
    ...     log.close()
    ...     len(list(Path(folder).glob("events.*")))
    1
    """

    def __init__(self, folder: str | Path | None = None):
        self._given = folder
        try:
            import tensorboardX
        except ImportError as error:
            raise _not_there("tensorboardX", "log") from error
        self._module = tensorboardX
        self._board: Any = None
        self._folder: Path | None = None

    def begin(self, folder: Path | None, step: int) -> None:
        """Called before the first line, with the folder of the run and the step it goes on from."""
        place = self._given or _inside(folder, "tensorboard", "TensorBoard(folder)")
        self._folder = folder
        self._board = self._module.SummaryWriter(str(place), purge_step=step + 1)

    def forget(self, step: int) -> None:
        """Has TensorBoard hide what is there of later steps: the run went back to this one."""
        self.close()
        self.begin(self._folder, step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the numbers of a step, each under its path."""
        if self._board is None:
            self.begin(self._folder, step - 1)
        assert self._board is not None
        for name, value in flat(values).items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left, and closes the files."""
        if self._board is not None:
            self._board.close()
        self._board = None


class WandB:
    """Weights & Biases, without a network unless told otherwise: `wandb sync FOLDER` sends it later.

    `fit(..., log=[WandB("mine", name="first")])` writes to it.

    Args:
        project: its name there.
        mode: "offline" keeps all on disk; "online" sends it.
        options: of `wandb.init`, such as `name`, `config` or `id`.

    Raises:
        ImportError: wandb is not installed; it says what to type.
    """

    def __init__(self, project: str, *, mode: str = "offline", **options: Any):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _not_there("wandb", "wandb") from error
        self._wandb = wandb
        self._options = {"project": project, "mode": mode, **options}
        self._run: Any = None

    def begin(self, folder: Path | None, step: int) -> None:
        """Called before the first line, with the folder of the run and the step it goes on from."""
        self._run = self._wandb.init(**({"dir": str(folder)} if folder else {}), **self._options)
        # A run that goes back to an older step writes it again, which W&B's own count of steps would refuse.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the numbers of a step, each under its path."""
        if self._run is None:
            self.begin(None, step - 1)
        assert self._run is not None
        self._run.log({"step": step, **flat(values)})

    def close(self) -> None:
        """Ends the run there."""
        if self._run is not None:
            self._run.finish()
        self._run = None


class MLflow:
    """MLflow, in files unless told otherwise: `mlflow ui --backend-store-uri FOLDER` shows them.

    `fit(..., log=[MLflow("mine")])` writes to it.

    Args:
        experiment: its name there.
        tracking_uri: a folder or a server; `mlflow` in the folder of the run if not given.
        run_name: of the run.

    Raises:
        ImportError: mlflow is not installed; it says what to type.
    """

    def __init__(self, experiment: str, *, tracking_uri: str | None = None, run_name: str | None = None):
        try:
            import mlflow.tracking as tracking  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _not_there("mlflow", "mlflow") from error
        self._tracking = tracking
        self._experiment, self._uri, self._run_name = experiment, tracking_uri, run_name
        self._client: Any = None
        self._run: str | None = None

    def begin(self, folder: Path | None, step: int) -> None:
        """Called before the first line, with the folder of the run and the step it goes on from."""
        uri = self._uri or _inside(folder, "mlflow", "MLflow(..., tracking_uri=...)").as_uri()
        if uri.startswith("file:"):
            # MLflow 3 asks for this word before it writes files rather than a database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._tracking.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(number, run_name=self._run_name).info.run_id

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the numbers of a step, each under its path."""
        if self._client is None:
            self.begin(None, step - 1)
        assert self._client is not None
        for name, value in flat(values).items():
            # The names it takes: letters, digits, underscores, dashes, dots, spaces and slashes.
            self._client.log_metric(self._run, re.sub(r"[^\w\-. /]", "_", name), value, step=step)

    def close(self) -> None:
        """Ends the run there."""
        if self._client is not None:
            self._client.set_terminated(self._run)
        self._client = self._run = None


class Prometheus:
    """A text file that Prometheus' node exporter picks up (`--collector.textfile.directory`): the latest numbers.

    Args:
        path: of the file, ending in `.prom`. It is replaced whole, so that no half of it is ever read.
        labels: of each number, such as `{"run": "first"}`.

    Raises:
        ValueError: a file that does not end in `.prom`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = Prometheus(f"{folder}/mine.prom", {"run": "first"})  # as in fit(..., log=[log])
    ...     log.write(1, {"loss": 0.5})
    ...     print(Path(f"{folder}/mine.prom").read_text().splitlines()[-1])
    cjax_loss{run="first"} 0.5
    """

    def __init__(self, path: str | Path, labels: Mapping[str, str] | None = None):
        self._path = Path(path)
        if self._path.suffix != ".prom":
            raise ValueError(f"the node exporter reads files that end in .prom, and {path} does not: name it so")
        inside = ",".join(f'{_prometheus_name(name)}="{_escaped(text)}"' for name, text in (labels or {}).items())
        self._labels = f"{{{inside}}}" if inside else ""
        self._latest: dict[str, float] = {}
        self._names: dict[str, str] = {}  # what each is called there

    def begin(self, folder: Path | None, step: int) -> None:
        """Called before the first line, with the folder of the run and the step it goes on from."""
        self._latest, self._names = {}, {}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Replaces the file by one with the latest value of every number so far."""
        self._latest |= {"step": float(step)} | flat(values)
        lines = []
        for name, value in self._latest.items():
            full = self._name(name)
            number = "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf" if math.isinf(value) else value
            lines += [f"# HELP {full} {name} of the latest step written", f"# TYPE {full} gauge"]
            lines.append(f"{full}{self._labels} {number}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")  # what does not end in .prom is not read
        beside.write_text("\n".join(lines) + "\n")
        os.replace(beside, self._path)

    def close(self) -> None:
        """Does nothing: the file is whole after each `write`, and stays."""
        ...

    def _name(self, name: str) -> str:
        """One of its own: a file in which two numbers have the same is not read at all."""
        if name not in self._names:
            plain = full = f"cjax_{_prometheus_name(name)}"
            number = 1
            while full in self._names.values():
                number += 1
                full = f"{plain}_{number}"
            self._names[name] = full
        return self._names[name]


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by path: `{"aux": {"mean": 1}}` is `{"aux/mean": 1.0}`. What is no number is left out.

    >>> flat({"loss": 2, "aux": {"mean": 1.5}, "how": "well"})
    {'loss': 2.0, 'aux/mean': 1.5}
    """
    named = zip(leaf_names(dict(values)), jax.tree.leaves(dict(values)), strict=True)
    plain = {name: _plain(value) for name, value in named}
    found = {name: float(value) for name, value in plain.items() if isinstance(value, (int, float))}
    order = {name: i for i, name in enumerate(values)}  # as given: JAX sorts
    return dict(sorted(found.items(), key=lambda item: order.get(item[0].split("/")[0], len(order))))


def _not_there(module: str, extra: str) -> ImportError:
    return ImportError(f'{module} is not installed: pip install "cjax[{extra}]"')


def _inside(folder: Path | None, name: str, instead: str) -> Path:
    if folder is None:
        raise ValueError(f"{instead.split('(')[0]} has no place to write to: give fit folder=..., or {instead}")
    return folder / name


def _prometheus_name(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _plain(value: Any) -> Any:
    """A number of NumPy's or JAX's as Python has it."""
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0 else value


def _in_words(value: Any) -> Any:
    """JSON has no NaN and no infinity; a line says them in words."""
    value = _plain(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(path: Path, line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} holds a line that is no metrics of a step, {line[:80]!r}: remove it, or move the file away; the "
            "run goes on without it"
        ) from error


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that a crash cut off."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
