"""What a run leaves of its numbers: each line goes to all writers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cjax.train.callbacks import Callback, Training
from cjax.train.writers import JSONL, TensorBoard, Writer
from cjax.tree import leaf_names


class Record(Callback):
    """Writes what steps and evaluations give.

    Args:
        writers: each gets all lines.
        log_every: steps between lines. Steps that changed nothing are always written.
    """

    def __init__(self, writers: Sequence[Writer], log_every: int):
        self._writers, self._log_every = tuple(writers), log_every

    def on_begin(self, training: Training) -> None:
        for writer in self._writers:
            if begin := getattr(writer, "begin", None):
                begin(training.folder, training.step)

    def on_step(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        if values.get("skipped"):
            self.write(step, dict(zip(leaf_names(dict(values)), jax.tree.leaves(dict(values)), strict=True)))
        elif step % self._log_every == 0:
            self.write(step, values)

    def on_evaluate(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        self.write(step, values)

    def on_roll_back(self, training: Training, step: int) -> None:
        for writer in self._writers:
            if forget := getattr(writer, "forget", None):
                forget(step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def on_end(self, training: Training) -> None:
        for writer in self._writers:
            writer.close()


def writers_of(folder: Path | None, tensorboard: bool, log: Sequence[Writer]) -> list[Writer]:
    """The file of metrics of a run that has a folder, and what was asked for beside it.

    Raises:
        TypeError: something that can't be written to.
    """
    if tensorboard and folder is None:
        raise ValueError("tensorboard=True needs a folder to write to; give fit folder=...")
    for writer in log:
        if isinstance(writer, type) or not isinstance(writer, Writer):
            raise TypeError(
                f"log= has {writer!r}, which is no object with write(step, values) and close(); give "
                'log=[cjax.train.TensorBoard(), cjax.train.Prometheus("run.prom")], say'
            )
    first: list[Writer] = [JSONL(folder / "metrics.jsonl")] if folder else []
    return [*first, *([TensorBoard()] if tensorboard else []), *log]
