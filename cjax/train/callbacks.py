"""What `fit` calls on its way. Its own lines, bars, logs and checks are such objects too."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import jax

from cjax.checkpoint import Checkpointer, inspect
from cjax.program import Program, State
from cjax.train.writers import flat


class Training(Protocol):
    """The run that a callback is told about.

    Attributes:
        program: what is trained.
        state: after the last step that was started. The next one gives it up: read it, don't keep it.
        step: the number of that step.
        steps: at which the run ends.
        samples: global samples read by then.
        folder: of the run, if it has one.
        evaluate_every: steps between evaluations; None where there are none.
    """

    program: Program
    state: State
    step: int
    steps: int
    folder: Path | None
    evaluate_every: int | None

    @property
    def samples(self) -> int:
        """Global samples read so far."""
        ...

    def note(self, text: str) -> None:
        """Says a line to the user."""
        ...

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds numbers to the logs."""
        ...

    def settle(self) -> None:
        """Returns when all steps that were started are done, and looked at."""
        ...

    def stop(self, why: str) -> None:
        """Ends the run after the step that is under way; `why` is what `FitResult.ended` will say."""
        ...

    def roll_back(self, why: str) -> None:
        """Goes back to the last checkpoint, and on with the data behind what was read."""
        ...

    def save_best(self, name: str, value: float) -> Path | None:
        """Keeps this state apart from the other checkpoints; None where there is no folder."""
        ...


class Callback:
    """Called by `fit`, in every process; override what you need.

    With several processes each must decide alike: `stop` and `roll_back` are asked for by all, or by none. Numbers of
    steps, evaluations and checkpoints are the same everywhere; clocks are not.

    >>> class GoodEnough(Callback):
    ...     def on_step(self, training, step, values):
    ...         if values["loss"] < 0.1:
    ...             training.stop("good enough")
    >>> callbacks = [GoodEnough(), EarlyStop(patience=3)]  # as in fit(..., callbacks=callbacks)
    """

    def on_begin(self, training: Training) -> None:
        """Before the first step."""

    def before_step(self, training: Training, step: int) -> None:
        """This step is about to be started."""

    def on_step(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        """A step is done, and this is what came of it. The next one has been started by then."""

    def on_evaluate(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        """The state was scored: `validation_loss`, and `validation_aux` where the loss has aux."""

    def on_checkpoint(self, training: Training, step: int) -> None:
        """A checkpoint of this step is being written."""

    def on_roll_back(self, training: Training, step: int) -> None:
        """The run went back to this step."""

    def on_end(self, training: Training) -> None:
        """Nothing more will come; also where an error ended the run."""


class EarlyStop(Callback):
    """Ends a run that no longer gets better.

    Args:
        metric: of evaluations, or of steps where it is one of theirs, such as "loss" or "aux/accuracy".
        patience: how many looks at it may pass without a better one.
        mode: whether less is better, or more.
        least: by how much it has to be better.

    Raises:
        ValueError: numbers that make no sense, or a metric that the run does not have.

    >>> callback = EarlyStop("validation_aux/accuracy", patience=3, mode="max")  # as in fit(..., callbacks=[callback])
    """

    def __init__(
        self,
        metric: str = "validation_loss",
        patience: int = 5,
        mode: Literal["min", "max"] = "min",
        least: float = 0.0,
    ):
        if patience < 1 or least < 0 or mode not in ("min", "max"):
            raise ValueError(
                f"EarlyStop got patience={patience}, least={least}, mode={mode!r}; it needs patience >= 1, least >= 0 "
                'and mode "min" or "max"'
            )
        self._metric, self._patience, self._least = metric, patience, least
        self._better = Better(mode)
        self._misses = 0

    def on_begin(self, training: Training) -> None:
        """Called before the first step.

        Raises:
            ValueError: a metric of evaluations, in a run without any.
        """
        if self._metric.startswith("validation_") and training.evaluate_every is None:
            raise ValueError(
                f"EarlyStop looks at {self._metric!r}, and this run has no evaluations: give fit evaluate_every= and "
                'validation=, or look at a metric of steps, EarlyStop("loss")'
            )
        self._better.best, self._misses = None, 0

    def on_step(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        if not self._metric.startswith("validation_"):
            self._look(training, value_of(self._metric, values))

    def on_evaluate(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        if self._metric.startswith("validation_"):
            self._look(training, value_of(self._metric, values))

    def _look(self, training: Training, value: float) -> None:
        if self._better(value, self._least):
            self._misses = 0
            return
        self._misses += 1
        if self._misses == self._patience:
            best = self._better.best
            training.note(f"{self._metric} has not been better than {best} for {self._misses} times: stopping early")
            training.stop("early stop")


class KeepBest(Callback):
    """Keeps the state that scored best, in `best` of the run's folder, whatever later checkpoints replace.

    Args:
        metric: of evaluations.
        mode: whether less is better, or more.
        kept: where it is; a run that goes on has to be better than what is there.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"] = "min", kept: Checkpointer | None = None):
        self._metric, self._better = metric, Better(mode)
        if kept is not None and kept.latest() is not None:
            found = inspect(kept.place()).meta.get("best", {})
            self._better.best = found.get("value") if found.get("metric") == metric else None

    def on_evaluate(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        value = value_of(self._metric, values)
        if self._better(value):
            training.save_best(self._metric, value)


class ProfileSteps(Callback):
    """A trace by `jax.profiler` of some steps, in `profile` of the run's folder: for TensorBoard, XProf and Perfetto.

    Args:
        first: the first step of it; not the run's first, which is compiled.
        last: the last one.

    Raises:
        ValueError: steps that are not 1 <= first <= last; as the run begins, one without a folder.

    >>> callback = ProfileSteps(10, 12)  # as in fit(..., folder=folder, callbacks=[callback])
    """

    def __init__(self, first: int, last: int):
        if not 1 <= first <= last:
            raise ValueError(f"ProfileSteps got the steps {first} to {last}; it needs 1 <= first <= last")
        self._first, self._last = first, last
        self._is_on = False

    def on_begin(self, training: Training) -> None:
        """Called before the first step.

        Raises:
            ValueError: a run without a folder.
        """
        if training.folder is None:
            raise ValueError("ProfileSteps has no place to write to: give fit folder=...")

    def before_step(self, training: Training, step: int) -> None:
        if self._first <= step <= self._last and not self._is_on:
            training.settle()
            jax.profiler.start_trace(str(training.folder / "profile"))  # type: ignore[operator]
            self._is_on = True
        elif self._is_on and step > self._last:
            self._end(training)

    def on_end(self, training: Training) -> None:
        if self._is_on:
            self._end(training)

    def _end(self, training: Training) -> None:
        self._is_on = False
        try:
            training.settle()
        finally:
            jax.profiler.stop_trace()
        training.note(f"a trace of the steps {self._first} to {self._last} is in {training.folder}/profile")


class LossSpike(Callback):
    """Notices a loss far above those before it.

    Far is `deviations` times the usual one: 1.48 times the median distance from the median, of the last `window`
    losses, which outliers do not move, and at least a hundredth of the median.

    Args:
        then: "rollback" to the last checkpoint and go on behind the samples read so far, or "stop".
        deviations: how far.
        window: losses looked at; none is judged before half as many are known.

    Raises:
        ValueError: another word for `then`, deviations of 0 or less, a window below 4.

    >>> callback = LossSpike("stop", deviations=20)  # as in fit(..., callbacks=[callback])
    """

    def __init__(self, then: Literal["rollback", "stop"] = "rollback", deviations: float = 10.0, window: int = 64):
        if then not in ("rollback", "stop") or deviations <= 0 or window < 4:
            raise ValueError(
                f'LossSpike got then={then!r}, deviations={deviations}, window={window}; it needs then "rollback" or '
                '"stop", deviations > 0 and window >= 4'
            )
        self.then, self._deviations = then, deviations
        self._losses: deque[float] = deque(maxlen=window)

    def on_begin(self, training: Training) -> None:
        self._losses.clear()

    def on_step(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        loss = float(values["loss"])
        if not math.isfinite(loss):
            return  # that is `on_nan`'s
        known = len(self._losses) >= (self._losses.maxlen or 0) // 2
        middle = statistics.median(self._losses) if known else 0.0
        usual = 1.48 * statistics.median(abs(each - middle) for each in self._losses) if known else 0.0
        if not known or loss - middle <= self._deviations * max(usual, 0.01 * abs(middle)):
            self._losses.append(loss)
            return
        before = f"the median of the last {len(self._losses)} is {middle:.4g}"
        what = f"the loss of step {step}, {loss:.4g}, is a spike: {before}"
        if self.then == "stop":
            training.note(what)
            training.stop("loss spike")
        else:
            training.roll_back(what)

    def on_roll_back(self, training: Training, step: int) -> None:
        # The losses from there on come again; older ones are still the usual ones.
        self._losses = deque(list(self._losses)[: len(self._losses) // 2 + 1], maxlen=self._losses.maxlen)


class Better:
    """Whether a value is better than all before it; NaN never is."""

    def __init__(self, mode: Literal["min", "max"], best: float | None = None):
        if mode not in ("min", "max"):
            raise ValueError(f'mode is {mode!r}; it is "min" where less is better, or "max"')
        self._sign = 1 if mode == "min" else -1
        self.best = best

    def __call__(self, value: float, least: float = 0.0) -> bool:
        is_better = self.best is None or self._sign * (self.best - value) > least
        if is_better and not math.isnan(value):
            self.best = value
            return True
        return False


def value_of(metric: str, values: Mapping[str, Any]) -> float:
    """One number by its name, or the end of a path to it, such as `aux/accuracy`.

    Raises:
        ValueError: there is none of that name; those that there are.
    """
    found = flat(values)
    if metric not in found:
        raise ValueError(f"there is no metric {metric!r}; there are {', '.join(found)}")
    return found[metric]
