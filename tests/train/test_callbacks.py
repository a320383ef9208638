import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cjax.checkpoint import Checkpointer, inspect
from cjax.job import beating
from cjax.job.beat import CALLING, Doing
from cjax.report.runs import write_page
from cjax.train import Callback, EarlyStop, LossSpike, NotFiniteError, ProfileSteps, fit
from cjax.train.callbacks import Better, value_of

from .conftest import SmallData, SmallProgram


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Heard(Callback):
    """All that it is told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_begin(self, training):
        self.events.append(("begin", training.step, training.steps))

    def before_step(self, training, step):
        self.events.append(("before", step))

    def on_step(self, training, step, values):
        self.events.append(("step", step))

    def on_evaluate(self, training, step, values):
        self.events.append(("evaluate", step, tuple(values)))

    def on_checkpoint(self, training, step):
        self.events.append(("checkpoint", step))

    def on_roll_back(self, training, step):
        self.events.append(("back", step))

    def on_end(self, training):
        self.events.append(("end", training.step))


def test_it_hears_of_everything_in_order(tmp_path: Path, program: SmallProgram):
    heard = Heard()
    fit(program, SmallData(), steps=3, folder=tmp_path, evaluate_every=2, checkpoint_every=2, callbacks=[heard])
    assert heard.events == [
        ("begin", 0, 3),
        ("before", 1),
        ("before", 2),
        ("step", 1),
        ("step", 2),
        ("evaluate", 2, ("validation_loss", "validation_aux")),
        ("checkpoint", 2),
        ("before", 3),
        ("step", 3),
        ("checkpoint", 3),
        ("end", 3),
    ]


def test_the_end_is_told_after_an_error_too(program: SmallProgram):
    heard = Heard()
    with pytest.raises(NotFiniteError):
        fit(program, SmallData(poisoned=(5,)), steps=9, callbacks=[heard])
    assert heard.events[-1] == ("end", 3)


def test_it_may_end_the_run_and_write_numbers(tmp_path: Path, program: SmallProgram):
    class Ends(Callback):
        def on_step(self, training, step, values):
            if step == 4:
                training.write(step, {"mine": float(training.state.w[0])})
                training.stop("enough")

    result = fit(program, SmallData(), steps=50, folder=tmp_path, callbacks=[Ends()])
    assert (result.ended, result.step) == ("enough", 5), "the next step was under way"
    assert inspect(tmp_path).step == 5 and "mine" in lines(tmp_path)[-1]


def test_a_run_that_gets_no_better_ends_early(tmp_path: Path, program: SmallProgram, capfd):
    stop = EarlyStop(patience=3, least=1e-3)
    result = fit(program, SmallData(), steps=500, folder=tmp_path, evaluate_every=5, callbacks=[stop])
    scores = [line["validation_loss"] for line in lines(tmp_path) if "validation_loss" in line]
    assert result.ended == "early stop" and result.step == 5 * len(scores) < 500
    assert all(score > min(scores[:-3]) - 1e-3 for score in scores[-3:]) and scores[-4] == min(scores[:-3])
    assert "stopping early" in capfd.readouterr().err


def test_a_metric_that_is_not_there_is_named_with_those_that_are(program: SmallProgram):
    with pytest.raises(
        ValueError, match="no metric 'validation_aux/of'; there are validation_loss, validation_aux/off"
    ):
        fit(program, SmallData(), steps=2, evaluate_every=1, callbacks=[EarlyStop("validation_aux/of")])
    assert value_of("aux/x", {"aux": {"x": 3}}) == 3.0


def test_a_metric_of_evaluations_needs_some(program: SmallProgram):
    with pytest.raises(ValueError, match="'validation_loss', and this run has no evaluations.*evaluate_every="):
        fit(program, SmallData(), steps=2, callbacks=[EarlyStop()])
    assert fit(program, SmallData(), steps=2, callbacks=[EarlyStop("loss")]).step == 2


@pytest.mark.parametrize("mode, better, worse", [("min", 1.0, 3.0), ("max", 3.0, 1.0)])
def test_what_better_means(mode: Any, better: float, worse: float):
    is_better = Better(mode)
    assert not is_better(float("nan")) and is_better(2.0) and not is_better(2.0)
    assert not is_better(worse) and is_better(better) and not is_better(float("nan"))
    assert is_better.best == better


def test_the_best_checkpoint_stays_and_has_to_be_beaten_by_a_resumed_run(tmp_path: Path):
    """By how far the first weight is off, of which the best is the least that validation saw, and not the last."""
    settings: dict[str, Any] = dict(folder=tmp_path, evaluate_every=3, checkpoint_every=3, keep=1, best_mode="max")
    found = fit(SmallProgram(), SmallData(), steps=30, best="validation_aux/off", **settings)
    off = {line["step"]: line["validation_aux"]["off"] for line in lines(tmp_path) if "validation_aux" in line}
    best = max(off, key=lambda step: off[step])
    assert best == 3 and found.best == tmp_path / "best" / "3" and found.checkpoint == tmp_path / "checkpoints" / "30"
    meta = inspect(found.best).meta
    assert meta["best"] == {"metric": "validation_aux/off", "value": off[best]} and meta["data"]["samples"] == 12
    again = fit(SmallProgram(), SmallData(), steps=36, best="validation_aux/off", resume=True, **settings)
    assert again.best == found.best and again.checkpoint == tmp_path / "checkpoints" / "36"


def test_a_trace_of_the_steps_asked_for(tmp_path: Path, program: SmallProgram, capfd):
    fit(program, SmallData(), steps=6, folder=tmp_path, callbacks=[ProfileSteps(3, 4)])
    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {event["args"]["step_num"] for event in events if event.get("name") == "step"} == {"3", "4"}
    assert f"steps 3 to 4 is in {tmp_path}/profile" in capfd.readouterr().err


def test_a_trace_that_the_run_does_not_reach_the_end_of_is_written(tmp_path: Path, program: SmallProgram):
    fit(program, SmallData(), steps=3, folder=tmp_path, callbacks=[ProfileSteps(3, 40)])
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


class SpikyData(SmallData):
    """One batch is not like the others."""

    def make(self, rows):
        batch = super().make(rows)
        return {**batch, "y": batch["y"] + 50.0 * np.any(rows == 4 * 26)}  # the batch of step 27


def test_a_spike_is_gone_back_from_and_its_batch_is_not_read_again(tmp_path: Path, capfd):
    program, data, heard = SmallProgram(), SpikyData(), Heard()
    result = fit(
        program, data, steps=40, folder=tmp_path, checkpoint_every=10, log_every=1, keep=2,
        callbacks=[LossSpike(window=40), heard],
    )  # fmt: skip
    # Step 28 was under way when the loss of step 27 was looked at, and batch 29 is the next.
    assert ("back", 20) in heard.events and result.step == 40 and result.samples == 4 * (28 + 20)
    said = [line["step"] for line in lines(tmp_path) if "back_from" not in line]
    assert said == list(range(1, 41)), "the steps that were gone back behind are written anew"
    back = lines(tmp_path)[20]
    assert (back["step"], back["back_from"]) == (20, 28) and "the loss of step 27" in back["why"]
    assert max(line["loss"] for line in lines(tmp_path)[21:]) < 1
    assert "the loss of step 27" in capfd.readouterr().err
    # The state of step 20 goes on with the batches behind: by hand, the same bits.
    other, clean = SmallProgram(), SmallData()
    state = other.init(0)
    stream = clean.batches()
    for step in range(1, 49):
        batch = next(stream)
        if not 20 < step <= 28:
            state, _ = other.step(state, batch)
    np.testing.assert_array_equal(result.state.w, state.w)


def test_a_run_killed_behind_a_roll_back_does_not_read_the_bad_batch_again(tmp_path: Path, capfd):
    class Dying(SpikyData):
        def batches(self, start: int = 0):
            for step, batch in enumerate(super().batches(start)):
                if step == 33:
                    raise KeyboardInterrupt
                yield batch

    settings: dict[str, Any] = dict(steps=40, folder=tmp_path, checkpoint_every=20, callbacks=[LossSpike(window=16)])
    with pytest.raises(KeyboardInterrupt):
        fit(SmallProgram(), Dying(), **settings)
    assert inspect(tmp_path).meta["data"]["samples"] == 4 * 28
    capfd.readouterr()
    result = fit(SmallProgram(), SpikyData(), resume=True, **settings)
    assert result.step == 40 and result.samples == 4 * 48 and "spike" not in capfd.readouterr().err


def test_what_is_not_finite_is_gone_back_from_also_at_the_last_step(tmp_path: Path):
    data = SmallData(poisoned=(4 * 11,))
    result = fit(SmallProgram(), data, steps=12, folder=tmp_path, checkpoint_every=5, on_nan="rollback")
    assert result.step == 12 and result.samples == 4 * 14 and np.isfinite(result.loss)
    # The line of the step is gone, since its number is another step's now; that it was is in the file all the same.
    (back,) = [line for line in lines(tmp_path) if "back_from" in line]
    assert (back["step"], back["back_from"]) == (10, 12) and "step 12 was not finite (loss nan" in back["why"]
    write_page([tmp_path], tmp_path / "page.html")
    assert "back from step 12 to step 10: step 12 was not finite" in (tmp_path / "page.html").read_text()


def test_what_comes_again_each_time_ends_the_run(tmp_path: Path):
    data = SmallData(poisoned=tuple(range(20, 2000)))
    with pytest.raises(RuntimeError, match="went back to step 4 3 times"):
        fit(SmallProgram(), data, steps=30, folder=tmp_path, checkpoint_every=4, on_nan="rollback")


def test_a_spike_may_end_the_run(tmp_path: Path):
    result = fit(SmallProgram(), SpikyData(), steps=40, callbacks=[LossSpike("stop", window=40)])
    assert result.ended == "loss spike" and result.step == 28


def test_a_callback_of_ones_own_may_not_go_back_where_nothing_was_kept(program: SmallProgram):
    class Back(Callback):
        def on_step(self, training, step, values):
            training.roll_back("no")

    with pytest.raises(ValueError, match='on_nan="rollback"'):
        fit(program, SmallData(), steps=3, callbacks=[Back()])


def test_a_signal_still_ends_it(tmp_path: Path, program: SmallProgram):
    class Interrupts(Callback):
        def before_step(self, training, step):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    result = fit(program, SmallData(), steps=9, folder=tmp_path, callbacks=[Interrupts()])
    assert (result.ended, result.step) == ("SIGTERM", 3)


@pytest.mark.parametrize(
    "make", [lambda: EarlyStop(patience=0), lambda: EarlyStop(mode="least"), lambda: ProfileSteps(3, 2),
             lambda: LossSpike("skip"), lambda: LossSpike(deviations=0)],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(make: Any):
    with pytest.raises(ValueError):
        make()


def test_the_best_is_kept_also_where_its_step_is_behind_that_of_the_one_before(tmp_path: Path):
    with Checkpointer(tmp_path, keep=1) as bests:
        for step in (9, 6):
            bests.save(step, {"w": np.full(2, step)}, {}, wait=True)
            assert [path.name for path in tmp_path.iterdir()] == [str(step)]
    with Checkpointer(tmp_path, keep=2) as some:
        for step, left in ((4, [4, 6]), (8, [6, 8]), (7, [7, 8])):
            some.save(step, {"w": np.full(2, step)}, {}, wait=True)
            assert sorted(int(path.name) for path in tmp_path.iterdir()) == left


class Wrong(Callback):
    """An error that has nothing to do with checkpoints."""

    def on_step(self, training, step, values):
        if step == 5:
            raise OSError("mine")


def test_an_error_of_a_callback_is_no_failed_checkpoint(tmp_path: Path, capfd):
    with pytest.raises(OSError, match="mine"):
        fit(SmallProgram(), SmallData(), steps=9, folder=tmp_path, checkpoint_every=5, callbacks=[Wrong()])
    assert "another attempt" not in capfd.readouterr().err


def test_going_back_without_room_for_a_checkpoint_is_said(tmp_path: Path, monkeypatch, capfd):
    import cjax.checkpoint.storage as storage

    settled, names = storage.settle, []

    def settle(path: Path) -> None:
        names.append(path.name)
        if path.name == "5" and names.count("5") == 2:
            raise OSError(28, "No space left on device")
        settled(path)

    phases: list[str] = []

    class Beats(Doing):
        def during(self, phase: str) -> Any:
            if phase != CALLING:
                phases.append(phase)
            return super().during(phase)

    monkeypatch.setattr(storage, "settle", settle)
    monkeypatch.setattr("cjax.train.loop.beating", Beats)
    data = SmallData(poisoned=(4 * 6,))
    result = fit(SmallProgram(), data, steps=8, folder=tmp_path, checkpoint_every=5, on_nan="rollback")
    assert result.step == 8 and inspect(tmp_path).step == 8
    assert "a run that is resumed reads again what this one went back behind" in capfd.readouterr().err
    assert phases[-4:] == ["restoring", *["saving"] * 3], "anew, at the end, and the wait for that"


def test_what_a_callback_takes_is_no_steps_time() -> None:
    phases: list[str] = []

    class Slow(Callback):
        def on_step(self, training: Any, step: int, values: Any) -> None:
            phases.append(beating().phase)
            time.sleep(0.5)

    fit(SmallProgram(), SmallData(), steps=4, callbacks=[Slow()])
    assert phases == [CALLING] * 4 and 0 < beating().step_seconds < 0.4


def test_a_step_takes_as_long_as_it_takes_beside_what_is_no_step() -> None:
    doing = Doing()
    doing.step(1)
    for step in (2, 3):
        with doing.during("saving"):
            time.sleep(0.2)
        time.sleep(0.1)
        with doing.during(CALLING), doing.during("saving"):
            time.sleep(0.2)
        doing.step(step)
    assert 0.1 <= doing.step_seconds < 0.2
