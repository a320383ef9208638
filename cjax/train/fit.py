"""`fit`: the loop around `program.step`."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from cjax.checkpoint import Checkpointer
from cjax.checkpoint.description import as_folder, checkpoint_steps
from cjax.job import AGAIN, beating, member
from cjax.job.beat import CALLING, COMPILING, ENDED, RESTORING
from cjax.job.files import write_whole
from cjax.job.lock import locked
from cjax.mesh import together
from cjax.plan import Plan
from cjax.program import Program, State
from cjax.program.on_disk import on_disk
from cjax.program.state import check_alive
from cjax.program.stored import stored_shape
from cjax.report.runs import write_page
from cjax.train.ahead import get_ready
from cjax.train.callbacks import Callback, KeepBest, LossSpike
from cjax.train.copies import NOT_ON_DEVICES, CopyChecks
from cjax.train.display import Progress, make_display
from cjax.train.loop import Loop, NotFiniteError, latest
from cjax.train.meter import Meter
from cjax.train.pace import Pace, assumed_between_failures
from cjax.train.record import Record, writers_of
from cjax.train.resume import Noting, Resumed, go_on, has_begun
from cjax.train.signals import StopRequest
from cjax.train.snapshots import Snapshots, discard
from cjax.train.stream import Stream
from cjax.train.system import HardwareLog
from cjax.train.watchdog import Watchdog, check_watchdog
from cjax.train.writers import Writer
from cjax.tree import PyTree, kind_of


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
        ended: "steps" when all were done, "data" when an iterator ran out, the signal that stopped it, or what a
            callback said, such as "early stop".
        exit_code: what tells who started the process how it went: 0; 75 ("again") after SIGTERM; 130 after SIGINT.
        best: the checkpoint that scored best, if that was asked for.
        hardware: seconds, and joules by step and by sample, if that was asked for.

    `cjax.train.fit` has an example.
    """

    state: State
    step: int
    samples: int
    loss: float | None
    metrics: Path | None
    checkpoint: Path | None
    ended: str
    best: Path | None = None
    hardware: Mapping[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """The status with which the process should end: see the class."""
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
    checkpoint_every: int | Literal["auto"] | None = None,
    between_failures: float | None = None,
    snapshot_every: int | None = None,
    snapshot_folder: str | Path | None = None,
    snapshot_peers: bool = False,
    keep: int = 3,
    best: str | None = None,
    best_mode: Literal["min", "max"] = "min",
    on_nan: Literal["stop", "skip", "rollback"] = "stop",
    verify_copies_every: int | None = None,
    on_corrupt: Literal["stop", "rollback"] = "stop",
    log_every: int = 10,
    log: Sequence[Writer] = (),
    learning_rate: float | Callable[[int], Any] | None = None,
    hardware: bool | float = False,
    watchdog: float | Literal["auto"] | None = None,
    callbacks: Sequence[Callback] = (),
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
        state: where to start; a fresh one if None. With resume="auto", where nothing was kept yet.
        samples: global samples already read, with `state`; as `FitResult.samples` says.
        folder: of the run; None keeps nothing on disk, but under `cjax run --workers`, which has a folder for one fit.
        resume: True continues the run of `folder`, under this program's plan, whatever the plan was: behind its last
            checkpoint, or behind the last step where this plan keeps each on disk. "auto" does so too, and begins anew
            where nothing was kept yet. Where not given: "auto" under `cjax run --workers`, else False.
        seed: of the fresh state.
        validation: gives the batches to evaluate on; `data.validation` if there is one.
        evaluate_every: steps between evaluations; None never evaluates.
        checkpoint_every: steps between checkpoints; None writes one at the end; "auto" as often as loses least, by
            what they are measured to cost and `between_failures`.
        between_failures: seconds, on average, between failures of the whole run, for "auto"; a day if not given, or
            50,000 hours of a device, if that is less.
        snapshot_every: steps between copies of the state in host memory, which outlive the process: "auto" and True of
            `resume` go on from them first, under the same plan on as many processes. None makes none.
        snapshot_folder: where these are instead: a folder of each host, on a quick disk say.
        snapshot_peers: each process also keeps what one of another host holds, so that a host may lose its memory.
        keep: how many checkpoints stay.
        best: a number of evaluations, such as "validation_loss" or "validation_aux/accuracy": the checkpoint that has
            the best one stays, whatever `keep` is, in `best`.
        best_mode: whether less is better, or more.
        on_nan: "stop" raises at the first step that is not finite; "skip" goes on without what it would have done;
            "rollback" goes back to the last checkpoint, and on behind the data read so far. Overflows of float16 are
            not meant, as long as the loss scale can still be lowered.
        verify_copies_every: steps between comparisons of what several devices hold alike, which a device that fails
            without a word has otherwise; also before each checkpoint. None compares nothing.
        on_corrupt: "stop" raises where copies differ, naming the device; "rollback" goes back to the last checkpoint,
            and on with the same batches.
        log_every: steps between lines of metrics. Every step is watched, logged or not.
        log: where metrics go beside their file: objects with `write(step, values)` and `close()`, such as those of
            `cjax.train`. The first process writes.
        learning_rate: the optimizer's, to be logged: a number, or its function of the number of updates.
        hardware: read what the hardware does into `system.jsonl`, every 5 seconds, or so many; `report.html` draws it.
        watchdog: "auto" ends the process where nothing new came for 10 seconds, or five steps if that is more, or, of
            anything besides a step, an hour: with the stacks of its threads, and with status 75, "again". A number is
            the seconds in the place of 10. Under `cjax run --workers` it is the supervisor that sees to it.
        callbacks: told of what happens; see `cjax.train.Callback`.
        tensorboard: also write TensorBoard's event files.
        resume_command: what to print as the way to go on.

    Raises:
        NotFiniteError: see `on_nan`.
        CopiesDifferError: see `on_corrupt`.
        BlockingIOError: another run trains in `folder` now.
        FileExistsError: `folder` holds a run, and `resume` is False; or the disk holds another run.
        FileNotFoundError: `resume` is True, and nothing was kept of the run.
        OSError: the checkpoint at the end could not be written; it says which one is whole.
        TypeError: no program, no batches, or what is no function or callback.
        ValueError: arguments out of their bounds, or that need another one, with what to write.

    >>> import flax.linen as nn, jax.numpy as jnp, optax
    >>> from cjax import parallelize
    >>> batch, loss = jnp.ones((8, 3)), lambda model, x: ((model(x) - 1) ** 2).mean()
    >>> program = parallelize(nn.Dense(1), loss, optax.sgd(0.1), batch, "data=1", devices=jax.devices()[:1])
    >>> result = fit(program, [batch] * 3, steps=3, log_every=100)
    >>> result.step, result.ended, result.exit_code
    (3, 'steps', 0)
    """
    if not hasattr(program, "step"):
        raise TypeError(f"program is {kind_of(program)}; fit takes what cjax.parallelize returned")
    _check_counts(steps=(steps, 0), log_every=(log_every, 1), samples=(samples, 0))
    every = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every, "keep": keep}
    every |= {"verify_copies_every": verify_copies_every, "snapshot_every": snapshot_every}
    _check_counts(**{name: (number, 1) for name, number in every.items() if number not in (None, "auto")})
    if on_nan not in ("stop", "skip", "rollback"):
        raise ValueError(f'fit got on_nan={on_nan!r}; it needs on_nan "stop", "skip" or "rollback"')
    _check_corrupt(on_corrupt, verify_copies_every, data)
    check_watchdog(watchdog)
    _check_calls(validation, learning_rate, callbacks)
    if isinstance(state, State):
        check_alive(state)
    folder, goes_on = _place(folder, resume, state)
    if evaluate_every is not None and validation is None and getattr(data, "validation", None) is None:
        raise ValueError(
            f"evaluate_every={evaluate_every} has nothing to evaluate on: give validation=, a function that returns "
            "batches, as validation=lambda: held_out"
        )
    if checkpoint_every is not None and folder is None:
        raise ValueError(f"checkpoint_every={checkpoint_every!r} has nowhere to write checkpoints: give folder=")
    if best is not None and (folder is None or not evaluate_every):
        raise ValueError(f"best={best!r} keeps a checkpoint by what evaluations give: give folder= and evaluate_every=")
    goes_back = "rollback" in (on_nan, on_corrupt) or any(
        isinstance(c, LossSpike) and c.then == "rollback" for c in callbacks
    )
    if goes_back and (folder is None or not checkpoint_every or on_disk(program) is not None):
        raise ValueError(
            "going back needs checkpoints to go back to: give folder= and checkpoint_every=. (Where a plan keeps all "
            "of its layers on disk, that has gone on too, and can't be gone back from.)"
        )
    if between_failures is not None and not between_failures > 0:
        raise ValueError(f"fit got between_failures={between_failures!r}; it needs seconds, more than 0")
    get_ready(program, folder)
    writers = writers_of(folder, tensorboard, log)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(_alone(folder))
            _refuse_anothers(folder, goes_on, resume_command)
        stop = stack.enter_context(StopRequest())
        beat = beating()
        stack.enter_context(Watchdog(beat, watchdog if member() is None else None))
        checkpoints = stack.enter_context(Checkpointer(folder / "checkpoints", keep)) if folder else None
        disk = None if folder is None else on_disk(program)
        command = resume_command or f"fit(..., folder={str(folder)!r}, resume=True)"
        identity, notes, evaluated = getattr(data, "identity", None), [], True
        where = (snapshot_folder, not goes_on, snapshot_peers)
        snapshots = _snapshots(program, folder, snapshot_every, *where)
        if snapshots is not None:
            stack.callback(snapshots.close)
            notes.append(f"snapshots take up to {snapshots.num_bytes / 2**20:,.0f} MiB in {snapshots.place}")
        if checkpoints is not None and goes_on == "auto":
            goes_on = has_begun(checkpoints, disk, None if state is None else folder, snapshots)
        if goes_on:
            assert checkpoints is not None and folder is not None
            beat.turn(RESTORING)
            resumed = go_on(program, data, checkpoints, disk, folder, snapshots)
            state, samples, evaluated = resumed.state, resumed.samples, resumed.evaluated
            notes += resumed.notes
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
        platform = None if disk is not None else program.mesh.devices.flat[0].platform
        beat.tell(first=first, steps=steps, ended=None, platform=platform)
        is_first = jax.process_index() == 0
        display = make_display(steps, first, is_first)
        stack.callback(display.close)
        for note in notes:
            display.note(note)
        display.phase("compiling")
        beat.turn(COMPILING)
        if folder and is_first:
            _describe(folder, program)
        copies = None
        if verify_copies_every is not None:
            if stored_shape(program) is None:
                raise ValueError(NOT_ON_DEVICES)
            copies = CopyChecks(state, verify_copies_every, on_corrupt == "rollback")
        meter = Meter(program, getattr(data, "sequence", None))
        record = Record(writers if is_first else (), log_every)
        watch = HardwareLog(5.0 if hardware is True else float(hardware)) if hardware else None
        best_place = folder / "best" if folder and best else None
        bests = stack.enter_context(Checkpointer(best_place, keep=1)) if best_place else None
        own: list[Callback] = [KeepBest(best, best_mode, bests)] if best else []
        own += [watch] if watch else []
        run = Loop(
            program,
            Stream(data, samples, jax.process_count()),
            meter,
            checkpoints,
            record,
            display,
            [record, Progress(display, meter.names), *own, *callbacks],
            skip=on_nan == "skip",
            log_every=log_every,
            validation=validation or getattr(data, "validation", None),
            evaluate_every=evaluate_every,
            pace=Pace(checkpoint_every, between_failures or assumed_between_failures(program.mesh.size), first),
            identity=identity,
            noting=noting,
            # Of a step that the disk has there may be no checkpoint yet.
            saved=-1 if goes_on and checkpoints is not None and checkpoints.latest() != first else first,
            state=state,
            steps=steps,
            folder=folder,
            rolls_back=on_nan == "rollback",
            goes_back=goes_back,
            best=bests,
            copies=copies,
            snapshots=snapshots,
            rate=learning_rate,
            stop_request=stop,
            evaluated=evaluated,
        )
        for callback in run.callbacks:
            stack.callback(callback.on_end, run)
        ended = run.go()
        beat.turn(CALLING)  # who ends may take its time
        if ended in signal.Signals.__members__:
            how = f"go on with: {command}" if folder else "nothing was saved, because no folder was given"
            display.note(f"stopped by {ended} after step {run.step}; {how}")
    metrics = None if folder is None else folder / "metrics.jsonl"
    if watch is not None and folder is not None and is_first:
        try:
            write_page([folder], folder / "report.html")
        except (OSError, ValueError) as error:  # the run is done, whatever its page
            display.note(
                f"report.html could not be written: {error}. The run is done; cjax report {folder} tries again"
            )
    beat.tell(ended=ended)
    beat.turn(ENDED)  # nothing more comes into the folder, and others may go on in it
    return FitResult(
        run.state,
        run.step,
        run.stream.samples,
        run.loss,
        metrics,
        latest(checkpoints),
        ended,
        latest(run.best),
        None if watch is None else watch.summary,
    )


_taken: set[Path] = set()  # of jobs, by a fit of this process that was given no folder


def _place(folder: Any, resume: Any, state: State | None) -> tuple[Path | None, bool | str]:
    """Where a run is kept, and whether it goes on: as told, or as the job says that this process is a worker of."""
    mine = member()
    if folder is None and mine is not None:
        if mine.folder in _taken:
            raise ValueError(
                f"an earlier fit of this script has the job's folder, {mine.folder}: give folder=... to each fit"
            )
        folder = mine.folder
        _taken.add(folder)
    if resume is None:
        resume = "auto" if mine is not None else False
    if resume not in (True, False, "auto"):
        raise ValueError(f'fit got resume={resume!r}; it needs resume True, False or "auto"')
    folder = None if folder is None else as_folder(folder)
    if resume and (folder is None or (state is not None and resume != "auto")):
        raise ValueError(
            f'resume={resume!r} continues the run of a folder: give folder=..., and no state but with resume="auto", '
            "which takes it where nothing was kept yet"
        )
    return folder, resume


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other run trains in this folder meanwhile. In that of a job, the job's supervisor sees to it."""
    mine = member()
    with contextlib.ExitStack() as stack:
        with together("begin a run", folder):
            if jax.process_index() == 0 and (mine is None or mine.folder != folder):
                stack.enter_context(locked(folder))
        yield


def _refuse_anothers(folder: Path, goes_on: bool | str, command: str | None) -> None:
    if goes_on:
        return
    steps = checkpoint_steps(folder / "checkpoints")
    if steps or (folder / "metrics.jsonl").exists():
        how, kept = command or 'resume=True, or resume="auto"', f" (its last checkpoint: {steps[-1]})" if steps else ""
        raise FileExistsError(f"{folder} holds a run already; continue it with {how}, or name another folder{kept}")
    for name, is_ours in (("plan.txt", _is_plan), ("report.txt", lambda text: text.startswith("plan    "))):
        file = folder / name
        if file.exists() and not is_ours(file.read_text(errors="replace")):
            raise FileExistsError(f"{file} is no run's, and would be written over: give the run a folder of its own")


def _is_plan(text: str) -> bool:
    try:
        return bool(Plan.parse(text.strip()))
    except ValueError:
        return False


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (number, least) in counts.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise ValueError(f"fit got {name}={number!r}; it needs {name} >= {least}, a whole number")


def _check_calls(validation: Any, learning_rate: Any, callbacks: Any) -> None:
    if validation is not None and not callable(validation):
        raise TypeError(f"validation is {kind_of(validation)}; it is a function that returns batches: lambda: batches")
    if learning_rate is not None and not callable(learning_rate) and not isinstance(learning_rate, int | float):
        if np.ndim(learning_rate) or not hasattr(learning_rate, "dtype"):
            raise TypeError(f"learning_rate is {kind_of(learning_rate)}; it is a number, or its function of updates")
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks is {kind_of(callbacks)}; it is a list: callbacks=[...]")
    for each in callbacks:
        if not isinstance(each, Callback):
            named = (
                f"the class {each.__name__}: make one, {each.__name__}()" if isinstance(each, type) else kind_of(each)
            )
            raise TypeError(f"of callbacks, one is {named}; each is a cjax.train.Callback, of a class made from it")


def _check_corrupt(on_corrupt: str, verify_copies_every: int | None, data: Any) -> None:
    if on_corrupt not in ("stop", "rollback"):
        raise ValueError(f'fit got on_corrupt={on_corrupt!r}; it needs on_corrupt "stop" or "rollback"')
    if on_corrupt == "rollback" and verify_copies_every is None:
        raise ValueError('on_corrupt="rollback" says what follows where copies differ: give verify_copies_every= too')
    if on_corrupt == "rollback" and not hasattr(data, "batches") and iter(data) is data:
        raise ValueError(
            'on_corrupt="rollback" reads batches again, and an iterator gives each once: give what has batches(start), '
            "or an iterable that can be read anew"
        )


def _snapshots(
    program: Program, run: Path | None, every: int | None, folder: Any, is_new: bool, has_peers: bool
) -> Snapshots | None:
    if every is None:
        if has_peers or folder is not None:
            raise ValueError("snapshot_peers= and snapshot_folder= say where snapshots go: give snapshot_every= too")
        if run is not None:
            discard(run)
        return None
    shape = stored_shape(program)
    if shape is None or run is None:
        raise ValueError(
            "snapshots are of a run that has a folder, and of a plan that keeps all of the state on the devices: give "
            "folder=, or leave out snapshot_every="
        )
    return Snapshots(run, shape, str(program.plan), every, folder, is_new, has_peers)


def _refuse_unseen(resumed: Resumed, checkpoints: Checkpointer) -> None:
    """A run that was to stop at a step that is not finite does not go past it because it was killed there."""
    if resumed.unseen:
        step = int(resumed.state.step)
        raise NotFiniteError(
            f"of the last steps before step {step}, {resumed.unseen} were not finite, where the run was to stop. They "
            'changed no parameter. Lower the learning rate, and go on past them with on_nan="skip" (--on-nan skip)',
            step,
            resumed.state,
            latest(checkpoints),
        )


def _describe(folder: Path, program: Program) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "plan.txt", f"{program.plan}\n")
    write_whole(folder / "report.txt", f"{program.report()}\n")
