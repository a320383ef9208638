import itertools
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import cjax
from cjax.checkpoint import inspect
from cjax.train import Callback, LossSpike, NotFiniteError, ProfileSteps, fit

from .conftest import TRUTH, SmallData, SmallProgram


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


def test_it_learns(program: SmallProgram):
    result = fit(program, SmallData(), steps=200)
    assert (result.step, result.samples, result.ended) == (200, 800, "steps")
    np.testing.assert_allclose(result.state.w, TRUTH, atol=0.1)
    assert result.loss is not None and result.loss < 0.01
    assert result.metrics is None and result.checkpoint is None
    assert 10 < len(program.learned) <= 100 and all(seconds > 0 for seconds in program.learned)


def test_a_run_leaves_a_folder(tmp_path: Path, program: SmallProgram):
    fit(program, SmallData(), steps=25, folder=tmp_path / "r", checkpoint_every=10, log_every=5, evaluate_every=20)
    assert [line["step"] for line in lines(tmp_path / "r")] == [5, 10, 15, 20, 20, 25]
    for line in lines(tmp_path / "r"):
        if "validation_loss" not in line:
            assert set(line) == {"step", "loss", "grad_norm", "skipped", "aux", "samples/s", "memory"}
    assert (tmp_path / "r" / "plan.txt").read_text() == "data=1\n"
    assert "plan    data=1" in (tmp_path / "r" / "report.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir()) == ["10", "20", "25"]
    assert inspect(tmp_path / "r").meta["data"]["samples"] == 100


@pytest.mark.parametrize("killed_after, log_every", [(10, 1), (13, 1), (13, 5)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, killed_after: int, log_every: int):
    settings = dict(checkpoint_every=5, log_every=log_every, seed=3)
    whole = fit(SmallProgram(), SmallData(), steps=30, folder=tmp_path / "whole", **settings)

    class Killed(BaseException):
        pass

    class DyingData(SmallData):
        def batches(self, start: int = 0):
            for step, batch in enumerate(super().batches(start)):
                if step == killed_after:
                    raise Killed
                yield batch

    with pytest.raises(Killed):
        fit(SmallProgram(), DyingData(), steps=30, folder=tmp_path / "cut", **settings)
    data = SmallData()
    resumed = fit(SmallProgram("zero=1"), data, steps=30, folder=tmp_path / "cut", resume=True, **settings)
    assert data.read[0] == killed_after // 5 * 5 * 4
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "cut")) == 30 // log_every == len(lines(tmp_path / "cut"))
    assert resumed.samples == whole.samples
    for a, b in ((resumed.state.w, whole.state.w), (resumed.state.momentum, whole.state.momentum)):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_is_done_does_nothing_more(tmp_path: Path, program: SmallProgram):
    fit(program, SmallData(), steps=6, folder=tmp_path)
    result = fit(program, SmallData(), steps=6, folder=tmp_path, resume=True)
    assert program.num_steps == 6 and result.step == 6 and result.loss is None


def test_resuming_on_other_data_says_so(tmp_path: Path, program: SmallProgram, capfd):
    fit(program, SmallData(), steps=3, folder=tmp_path)
    other = SmallData()
    other.identity = {"made": "of letters"}
    fit(program, other, steps=4, folder=tmp_path, resume=True)
    assert "the data is not that of the run so far" in capfd.readouterr().err


def test_metrics_are_read_one_step_late(program: SmallProgram, monkeypatch):
    """The host must not wait for a step before it has dispatched the next."""
    events = []
    step = program.step

    class Watched:
        def __init__(self, number: int):
            self.number = number

        def __array__(self, dtype=None, copy=None):
            events.append(f"read {self.number}")
            return np.array(1.0, dtype)

    def watched_step(state, batch):
        state, metrics = step(state, batch)
        number = len([event for event in events if event.startswith("step")]) + 1
        events.append(f"step {number}")
        return state, {**metrics, "loss": Watched(number)}

    monkeypatch.setattr(program, "step", watched_step)
    fit(program, SmallData(), steps=3)
    assert events == ["step 1", "step 2", "read 1", "step 3", "read 2", "read 3"]


def test_a_step_that_is_not_finite_stops_the_run_and_names_the_last_good_checkpoint(tmp_path: Path):
    data = SmallData(poisoned=(4 * 17 + 1,))
    with pytest.raises(
        NotFiniteError, match=f"step 18 was not finite.*last good checkpoint is {tmp_path}.*/10"
    ) as error:
        fit(SmallProgram(), data, steps=30, folder=tmp_path, checkpoint_every=10)
    assert error.value.step == 18 and error.value.checkpoint == tmp_path / "checkpoints" / "10"
    assert np.isfinite(error.value.state.w).all()
    assert inspect(tmp_path).step == 10
    assert lines(tmp_path)[-1] == {
        "step": 18,
        "loss": "nan",
        "grad_norm": "nan",
        "skipped": 1,
        "aux/mean": pytest.approx(float(np.mean(fit(SmallProgram(), SmallData(), steps=17).state.w)), rel=1e-5),
    }


def test_a_checkpoint_is_not_written_after_a_step_that_is_not_finite(tmp_path: Path, program: SmallProgram):
    with pytest.raises(NotFiniteError, match="there is no checkpoint yet"):
        fit(program, SmallData(poisoned=(4 * 9,)), steps=30, folder=tmp_path, checkpoint_every=10)
    assert list((tmp_path / "checkpoints").glob("*")) == []


def test_such_steps_can_be_skipped(tmp_path: Path, program: SmallProgram, capfd):
    result = fit(program, SmallData(poisoned=(4 * 7, 90)), steps=200, folder=tmp_path, on_nan="skip", log_every=50)
    np.testing.assert_allclose(result.state.w, TRUTH, atol=0.1)
    assert [line["step"] for line in lines(tmp_path) if line["skipped"]] == [8, 23]
    assert capfd.readouterr().err.count(": skipped") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path, number: signal.Signals, capfd):
    class Interrupted(SmallData):
        def batches(self, start: int = 0):
            for step, batch in enumerate(super().batches(start)):
                if step == 6:
                    os.kill(os.getpid(), number)
                yield batch

    before = signal.getsignal(number)
    result = fit(SmallProgram(), Interrupted(), steps=30, folder=tmp_path, resume_command="cjax train --resume X")
    assert (result.ended, result.step) == (number.name, 7)
    assert result.checkpoint == tmp_path / "checkpoints" / "7"
    assert signal.getsignal(number) is before
    assert f"stopped by {number.name} after step 7; go on with: cjax train --resume X" in capfd.readouterr().err
    resumed = fit(SmallProgram(), SmallData(), steps=30, folder=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.state.w, fit(SmallProgram(), SmallData(), steps=30).state.w)


def test_batches_from_anything_that_can_be_iterated(tmp_path: Path):
    batches = list(itertools.islice(SmallData().batches(), 5))
    whole = fit(SmallProgram(), batches, steps=12, folder=tmp_path / "whole", log_every=1)
    fit(SmallProgram(), batches, steps=7, folder=tmp_path / "parts", log_every=1)
    fit(SmallProgram(), batches, steps=12, folder=tmp_path / "parts", log_every=1, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert whole.samples == 48
    assert fit(SmallProgram(), iter(batches), steps=12).ended == "data"
    with pytest.raises(TypeError, match="NoneType"):  # no batch, and not the end
        fit(SmallProgram(), iter([batches[0], None, batches[1]]), steps=3)


@pytest.mark.parametrize("data", [[], iter([])])
def test_data_without_a_batch_is_refused(data: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=r"gave no batch, and fit was to make 3 steps"):
        fit(SmallProgram(), data, steps=3, folder=tmp_path)
    # What ended with the run before has nothing left, and that is no mistake.
    first = fit(SmallProgram(), (batches := iter(list(itertools.islice(SmallData().batches(), 2)))), steps=2)
    assert fit(SmallProgram(), batches, steps=4, state=first.state, samples=first.samples).ended == "data"


class Fails(Callback):
    def __init__(self, before: int = 0, behind: int = 0) -> None:
        self.before, self.behind = before, behind

    def before_step(self, training: Any, step: int) -> None:
        if step == self.before:
            raise OSError("the network is gone")

    def on_step(self, training: Any, step: int, metrics: Any) -> None:
        if step == self.behind:
            raise OSError("the network is gone")


def _breaks(batches: Iterable[Any]) -> Iterator[Any]:
    yield from itertools.islice(batches, 7)
    raise OSError("the network is gone")


@pytest.mark.parametrize(
    ("callbacks", "step"),
    [([], 7), ([Fails(behind=7)], 8), ([Fails(before=8)], 7)],  # the eighth has begun when the seventh is told of
    ids=["data", "behind a step", "before a step"],
)
def test_what_was_trained_before_an_error_is_kept(callbacks: list[Callback], step: int, tmp_path: Path):
    data = SmallData() if callbacks else _breaks(SmallData().batches())
    with pytest.raises(OSError, match="the network is gone") as error:
        fit(SmallProgram(), data, steps=30, folder=tmp_path, callbacks=callbacks)
    (note,) = error.value.__notes__
    assert f"until step {step} is in {tmp_path}" in note and "go on with resume=True" in note
    resumed = fit(SmallProgram(), SmallData(), steps=30, folder=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.state.w, fit(SmallProgram(), SmallData(), steps=30).state.w)


def test_what_could_not_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("cjax.checkpoint.Checkpointer.save", full)
    with pytest.raises(OSError, match="the network is gone") as error:
        fit(SmallProgram(), _breaks(SmallData().batches()), steps=30, folder=tmp_path)
    assert "until step 7 could not be kept: No space left" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"evaluate_every": 2}, "evaluate_every=2 has nothing to evaluate on: give validation="),
        ({"validation": [1]}, "validation is a list; it is a function"),
        ({"checkpoint_every": 3}, "checkpoint_every=3 has nowhere to write"),
        ({"learning_rate": "cosine"}, "learning_rate is a str; it is a number"),
        ({"callbacks": Fails()}, r"callbacks is a Fails; it is a list: callbacks=\[...\]"),
        ({"callbacks": [Fails]}, r"one is the class Fails: make one, Fails\(\)"),
        ({"callbacks": [print]}, "one is a builtin_function_or_method; each is a cjax.train.Callback"),
        ({"folder": "gs://bucket/run"}, "'gs://bucket/run' is an address.*mount the bucket"),
    ],
)
def test_what_would_do_nothing_or_fail_later_is_refused_at_once(given: dict[str, Any], said: str):
    with pytest.raises((TypeError, ValueError), match=said):
        fit(SmallProgram(), itertools.islice(SmallData().batches(), 9), steps=5, **given)


def test_a_folder_that_holds_what_is_no_runs_is_left_alone(tmp_path: Path):
    kept = tmp_path / "kept"
    fit(SmallProgram(), SmallData(), steps=3, folder=kept)
    (kept / "metrics.jsonl").unlink()  # only the checkpoints were brought along
    with pytest.raises(
        FileExistsError, match=r"holds a run already; continue it with resume=True.*\(its last checkpoint: 3\)"
    ):
        fit(SmallProgram(), SmallData(), steps=3, folder=kept)
    for name in ("plan.txt", "report.txt"):
        mine = tmp_path / name.partition(".")[0] / name
        mine.parent.mkdir()
        mine.write_text("what I plan to report")
        with pytest.raises(FileExistsError, match=f"{name} is no run's, and would be written over"):
            fit(SmallProgram(), SmallData(), steps=3, folder=mine.parent)
        assert mine.read_text() == "what I plan to report"


def test_a_state_that_a_step_has_taken_is_refused():
    batch = np.ones((4, 3), np.float32)
    loss = lambda model, x: ((model(x) - 1) ** 2).mean()  # noqa: E731
    program = cjax.parallelize(nn.Dense(1), loss, optax.sgd(0.1), batch, "data=1", devices=jax.devices()[:1])
    state = program.init(0)
    program.step(state, batch)
    with pytest.raises(ValueError, match="this state was given up"):
        fit(program, [batch], steps=3, state=state)


def test_a_given_state_and_position_go_on(program: SmallProgram):
    first = fit(program, SmallData(), steps=5)
    second = fit(program, SmallData(), steps=9, state=first.state, samples=first.samples)
    np.testing.assert_array_equal(second.state.w, fit(program, SmallData(), steps=9).state.w)


def test_evaluation_is_recorded(tmp_path: Path, program: SmallProgram):
    fit(program, SmallData(), steps=60, folder=tmp_path, evaluate_every=30, log_every=60)
    found = [line["validation_loss"] for line in lines(tmp_path) if "validation_loss" in line]
    assert len(found) == 2 and found[1] < found[0]
    other = fit(program, SmallData(), steps=1, evaluate_every=1, validation=lambda: [SmallData().make(np.arange(3))])
    assert other.step == 1


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(steps=-1), ValueError, "steps >= 0"),
        (dict(log_every=0), ValueError, "log_every >= 1"),
        (dict(checkpoint_every=0), ValueError, "checkpoint_every=0; it needs checkpoint_every >= 1"),
        (dict(evaluate_every=-1), ValueError, "evaluate_every >= 1"),
        (dict(steps=2.5), ValueError, "steps=2.5; it needs steps >= 0, a whole number"),
        (dict(samples=-8), ValueError, "samples >= 0"),
        (dict(keep=0), ValueError, "keep >= 1"),
        (dict(on_nan="ignore"), ValueError, '"stop", "skip" or "rollback"'),
        (dict(on_nan="rollback"), ValueError, "needs checkpoints"),
        (dict(callbacks=[LossSpike()]), ValueError, "needs checkpoints"),
        (dict(best="validation_loss"), ValueError, "folder= and evaluate_every="),
        (dict(checkpoint_every="often"), ValueError, "checkpoint_every"),
        (dict(between_failures=0), ValueError, "more than 0"),
        (dict(log=[print]), TypeError, "write.step, values"),
        (dict(hardware=True), ValueError, "folder"),
        (dict(hardware=-1), ValueError, "above 0"),
        (dict(callbacks=[ProfileSteps(2, 3)]), ValueError, "folder"),
        (dict(resume=True), ValueError, "give folder="),
        (dict(data=7), TypeError, "fit needs something with batches"),
        (dict(data="corpus.txt"), TypeError, "data is a str; fit needs an iterable of batches: read the file"),
        (dict(data={"x": 1}), TypeError, r"data is a dict; .*if that is one batch, write \[data\]"),
        (dict(tensorboard=True), ValueError, "needs a folder"),
    ],
)
def test_what_cannot_be_done_is_refused(program: SmallProgram, arguments: dict, error, message: str):
    with pytest.raises(error, match=message):
        fit(program, **{"data": SmallData(), "steps": 1, **arguments})
    assert program.num_steps == 0


def test_what_is_no_program_is_refused():
    with pytest.raises(TypeError, match="program is a Dense; fit takes what cjax.parallelize returned"):
        fit(nn.Dense(1), SmallData(), steps=1)  # pyright: ignore[reportArgumentType]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path, program: SmallProgram):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        fit(program, SmallData(), steps=2, folder=tmp_path, resume=True)
    fit(program, SmallData(), steps=2, folder=tmp_path)
    with pytest.raises(FileExistsError, match="resume=True"):
        fit(program, SmallData(), steps=2, folder=tmp_path)


def test_nothing_is_left_running(tmp_path: Path, program: SmallProgram):
    fit(program, SmallData(), steps=2, folder=tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]
