"""Where a run goes on whose plan keeps each step on disk; with real disks in `tests/cli/test_train.py`."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.program.on_disk import Elsewhere
from cjax.train import NotFiniteError, fit
from cjax.train.resume import has_begun

from .conftest import SmallData, SmallProgram


class SmallDisk:
    """What `fit` uses of `cjax.program.on_disk.OnDisk`."""

    folder = "/scratch/rows"

    def __init__(self) -> None:
        self.kept: tuple[int, dict[str, Any]] | None = None
        self.noted: dict[str, Any] = {}
        self.state: Any = None
        self.skipped = 0

    def note(self, facts: Any) -> None:
        self.noted = json.loads(json.dumps(facts or {}))

    def commit(self, state: Any, skipped: int) -> None:
        self.skipped += skipped
        self.state, self.kept = jax.tree.map(jnp.copy, state), (int(state.step), self.noted)

    def scaling(self, state: Any) -> Any:
        return SimpleNamespace(num_skipped=self.skipped)


class DiskProgram(SmallProgram):
    """Each step is on the disk."""

    def __init__(self, disk: SmallDisk, plan: str = "data=1") -> None:
        super().__init__(plan)
        self.disk = disk

    def init(self, seed: int = 0) -> Any:
        state = super().init(seed)
        if not isinstance(state.step, jax.core.Tracer):  # nor does a shape
            self.disk.commit(state, 0)
        return state

    def step(self, state: Any, batch: Any) -> Any:
        state, metrics = super().step(state, batch)
        self.disk.commit(state, int(metrics["skipped"]))
        return state, metrics

    def restore(self, path: Path) -> Any:
        state = super().restore(path)
        self.disk.commit(state, 0)
        return state

    def resume(self) -> Any:
        return jax.tree.map(jnp.copy, self.disk.state)


class Killed(BaseException):
    """In the place of a signal."""


class DyingData(SmallData):
    def __init__(self, after: int, **more: Any) -> None:
        super().__init__(**more)
        self.after = after

    def batches(self, start: int = 0) -> Any:
        for batch in super().batches(start):
            if len(self.read) > self.after:
                raise Killed
            yield batch


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    found = SmallDisk()
    room = sys.modules[fit.__module__]  # of which the package has the function by the same name
    monkeypatch.setattr(room, "on_disk", lambda program: getattr(program, "disk", None))
    return found


def killed(disk: SmallDisk, folder: Path, after: int, **more: Any) -> None:
    with pytest.raises(Killed):
        fit(DiskProgram(disk), DyingData(after), steps=30, folder=folder, **more)


def test_it_goes_on_from_the_disk_where_that_is_further(tmp_path: Path, disk: SmallDisk, capfd: Any) -> None:
    whole = fit(SmallProgram(), SmallData(), steps=30)
    killed(disk, tmp_path, 13, checkpoint_every=10)
    assert disk.kept is not None and disk.kept[0] == 13 and not disk.noted, "who steps on by hand is another"
    data = SmallData()
    result = fit(DiskProgram(disk), data, steps=30, folder=tmp_path, resume=True)
    assert data.read[0] == 13 * 4 and (result.step, result.samples) == (30, whole.samples)
    np.testing.assert_array_equal(result.state.w, whole.state.w)
    assert "resuming after step 13, from /scratch/rows" in capfd.readouterr().err


def test_a_checkpoint_goes_before_a_disk_that_is_no_further(tmp_path: Path, disk: SmallDisk) -> None:
    fit(DiskProgram(disk), SmallData(), steps=10, folder=tmp_path)
    disk.state = None  # it is not asked
    fit(DiskProgram(disk), SmallData(), steps=11, folder=tmp_path, resume=True)
    # A plan that keeps nothing on disk has gone on to step 12, and the first one's disk to 13 once.
    fit(SmallProgram("zero=1"), SmallData(), steps=12, folder=tmp_path, resume=True)
    assert disk.kept is not None
    disk.kept = 13, disk.kept[1]
    disk.state = None
    assert fit(DiskProgram(disk), SmallData(), steps=14, folder=tmp_path, resume=True).step == 14


def test_a_disk_with_another_run_or_with_nobodys_is_not_gone_on_from(tmp_path: Path, disk: SmallDisk) -> None:
    killed(disk, tmp_path / "mine", 5)
    killed(SmallDisk(), tmp_path / "other", 5)
    with pytest.raises(FileExistsError, match=f"/scratch/rows holds the run of {tmp_path}/mine after step 5"):
        fit(DiskProgram(disk), SmallData(), steps=9, folder=tmp_path / "other", resume=True)
    assert disk.kept is not None
    disk.kept = 5, {}
    with pytest.raises(FileNotFoundError, match="holds a state after step 5, is of this run. If it is, go on"):
        fit(DiskProgram(disk), SmallData(), steps=9, folder=tmp_path / "mine", resume=True)
    with pytest.raises(FileNotFoundError, match="before it had kept anything. Begin it anew"):
        fit(SmallProgram(), SmallData(), steps=9, folder=tmp_path / "mine", resume=True)


def test_a_state_that_was_given_is_begun_from_until_the_disk_holds_this_run(tmp_path: Path) -> None:
    checkpoints: Any = SimpleNamespace(latest=lambda: None)
    disk: Any = SmallDisk()
    for note, begun, begun_with_a_state in (
        ({}, True, False),  # what the state was read from
        ({"run": str(tmp_path / "another")}, True, False),
        ({"run": str(tmp_path.resolve())}, True, True),
    ):
        disk.kept = (7, note)
        assert has_begun(checkpoints, disk) == begun
        assert has_begun(checkpoints, disk, tmp_path) == begun_with_a_state


def test_a_run_that_was_to_stop_does_not_go_past_a_step_that_is_not_finite(tmp_path: Path, disk: SmallDisk) -> None:
    poisoned = (4 * 7,)
    with pytest.raises(NotFiniteError, match="step 8 was not finite"):
        fit(DiskProgram(disk), SmallData(poisoned=poisoned), steps=30, folder=tmp_path)
    assert disk.kept is not None and disk.kept[0] == 9, "it is seen when the next is under way"
    again = {"folder": tmp_path, "resume": True, "steps": 30}
    with pytest.raises(NotFiniteError, match="of the last steps before step 9, 1 were not finite"):
        fit(DiskProgram(disk), SmallData(poisoned=poisoned), **again)
    result = fit(DiskProgram(disk), SmallData(poisoned=poisoned), on_nan="skip", **again)
    wanted = fit(SmallProgram(), SmallData(poisoned=poisoned), steps=30, on_nan="skip")
    np.testing.assert_array_equal(result.state.w, wanted.state.w)


def test_other_data_is_told_apart_however_much_it_says(tmp_path: Path, disk: SmallDisk, capfd: Any) -> None:
    killed(disk, tmp_path, 3)
    assert disk.kept is not None and disk.kept[1]["data"] == SmallData.identity
    other = SmallData()
    other.identity = {"files": "x" * 10_000}
    fit(DiskProgram(disk), other, steps=5, folder=tmp_path, resume=True)
    assert "the data is not that of the run so far" in capfd.readouterr().err
    assert len(json.dumps(disk.kept)) < 1000


@pytest.mark.parametrize(
    ("differing", "words"),
    [
        (("plan",), "under plan zero=1 on 2 devices, and this is .* Go on with all options as they were, how to go on, "
         "and interrupt that after a step"),
        (("plan", "opt"), "began with another optimizer, .* as they were, how to go on; or begin anew, in another"),
        (("params", "opt"), "began with another model"),
    ],
)  # fmt: skip
def test_what_a_run_has_on_the_disk_of_another_program_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differing: Any, words: str
) -> None:
    fit(SmallProgram(), SmallData(), steps=1, folder=tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine/checkpoints")
    kept = [
        Elsewhere(Path("/rows/a"), 4, {"run": str(tmp_path / "other")}, "", ("plan",)),
        Elsewhere(Path("/rows/b"), 2, {"run": str(tmp_path / "mine"), "how": ""}, "", ("plan",)),
        Elsewhere(
            Path("/rows/c"), 3, {"run": str(tmp_path / "mine"), "how": "how to go on"}, "zero=1 on 2 devices", differing
        ),
    ]
    monkeypatch.setattr(sys.modules["cjax.train.resume"], "elsewhere", lambda program: kept)
    with pytest.raises(FileNotFoundError, match=f"but /rows/c holds this run after step 3, .*{words}"):
        fit(SmallProgram(), SmallData(), steps=2, folder=tmp_path / "mine", resume=True)
