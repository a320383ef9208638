"""`fit`: the loop around `program.step`."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from cjax.checkpoint import Checkpointer
from cjax.job import AGAIN, beating, member
from cjax.job.beat import COMPILING, ENDED, EVALUATING, RESTORING, SAVING
from cjax.job.files import write_whole
from cjax.program import Program, State
from cjax.program.on_disk import on_disk
from cjax.train.display import Display, format_facts, make_display
from cjax.train.meter import Meter
from cjax.train.record import Record
from cjax.train.resume import Noting, Resumed, go_on, has_begun
from cjax.train.signals import StopRequest
from cjax.train.stream import Stream
from cjax.tree import PyTree, leaf_names

ENOUGH_STEPS = 10  # whose median says what a step takes


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


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
        state: after the last step.
        step: its number.
        samples: global samples read so far.
        loss: of the last step; None if there was none to do.
        metrics: the file of metrics, if there is a folder.
        checkpoint: the last checkpoint, if there is a folder.
        ended: "steps" when all were done, "data" when an iterator ran out, or the signal that stopped it.
        exit_code: what tells who started the process how it went: 0; 75 ("again") after SIGTERM; 130 after SIGINT.
    """

    state: State
    step: int
    samples: int
    loss: float | None
    metrics: Path | None
    checkpoint: Path | None
    ended: str

    @property
    def exit_code(self) -> int:
        return {"SIGTERM": AGAIN, "SIGINT": 128 + signal.SIGINT}.get(self.ended, 0)


def fit(
    program: Program,
    data: Any,
    *,
    steps: int,
    state: State | None = None,
    samples: int = 0,
    folder: str | Path | None = None,
    resume: bool | Literal["auto"] | None = None,
    seed: int = 0,
    validation: Callable[[], Iterable[PyTree]] | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    keep: int = 3,
    on_nan: Literal["stop", "skip"] = "stop",
    log_every: int = 10,
    tensorboard: bool = False,
    resume_command: str | None = None,
) -> FitResult:
    """Trains until `steps` steps are done.

    In `folder`: `metrics.jsonl`, `plan.txt`, `report.txt`, `checkpoints/`. SIGINT and SIGTERM end the run after the
    step that is under way, or in the middle of an evaluation, with a checkpoint; what to type to go on is printed. A
    second SIGINT ends the process at once. A checkpoint that a full disk has no room for is said, and training goes on.

    Args:
        program: from `cjax.parallelize`.
        data: what has `batches(start)`, as `cjax.data.text_data` gives, or an iterable of batches; this process's rows.
        steps: of the whole run, those before a resume included.
        state: where to start; a fresh one if None.
        samples: global samples already read, with `state`; as `FitResult.samples` says.
        folder: of the run; None keeps nothing on disk, but under `cjax run --workers`, which has a folder.
        resume: True continues the run of `folder`, under this program's plan, whatever the plan was: behind its last
            checkpoint, or behind the last step where this plan keeps each on disk. "auto" does so too, and begins anew
            where nothing was kept yet. Where not given: "auto" under `cjax run --workers`, else False.
        seed: of the fresh state.
        validation: gives the batches to evaluate on; `data.validation` if there is one.
        evaluate_every: steps between evaluations; None never evaluates.
        checkpoint_every: steps between checkpoints; None writes one at the end.
        keep: how many checkpoints stay.
        on_nan: "stop" raises at the first step that is not finite; "skip" goes on without what it would have done.
            Overflows of float16 are not meant, as long as the loss scale can still be lowered.
        log_every: steps between lines of metrics. Every step is watched, logged or not.
        tensorboard: also write TensorBoard's event files.
        resume_command: what to print as the way to go on.

    Raises:
        NotFiniteError: see `on_nan`.
        FileExistsError: `folder` holds a run, and `resume` is False; or the disk holds another run.
        FileNotFoundError: `resume` is True, and nothing was kept of the run.
        OSError: the checkpoint at the end could not be written; it says which one is whole.
    """
    _check_counts(steps=(steps, 0), log_every=(log_every, 1), samples=(samples, 0))
    every = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every, "keep": keep}
    _check_counts(**{name: (number, 1) for name, number in every.items() if number is not None})
    if on_nan not in ("stop", "skip"):
        raise ValueError(f'fit got on_nan={on_nan!r}; it needs on_nan "stop" or "skip"')
    folder, goes_on = _place(folder, resume, state, resume_command)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        beat = beating()
        checkpoints = stack.enter_context(Checkpointer(folder / "checkpoints", keep)) if folder else None
        disk = None if folder is None else on_disk(program)
        command = resume_command or f"fit(..., folder={str(folder)!r}, resume=True)"
        identity, notes, evaluated = getattr(data, "identity", None), [], True
        if checkpoints is not None and goes_on == "auto":
            goes_on = has_begun(checkpoints, disk)
        if goes_on:
            assert checkpoints is not None and folder is not None
            beat.turn(RESTORING)
            resumed = go_on(program, data, checkpoints, disk, folder)
            state, samples, notes, evaluated = resumed.state, resumed.samples, resumed.notes, resumed.evaluated
            if on_nan == "stop" and program.loss_scale is None:
                _refuse_unseen(resumed, checkpoints)
        noting = None if disk is None or folder is None else Noting(disk, folder, command, identity)
        if noting is not None:
            stack.callback(noting.end)
            noting(samples)
        state = program.init(seed) if state is None else state
        if noting is not None:
            noting.begin(state)
        first = int(state.step)
        beat.tell(first=first, steps=steps)
        is_first = jax.process_index() == 0
        if folder and is_first:
            _describe(folder, program)
        record = Record(folder if is_first else None, first, tensorboard)
        display = make_display(steps, first, is_first)
        stack.callback(record.close)
        stack.callback(display.close)
        for note in notes:
            display.note(note)
        run = _Loop(
            program,
            Stream(data, samples, jax.process_count()),
            Meter(program, getattr(data, "sequence", None)),
            checkpoints,
            record,
            display,
            skip=on_nan == "skip",
            log_every=log_every,
            validation=validation or getattr(data, "validation", None),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            identity=identity,
            noting=noting,
            # Of a step that the disk has there may be no checkpoint yet.
            saved=-1 if goes_on and checkpoints is not None and checkpoints.latest() != first else first,
            stop=stop,
            evaluated=evaluated,
        )
        beat.turn(COMPILING)
        state, ended = run.go(state, steps)
        beat.tell(ended=ended)
        beat.turn(ENDED)
        if ended not in ("steps", "data"):
            how = f"go on with: {command}" if folder else "nothing was saved, because no folder was given"
            display.note(f"stopped by {ended} after step {run.step}; {how}")
        metrics = None if folder is None else folder / "metrics.jsonl"
        return FitResult(state, run.step, run.stream.samples, run.loss, metrics, _latest(checkpoints), ended)


def _place(folder: Any, resume: Any, state: State | None, command: str | None) -> tuple[Path | None, bool | str]:
    """Where a run is kept, and whether it goes on: as told, or as the job says that this process is a worker of."""
    mine = member()
    if folder is None and mine is not None:
        folder = mine.folder
    if resume is None:
        resume = "auto" if mine is not None and folder is not None and state is None else False
    if resume not in (True, False, "auto"):
        raise ValueError(f'fit got resume={resume!r}; it needs resume True, False or "auto"')
    folder = None if folder is None else Path(folder).absolute()
    if resume and (folder is None or state is not None):
        raise ValueError(f"resume={resume!r} continues the run of a folder: give folder=..., and no state")
    if folder is not None and not resume and (folder / "metrics.jsonl").exists():
        how = command or 'resume=True, or resume="auto"'
        raise FileExistsError(f"{folder} holds a run already; continue it with {how}, or name another folder")
    return folder, resume


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (number, least) in counts.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise ValueError(f"fit got {name}={number!r}; it needs {name} >= {least}, a whole number")


def _refuse_unseen(resumed: Resumed, checkpoints: Checkpointer) -> None:
    """A run that was to stop at a step that is not finite does not go past it because it was killed there."""
    if resumed.unseen:
        step = int(resumed.state.step)
        raise NotFiniteError(
            f"of the last steps before step {step}, {resumed.unseen} were not finite, where the run was to stop. They "
            'changed no parameter. Lower the learning rate, and go on past them with on_nan="skip" (--on-nan skip)',
            step,
            resumed.state,
            _latest(checkpoints),
        )


def _describe(folder: Path, program: Program) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "plan.txt", f"{program.plan}\n")
    write_whole(folder / "report.txt", f"{program.report()}\n")


@dataclasses.dataclass
class _Loop:
    """The loop and what it carries from step to step."""

    program: Program
    stream: Stream
    meter: Meter
    checkpoints: Checkpointer | None
    record: Record
    display: Display
    skip: bool
    log_every: int
    validation: Callable[[], Iterable[PyTree]] | None
    evaluate_every: int | None
    checkpoint_every: int | None
    identity: Any
    noting: Noting | None
    saved: int  # the step of which there is a checkpoint, or that needs none
    stop: StopRequest
    evaluated: bool  # whether the evaluation that is due after the last step has been made
    step: int = 0
    loss: float | None = None
    # Dispatched, but not looked at: reading the metrics of a step waits for it, and the devices should have the next
    # one by then.
    unread: tuple[int, int, Mapping[str, Any]] | None = None  # step, samples read by then, metrics
    stopped: signal.Signals | None = None

    def go(self, state: State, steps: int) -> tuple[State, str]:
        """Runs until `steps`; returns the last state and why it ended."""
        self.step = int(state.step)
        batches = iter(self.stream)
        first, ended = self.step, "steps"
        if not self.evaluated:
            self._evaluate(state)  # which a signal cut short
        while self.step < steps:
            if received := self._received(self.step == first):
                ended = received.name
                break
            batch = next(batches, None)
            if batch is None:
                ended = "data"
                self.display.note(f"the data ended after step {self.step} of {steps}")
                break
            if self.noting is not None:
                self.noting(self.stream.samples)
            state, metrics = self.program.step(state, batch)
            self.step += 1
            self._read(state)
            self.unread = (self.step, self.stream.samples, metrics)
            if self._is_due(self.evaluate_every):
                self._read(state)
                self._evaluate(state)
            if self._is_due(self.checkpoint_every):
                self._try_to_save(state)
        self._read(state)
        if self.saved != self.step:
            self._save(state)
        if self.checkpoints is not None:
            self.checkpoints.wait()
        if len(self.meter.step_seconds) >= ENOUGH_STEPS:
            self.program.learn(self.meter.step_seconds)
        return state, ended

    def _received(self, always: bool) -> signal.Signals | None:
        """The signal to stop at now."""
        num_processes = jax.process_count()
        if self.stopped is None and (always or self.stop.is_asked(self.step, num_processes, self.log_every)):
            taken = self.meter.step_seconds
            self.stopped = self.stop.agreed(num_processes, taken[-1] if taken else 0.0)
        return self.stopped

    def _is_due(self, every: int | None) -> bool:
        return bool(every) and self.step % every == 0

    def _read(self, state: State) -> None:
        """Looks at the metrics of the last step but this one, and waits for them."""
        if self.unread is None:
            return
        step, samples, metrics = self.unread
        self.unread = None
        metrics = jax.tree.map(lambda leaf: np.asarray(leaf).item(), dict(metrics))
        self.loss = metrics["loss"]
        facts = {**metrics, **self.meter.tick(samples)}
        if metrics.get("skipped"):
            self._not_finite(step, metrics, state)
            if self.noting is not None:
                self.noting.skipped += int(metrics["skipped"])
        elif step % self.log_every == 0:
            self.record.write(step, facts)
        shown = {name: facts[name] for name in ("loss", *self.meter.names) if name in facts}
        self.display.update(step, format_facts(shown))
        beating().step(step)

    def _not_finite(self, step: int, metrics: Mapping[str, Any], state: State) -> None:
        self.record.write(step, _scalars(metrics))
        what = f"step {step} was not finite (loss {metrics['loss']}, gradient norm {metrics['grad_norm']})"
        scaling = self.program.loss_scale
        if scaling is not None and metrics["loss_scale"] > scaling.minimum:
            # How float16 finds its range: the next step has another factor, and no say of the user's is needed.
            self.display.note(f"step {step} overflowed float16 with a loss scale of {metrics['loss_scale']:g}: skipped")
            return
        if self.skip:
            self.display.note(f"{what}: skipped")
            return
        if self.checkpoints is not None:
            self.checkpoints.wait()
        checkpoint = _latest(self.checkpoints)
        where = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        raise NotFiniteError(
            f'{what}; {where}. It changed no parameter. Lower the learning rate, or go on past it with on_nan="skip"',
            step,
            state,
            checkpoint,
        )

    def _evaluate(self, state: State) -> None:
        if self.validation is None:
            return
        self.evaluated = False
        try:
            with beating().during(EVALUATING):
                loss = float(self.program.evaluate(state, self._until_stopped(self.validation()))["loss"])
        except _StoppedError:
            return  # it is made again when the run goes on
        self.evaluated = True
        self.record.write(self.step, {"validation_loss": loss})
        self.display.note(f"step {self.step}: validation loss {loss:.4f}")
        self.meter.pause()

    def _until_stopped(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Batches of an evaluation, which may take longer than who asks to stop waits."""
        for index, batch in enumerate(batches):
            asks = jax.process_count() == 1 or index % self.log_every == 0
            if asks and self._received(True):
                raise _StoppedError
            yield batch

    def _try_to_save(self, state: State) -> None:
        """A checkpoint, if there is room for it: the run is worth more than any of them but its last."""
        try:
            self._save(state)
        except OSError as error:
            self.display.note(f"{error}. Training goes on; the next attempt is after {self.checkpoint_every} steps")

    def _save(self, state: State) -> None:
        if self.checkpoints is None:
            return
        with beating().during(SAVING):
            self._write(state, self.checkpoints)
        self.saved = self.step
        self.meter.pause()

    def _write(self, state: State, checkpoints: Checkpointer) -> None:
        self._read(state)  # so that no step is in a checkpoint before it is known to be finite
        position = {"samples": self.stream.samples, "identity": self.identity}
        meta = {**self.program.meta(state), "data": position, "evaluated": self.evaluated}
        try:
            checkpoints.wait()
        except OSError as error:  # of the one before; for this one there may be room again
            self.display.note(str(error))
        tree, rows = self.program.to_rows(state)
        checkpoints.save(self.step, tree, meta, rows=rows)


def _latest(checkpoints: Checkpointer | None) -> Path | None:
    step = None if checkpoints is None else checkpoints.latest()
    return None if checkpoints is None or step is None else checkpoints.folder / str(step)


def _scalars(tree: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
