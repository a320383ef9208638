"""What a run leaves of its numbers: each line goes to all writers."""

import functools
from collections.abc import Callable, Mapping, Sequence
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
        self._training: Training | None = None
        self._noted: set[int] = set()  # writers, by number, whose failure was said
        self._behind: dict[int, int] = {}  # what a writer has to forget before it takes another line

    def on_begin(self, training: Training) -> None:
        self._training = training
        # The file in the run's folder is the last: where another writer refuses, the folder holds no run yet.
        for writer in reversed(self._writers):
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
        for number, writer in enumerate(self._writers):
            if hasattr(writer, "forget"):
                self._behind[number] = min(step, self._behind.get(number, step))
                self._try(number, lambda: None)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for number, writer in enumerate(self._writers):
            self._try(number, functools.partial(writer.write, step, values))

    def on_end(self, training: Training) -> None:
        for number, writer in enumerate(self._writers):
            self._try(number, writer.close)

    def _try(self, number: int, act: Callable[[], None]) -> None:
        """A full disk costs lines, and not the run; each time it is tried again."""
        writer = self._writers[number]
        try:
            if number in self._behind:
                getattr(writer, "forget")(self._behind[number])  # noqa: B009
                del self._behind[number]
            act()
        except OSError as error:
            if self._training is not None and number not in self._noted:
                self._noted.add(number)
                self._training.note(
                    f"{type(writer).__name__} could not write: {error}. Training goes on without these lines; it is "
                    "tried again at the next, and not said again"
                )


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
