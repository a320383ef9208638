"""The metrics of a run on disk: one JSON object a line, and TensorBoard's form where asked for."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from cjax.job.files import write_whole


class Record:
    """Appends to `metrics.jsonl`, and to TensorBoard's event files.

    Args:
        folder: of the run; None keeps nothing.
        step: where this run starts. Lines of later steps, which a killed run left behind, are dropped: they are about
            to be written again.
        tensorboard: also write event files, below `folder`/tensorboard.

    Raises:
        ImportError: TensorBoard's form was asked for, and its writer is not installed.
    """

    def __init__(self, folder: Path | None, step: int, tensorboard: bool):
        self._board: Any = None
        self._file: Any = None
        if folder is None:
            if tensorboard:
                raise ValueError("tensorboard=True needs a folder to write to; give fit folder=...")
            return
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise ImportError('tensorboard=True needs its writer: pip install "cjax[log]"') from error
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        path = folder / "metrics.jsonl"
        kept = [line for line in _whole_lines(path) if _step_of(path, line) <= step]
        write_whole(path, "".join(line + "\n" for line in kept))
        # One line at a time: whoever follows the file, or is left with it after a crash, sees whole lines.
        self._file = open(path, "a", buffering=1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line; `values` are numbers or trees of them."""
        values = jax.tree.map(_in_words, dict(values))
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _in_words(value: Any) -> Any:
    """JSON has no NaN and no infinity; a line says them in words."""
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
