"""The steps of `fit`, one after the other, and all that happens between them."""

import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cjax.checkpoint import Checkpointer, inspect
from cjax.job import beating
from cjax.job.beat import CALLING, EVALUATING, RESTORING, SAVING
from cjax.program import Program, State
from cjax.program.on_disk import OnDisk
from cjax.train.callbacks import Callback
from cjax.train.copies import CopiesDifferError, CopyChecks
from cjax.train.display import Display
from cjax.train.meter import Meter
from cjax.train.pace import Pace
from cjax.train.record import Record
from cjax.train.resume import Noting
from cjax.train.signals import StopRequest
from cjax.train.snapshots import Snapshots
from cjax.train.stream import Stream
from cjax.tree import PyTree

ENOUGH_STEPS = 10  # whose median says what a step takes
MOST_ROLL_BACKS = 3  # to one checkpoint: what comes again each time is no bad batch
_ENDED = object()  # what no iterator gives
_NOT_THE_BATCHES = "it is not the batches. Lower the learning rate, and begin from an older checkpoint"
_NOT_A_CHANCE = "go on without that device"


class _StoppedError(Exception):
    """In the middle of an evaluation."""


class NotFiniteError(FloatingPointError):
    """The loss or the gradient of a step was not finite, and `fit` was told to stop then.

    Attributes:
        step: the step concerned.
        state: the state, without what that step would have done to it.
        checkpoint: the last good checkpoint, if there is one.
    """

    def __init__(self, message: str, step: int, state: State, checkpoint: Path | None):
        super().__init__(message)
        self.step, self.state, self.checkpoint = step, state, checkpoint


@dataclasses.dataclass
class Loop:
    """The loop and what it carries from step to step: the `Training` of callbacks."""

    program: Program
    stream: Stream
    meter: Meter
    checkpoints: Checkpointer | None
    record: Record
    display: Display
    callbacks: Sequence[Callback]
    skip: bool
    log_every: int
    validation: Callable[[], Iterable[PyTree]] | None
    evaluate_every: int | None
    pace: Pace
    identity: Any
    noting: Noting | None
    saved: int  # the step of which there is a checkpoint, or that needs none
    state: State
    steps: int
    folder: Path | None
    rolls_back: bool  # at a step that is not finite
    goes_back: bool  # at such a step, or where a callback may ask for it
    best: Checkpointer | None
    copies: CopyChecks | None
    snapshots: Snapshots | None
    rate: float | Callable[[int], Any] | None
    stop_request: StopRequest
    evaluated: bool  # whether the evaluation that is due after the last step has been made
    step: int = 0
    trained: int = 0  # samples read by the last step that was made
    loss: float | None = None
    # Dispatched, but not looked at: reading the metrics of a step waits for it, and the devices should have the next
    # one by then.
    unread: tuple[int, int, Mapping[str, Any]] | None = None  # step, samples read by then, metrics
    updates: int = 0  # of the optimizer, those of the whole run, up to the last step that was looked at
    ending: str | None = None  # why a callback wants the run to end
    going_back: str | None = None  # why it is to go back to a checkpoint
    stopped: signal.Signals | None = None
    batches: Iterator[PyTree] = iter(())
    rereads: bool = False  # and read the same batches again, which were not to blame
    went_back: tuple[int, int] = (-1, 0)  # to which step, and how often in a row

    def go(self) -> str:
        """Runs until `steps`; returns why it ended. Steps that were made before an error are kept."""
        try:
            return self._go()
        except (NotFiniteError, CopiesDifferError):
            raise  # they say what there is to go back to
        except Exception as error:
            self._keep_before(error)
            raise

    def _keep_before(self, error: Exception) -> None:
        """A checkpoint of the last step before an error, which comes of data, a callback or a batch: the state is good.
        Not of several processes, of which one alone may be here; and not where going back was due."""
        on_disk = self.noting is not None  # where each step is kept already
        if self.checkpoints is None or on_disk or self.saved == self.step or jax.process_count() > 1:
            return
        self.stream.samples = self.trained  # what was read for a step that was not made is read again
        try:
            self._save()
            self.checkpoints.wait()
        except Exception as other:
            error.add_note(f"cjax: what was trained until step {self.step} could not be kept: {other}")
            return
        if self.saved == self.step:
            place = latest(self.checkpoints)
            error.add_note(f"cjax: what was trained until step {self.step} is in {place}: go on with resume=True")

    def _go(self) -> str:
        self.step = int(self.state.step)
        if self.rate is not None:
            self.updates = self.step - int(OnDisk.scaling(self.state).num_skipped)
        self.batches, self.trained = iter(self.stream), self.stream.samples
        first, ended = self.step, "steps"
        self._call(lambda callback: callback.on_begin(self))
        if self.goes_back and latest(self.checkpoints) is None:
            self._save()
        if not self.evaluated:
            self._evaluate()  # which a signal cut short
        while self.step < self.steps:
            if received := self._received(self.step == first):
                ended = received.name
                break
            batch = next(self.batches, _ENDED)
            if batch is _ENDED:
                self.stream.refuse_nothing(self.steps)
                ended = "data"
                self.display.note(f"the data ended after step {self.step} of {self.steps}")
                break
            self._step(batch)
            if self._is_due(self.evaluate_every):
                self.settle()
                self._evaluate()
            if self.pace.is_due(self.step):
                self._try_to_save()
            if self.snapshots is not None and self.snapshots.is_due(self.step):
                self._snapshot(self.snapshots)
            if self.going_back is not None:
                self._go_back()
                continue
            if self.ending is not None:
                ended = self.ending
                break
        self.settle()
        self._compare_copies()
        if self.going_back is not None:
            self._go_back()  # there is nothing to go on with, and what is kept should be good
        if self.saved != self.step:
            self._save()
        with beating().during(SAVING):
            if self.checkpoints is not None:
                self.checkpoints.wait()
            if self.best is not None:
                self._wait_noting(self.best)
            if self.snapshots is not None and self.checkpoints is not None:
                self.snapshots.close(is_kept=True)
        if len(self.meter.step_seconds) >= ENOUGH_STEPS:
            self.program.learn(self.meter.step_seconds)
        return ended

    def _step(self, batch: PyTree) -> None:
        """Starts one more, and looks at the one before."""
        if self.noting is not None:
            self.noting(self.stream.samples)
        self._call(lambda callback: callback.before_step(self, self.step + 1))
        with jax.profiler.StepTraceAnnotation("step", step_num=self.step + 1):  # for who takes a profile
            self.state, metrics = self.program.step(self.state, batch)
        self.step, self.trained = self.step + 1, self.stream.samples
        self.settle()
        self.unread = (self.step, self.stream.samples, metrics)
        if self.copies is not None and self.copies.is_due(self.step):
            self.copies.begin(self.state, self.step)
        if self.step == self.steps:
            self.settle()
            self._compare_copies()

    def _received(self, always: bool) -> signal.Signals | None:
        """The signal to stop at now."""
        num_processes = jax.process_count()
        if self.stopped is None and (always or self.stop_request.is_asked(self.step, num_processes, self.log_every)):
            taken = self.meter.step_seconds
            self.stopped = self.stop_request.agreed(num_processes, taken[-1] if taken else 0.0)
        return self.stopped

    # -- what callbacks may ask for -----------------------------------------------------------------------------
    @property
    def samples(self) -> int:
        return self.stream.samples

    def note(self, text: str) -> None:
        self.display.note(text)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self.record.write(step, values)

    def stop(self, why: str) -> None:
        self.ending = self.ending or why

    def roll_back(self, why: str) -> None:
        if not self.goes_back:
            raise ValueError(
                f'{why}, and a callback asks to go back: give fit on_nan="rollback" too, so that it keeps what that '
                "takes"
            )
        self.going_back = self.going_back or why

    def save_best(self, name: str, value: float) -> Path | None:
        if self.best is None:
            return None
        try:
            self._write(self.best, {"best": {"metric": name, "value": value}})
        except OSError as error:
            self.note(f"{error}. Training goes on, and this best one is not kept")
            return None
        self.meter.pause()
        return self.best.folder / str(self.step)

    def _call(self, hook: Callable[[Callback], None]) -> None:
        """What a user has done between steps may take as long as it likes: it is no step that hangs."""
        with beating().during(CALLING):
            for callback in self.callbacks:
                hook(callback)

    # -- its parts ----------------------------------------------------------------------------------------------
    def _is_due(self, every: int | None) -> bool:
        return bool(every) and self.step % every == 0 and self.going_back is None

    def settle(self) -> None:
        """Looks at what came of the last step that was not looked at, and waits for it."""
        if self.unread is not None:
            self._settle_step(*self.unread)
        if self.copies is not None and self.going_back is None and (problem := self.copies.look()):
            self.rereads = True
            self.roll_back(problem)

    def _compare_copies(self) -> None:
        """Before anything is kept of a state: no checkpoint has what only one of its devices says."""
        if self.copies is not None and self.going_back is None:
            self.copies.begin(self.state, self.step)
            self.settle()

    def _settle_step(self, step: int, samples: int, metrics: Mapping[str, Any]) -> None:
        self.unread = None
        metrics = jax.tree.map(lambda leaf: np.asarray(leaf).item(), dict(metrics))
        self.loss = metrics["loss"]
        rates = self.meter.tick(samples)
        is_skipped = bool(metrics.get("skipped"))
        facts = metrics if is_skipped else {**metrics, **self._learning_rate(), **rates}
        self.updates += not is_skipped
        self._call(lambda callback: callback.on_step(self, step, facts))
        beating().step(step)
        if is_skipped:
            self._not_finite(step, metrics)
            if self.noting is not None:
                self.noting.skipped += int(metrics["skipped"])

    def _learning_rate(self) -> dict[str, float]:
        if self.rate is None:
            return {}
        return {"learning_rate": float(self.rate(self.updates) if callable(self.rate) else self.rate)}

    def _not_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
        what = f"step {step} was not finite (loss {metrics['loss']}, gradient norm {metrics['grad_norm']})"
        scaling = self.program.loss_scale
        if scaling is not None and metrics["loss_scale"] > scaling.minimum:
            # How float16 finds its range: the next step has another factor, and no say of the user's is needed.
            self.display.note(f"step {step} overflowed float16 with a loss scale of {metrics['loss_scale']:g}: skipped")
            return
        if self.skip:
            self.display.note(f"{what}: skipped")
            return
        if self.rolls_back:
            self.roll_back(what)
            return
        if self.checkpoints is not None:
            self._wait_noting(self.checkpoints)
        checkpoint = latest(self.checkpoints)
        where = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        raise NotFiniteError(
            f'{what}; {where}. It changed no parameter. Lower the learning rate, or go on past it with on_nan="skip"',
            step,
            self.state,
            checkpoint,
        )

    def _go_back(self) -> None:
        """To the last checkpoint, with the data behind what was read: the batches between are not read again."""
        assert self.checkpoints is not None and self.going_back is not None
        why, self.going_back, self.unread = self.going_back, None, None
        rereads, self.rereads = self.rereads, False
        if self.copies is not None:
            self.copies.forget()
        self._wait_noting(self.checkpoints)
        if self.checkpoints.latest() is None:
            raise RuntimeError(f"{why}; there is no checkpoint to go back to, because none could be written")
        place = self.checkpoints.place()
        step = int(place.name)
        left = self.step
        times = self.went_back[1] + 1 if self.went_back[0] == step else 1
        if times > MOST_ROLL_BACKS:
            raise RuntimeError(
                f"{why}; the run went back to step {step} {MOST_ROLL_BACKS} times, and each time something of the kind "
                f"came again: {_NOT_A_CHANCE if rereads else _NOT_THE_BATCHES}"
            )
        self.went_back = (step, times)
        if self.snapshots is not None:
            self.snapshots.forget()
        with beating().during(RESTORING):
            self.state, self.step = self.program.restore(place), step
        if self.rate is not None:
            self.updates = step - int(OnDisk.scaling(self.state).num_skipped)
        self._call(lambda callback: callback.on_roll_back(self, step))
        # The lines of the steps between are gone, and why they are stays: this one is of a step that stays too.
        self.write(step, {"back_from": left, "why": why})
        if rereads:
            self.stream = self.stream.at(inspect(place).meta["data"]["samples"])
            self.batches = iter(self.stream)
            self.trained = self.stream.samples
            self.note(f"{why}: back to step {step}, and on with the same batches")
            return
        self.note(f"{why}: back to step {step}, and on behind the {self.stream.samples} samples read so far")
        self._try_to_save(anew=True)  # or a run that is resumed would read the same batches again

    def _evaluate(self) -> None:
        if self.validation is None or self.going_back is not None:
            return
        self.evaluated = False
        try:
            with beating().during(EVALUATING):
                scores = self.program.evaluate(self.state, self._until_stopped(self.validation()))
                loss = float(scores["loss"])
        except _StoppedError:
            return  # it is made again when the run goes on
        self.evaluated = True
        values: dict[str, Any] = {"validation_loss": loss}
        if "aux" in scores:
            values["validation_aux"] = jax.tree.map(_number, scores["aux"])
        self._call(lambda callback: callback.on_evaluate(self, self.step, values))
        self.meter.pause()

    def _until_stopped(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Batches of an evaluation, which may take longer than who asks to stop waits."""
        for index, batch in enumerate(batches):
            asks = jax.process_count() == 1 or index % self.log_every == 0
            if asks and self._received(True):
                raise _StoppedError
            yield batch

    def _try_to_save(self, anew: bool = False) -> None:
        """A checkpoint, if there is room for it: the run is worth more than any of them but its last."""
        self._save(anew, goes_on=True)

    def _save(self, anew: bool = False, goes_on: bool = False) -> None:
        if self.checkpoints is None:
            return
        self.settle()  # so that no step is in a checkpoint before it is known to be finite
        self._compare_copies()
        if self.going_back is not None:
            return
        begun = time.perf_counter()
        try:
            self._write(self.checkpoints, {})
        except OSError as error:
            if not goes_on:
                raise
            self.saved = -1
            self.pace.put_off(self.step)
            again = ". Until then a run that is resumed reads again what this one went back behind" if anew else ""
            self.note(f"{error}. Training goes on; another attempt is made when the next is due{again}")
            return
        cost = time.perf_counter() - begun
        self.saved = self.step
        self.meter.pause()
        if self.meter.step_seconds and not anew:
            seconds = statistics.median(self.meter.step_seconds)
            if self.pace.saved(self.step, cost, seconds):
                self.note(f"a checkpoint holds the run up for {cost:.2g} s: one every {self.pace.interval} steps")
        self._call(lambda callback: callback.on_checkpoint(self, self.step))

    def _write(self, checkpoints: Checkpointer, more: Mapping[str, Any]) -> None:
        meta = {**self.program.meta(self.state), **self._position(), **more}
        with beating().during(SAVING):
            self._wait_noting(checkpoints)  # for the one before; for this one there may be room again
            tree, rows = self.program.to_rows(self.state)
            checkpoints.save(self.step, tree, meta, rows=rows)

    def _position(self) -> dict[str, Any]:
        return {"data": {"samples": self.stream.samples, "identity": self.identity}, "evaluated": self.evaluated}

    def _snapshot(self, snapshots: Snapshots) -> None:
        """As good as a checkpoint to whoever goes on from it, so it has to hold what one may."""
        self.settle()
        self._compare_copies()
        if self.going_back is not None:
            return
        try:
            with beating().during(SAVING):  # a disk that is slow with the one before is no hang
                snapshots.begin(self.state, self.step, self._position())
        except OSError as error:
            self.note(f"a snapshot could not be written: {error}. Training goes on; the next is tried when it is due")

    def _wait_noting(self, checkpoints: Checkpointer) -> None:
        try:
            checkpoints.wait()
        except OSError as error:
            self.note(str(error))


def latest(checkpoints: Checkpointer | None) -> Path | None:
    """The last checkpoint, if there is one."""
    step = None if checkpoints is None else checkpoints.latest()
    return None if checkpoints is None or step is None else checkpoints.folder / str(step)


def _number(leaf: Any) -> Any:
    """A number of an array of one; others are told as lists."""
    return np.asarray(leaf).tolist()
