"""Snapshots in host memory: what a killed run goes on from, to the bit."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cjax
from cjax.train import Callback, LossSpike, fit
from cjax.train.snapshots import Snapshots

from .conftest import SmallData, SmallProgram


class Dying(SmallData):
    """Ends the process in the place of a batch, as far as a test can."""

    def __init__(self, after: int, **more: Any) -> None:
        super().__init__(**more)
        self.after = after

    def batches(self, start: int = 0) -> Any:
        for batch in super().batches(start):
            if start >= 4 * self.after:
                raise KeyboardInterrupt
            start += 4
            yield batch


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(nn.Dense(8)(x)))[:, 0]


def loss(model: Any, batch: Any, train: bool) -> Any:
    return jnp.mean((model(batch["x"], train) - batch["y"]) ** 2)


def make(plan: str) -> cjax.Program:
    shapes = SmallData().make(np.arange(4))
    return cjax.parallelize(Net(), loss, optax.adam(0.05), shapes, plan, devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def program() -> cjax.Program:
    return make("data=2 tensor=2 zero=1 precision=bfloat16")


@pytest.fixture(scope="module")
def whole(program: cjax.Program) -> Any:
    return program.to_arrays(fit(program, SmallData(), steps=20).state)


def same(program: cjax.Program, result: Any, whole: Any) -> None:
    def bits(leaf: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), program.to_arrays(result.state), whole)


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    folders = {"folder": tmp_path / "run", "snapshot_folder": tmp_path / "memory"}
    return {"steps": 20, "snapshot_every": 3, "resume": "auto", "log_every": 1, **folders, **more}


def files(tmp_path: Path) -> list[str]:
    return sorted(each.name.split("-")[0] for each in tmp_path.glob("memory/*/*"))


def test_a_killed_run_goes_on_from_its_last_snapshot_to_the_same_bits(
    program: cjax.Program, whole: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for after, first in ((10, 0), (15, 9)):  # there is no checkpoint yet, and at the second one that is older
        data = Dying(after)
        with pytest.raises(KeyboardInterrupt):
            fit(program, data, **settings(tmp_path, checkpoint_every=11 if first else None))
        assert data.read[0] == 4 * first
    assert files(tmp_path) == ["12", "15", "9"] and "from a snapshot" in capfd.readouterr().err
    os.truncate(next(tmp_path.glob("memory/*/15-*")), 600)  # half of one is none
    data = SmallData()
    result = fit(program, data, **settings(tmp_path))
    assert data.read[0] == 4 * 12 and sorted(os.listdir(tmp_path / "run/checkpoints")) == ["11", "20"]
    same(program, result, whole)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 21))
    assert files(tmp_path) == [] and not any((tmp_path / "memory").iterdir()), "the checkpoint has it all"


def test_under_another_plan_and_without_snapshots_the_checkpoint_is_gone_on_from(
    program: cjax.Program, whole: Any, tmp_path: Path
) -> None:
    for other, more in ((make("data=4"), {}), (program, {"snapshot_every": None, "snapshot_folder": None})):
        place = tmp_path / str(len(more))
        with pytest.raises(KeyboardInterrupt):
            fit(program, Dying(11), **settings(place, checkpoint_every=4))
        data = SmallData()
        result = fit(other, data, **settings(place, **more))
        assert data.read[0] == 4 * 8 and result.step == 20
    same(program, result, whole)


def test_a_run_that_begins_anew_reads_no_snapshots_of_one_that_is_gone(program: cjax.Program, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(program, Dying(11), **settings(tmp_path))
    os.rename(tmp_path / "run", tmp_path / "older")
    for resume in (False, "auto"):
        data = Dying(1)
        with pytest.raises(KeyboardInterrupt):
            fit(program, data, **settings(tmp_path, resume=resume))
        assert data.read[0] == 0
    assert len(list((tmp_path / "memory").iterdir())) == 1


def test_what_was_gone_back_from_is_in_no_snapshot(program: cjax.Program, tmp_path: Path) -> None:
    class Spiky(Dying):
        def make(self, rows: np.ndarray) -> Any:
            batch = super().make(rows)
            return {**batch, "y": batch["y"] + 500.0 * np.any(rows == 4 * 16)}

    class Late(Callback):
        def on_step(self, training: Any, step: int, values: Any) -> None:
            if values["loss"] > 1000:
                assert {"18"} <= {*files(tmp_path)} or step == 17

    more: dict[str, Any] = {"checkpoint_every": 10, "callbacks": [LossSpike(window=8), Late()], "snapshot_every": 2}
    with pytest.raises(KeyboardInterrupt):
        fit(program, Spiky(20), **settings(tmp_path, steps=40, **more))
    # Back from step 18 to 10, and killed in step 13, behind the batches that were read until then.
    assert files(tmp_path) == ["12"]
    data = Spiky(99)
    fit(program, data, **settings(tmp_path, steps=40, **more))
    assert data.read[0] == 4 * 20


def test_a_step_counts_where_all_processes_have_it(
    program: cjax.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, state = program._composed.state_shape, program.init(0)
    snapshots = Snapshots(tmp_path, shape, "p", 1, tmp_path / "memory")
    for step in (1, 2, 3):
        snapshots.begin(state, step, {})
    snapshots.wait()
    assert files(tmp_path) == ["1", "2", "3"]
    others = [(2, snapshots._start, 1), (1, snapshots._start, 1)]
    monkeypatch.setattr(snapshots, "_count", 2)
    monkeypatch.setattr("cjax.train.snapshots.tell_all", lambda mine: [mine, others])
    assert snapshots.newest(0) == (2, snapshots._start) and files(tmp_path) == ["2"]
    assert snapshots.newest(2) is None and files(tmp_path) == []
    snapshots.close()


def test_a_part_that_a_host_lost_comes_from_its_peer_and_is_kept_there_again(
    program: cjax.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, state, done = program._composed.state_shape, program.init(0), []
    snapshots = Snapshots(tmp_path, shape, "p", 1, tmp_path / "memory")
    snapshots.begin(state, 1, {})
    snapshots.wait()
    (file,) = snapshots.place.iterdir()
    lost = file.rename(tmp_path / file.name)

    def get(process: int, there: Path) -> None:
        done.append(("get", process))
        if lost is None:
            raise OSError("it is gone")
        there.write_bytes(lost.read_bytes())

    told = [{"layout": snapshots._layout}, {"layout": "of another"}, {"layout": "of another"}]
    fake = {"told": told, "source": 2, "keeper": 1, "get": get, "put": lambda file: done.append(("put", file.name))}
    monkeypatch.setattr(snapshots, "_peers", SimpleNamespace(**fake))
    monkeypatch.setattr(snapshots, "_count", 3)
    start = snapshots._start
    others = [[(1, start, 1)], [(1, start, 0), (1, start, 2), (9, start, 0)]]  # of step 9 not all have theirs
    monkeypatch.setattr("cjax.train.snapshots.tell_all", lambda mine: [mine, *others] if mine != "" else ["", "", ""])
    assert snapshots.newest(0) == (1, start) and done == [("get", 2), ("put", file.name)]
    restored, said = snapshots.read((1, start))
    jax.tree.map(np.testing.assert_array_equal, program.params(restored), program.params(state))
    done.clear()
    others[0].append((1, start, 0))
    assert snapshots.newest(0) == (1, start) and done == [] and said["step"] == 1
    monkeypatch.setattr("cjax.train.snapshots.tell_all", lambda mine: [mine, *others] if mine != "" else ["", "no", ""])
    assert snapshots.newest(0) is None and not list(snapshots.place.glob("1-*")), "another process has not got its part"
    monkeypatch.setattr(snapshots, "_peers", None)
    snapshots.close()


def test_they_keep_within_the_bytes_that_are_said(program: cjax.Program, tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, program._composed.state_shape, "p", 1, tmp_path / "memory")
    state = program.init(0)
    for step in range(1, 6):
        snapshots.begin(state, step, {})
        snapshots.wait()
        held = sum(file.stat().st_size for file in tmp_path.glob("memory/*/*"))
        lines = 3 * 2000  # which say what the files are
        assert held <= snapshots.num_bytes + lines and len(files(tmp_path)) <= 3
    assert held >= snapshots.num_bytes
    snapshots.close(is_kept=True)
    assert not any((tmp_path / "memory").iterdir())


def test_where_there_is_no_room_or_nothing_to_keep_it_is_refused(
    program: cjax.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="a run that has a folder"):
        fit(program, SmallData(), steps=2, snapshot_every=1)
    with pytest.raises(ValueError, match="keeps all of the state on the devices"):
        fit(SmallProgram(), SmallData(), steps=2, snapshot_every=1, folder=tmp_path / "run")
    monkeypatch.setattr("cjax.train.snapshots.shutil.disk_usage", lambda _: type("U", (), {"free": 100}))
    with pytest.raises(OSError, match="MiB are free in .*give snapshot_folder="):
        fit(program, SmallData(), **settings(tmp_path))
