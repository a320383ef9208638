import errno
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.checkpoint import Checkpointer, storage

from .conftest import assert_same, make_state


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_latest_and_any_other_step(tmp_path: Path):
    with Checkpointer(tmp_path / "runs" / "one") as checkpoints:
        assert checkpoints.latest() is None
        for step in (9, 10):
            checkpoints.save(step, {"w": np.full(3, step)}, {"data": step})
        assert checkpoints.restore(None, {"w": np.zeros(3, int)})[0]["w"].tolist() == [10, 10, 10]
        assert checkpoints.restore(9, {"w": np.zeros(3, int)})[1]["data"] == 9
        assert checkpoints.latest() == 10


def test_the_oldest_go(tmp_path: Path):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (8, 9, 10, 11):
            checkpoints.save(step, {"w": np.ones(3)}, {})
    assert steps_in(tmp_path) == ["10", "11"]


def test_arrays_may_be_donated_while_they_are_written(tmp_path: Path, monkeypatch):
    """The write is held until the arrays have been overwritten many times over."""
    go = threading.Event()
    finish = storage._finish_writing

    def finish_late(*arguments):
        assert go.wait(30)
        finish(*arguments)

    monkeypatch.setattr(storage, "_finish_writing", finish_late)
    state = make_state()
    expected = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        assert checkpoints.latest() is None, "it must not be visible before it is whole"
        params = overwrite(state["params"])
        for _ in range(5):
            params = overwrite(params)
        jax.block_until_ready(params)
        go.set()
        checkpoints.wait()
        assert checkpoints.latest() == 1
        assert_same(checkpoints.restore(1, expected)[0], expected)


def test_an_unfinished_one_is_ignored_and_then_overwritten(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)}, {}, wait=True)
        os.rename(tmp_path / "1", tmp_path / "2.unfinished")
        checkpoints.save(1, {"w": np.ones(3)}, {}, wait=True)
        assert checkpoints.latest() == 1
        checkpoints.save(2, {"w": np.full(3, 2.0)}, {}, wait=True)
        assert checkpoints.restore(None, {"w": np.ones(3)})[0]["w"].tolist() == [2, 2, 2]
    assert steps_in(tmp_path) == ["1", "2"]


def test_a_failed_write_names_the_last_good_checkpoint_and_the_next_one_works(tmp_path: Path, monkeypatch):
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)}, {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_description", no_space)
            checkpoints.save(2, {"w": np.ones(3)}, {})
            with pytest.raises(OSError, match=f"No space left.*the last whole one is {tmp_path}/1") as error:
                checkpoints.wait()
            assert error.value.errno == errno.ENOSPC
        assert checkpoints.latest() == 1
        checkpoints.save(3, {"w": jnp.ones(3)}, {}, wait=True)
        assert checkpoints.latest() == 3


def test_missing_steps_are_refused_with_those_that_exist(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in .*steps that exist: none"):
            checkpoints.restore(None, {})
        checkpoints.save(4, {"w": np.ones(3)}, {})
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 5 .*steps that exist: 4"):
            checkpoints.restore(5, {"w": np.ones(3)})
    with pytest.raises(ValueError, match="at least one"):
        Checkpointer(tmp_path, keep=0)
